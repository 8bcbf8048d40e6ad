"""What it costs, and against whom: benchmarks of Outrider. Nothing of the project imports this."""
