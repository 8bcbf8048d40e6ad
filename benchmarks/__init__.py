"""Benchmarks of Outrider: its costs, beside those of others. No other package imports this one."""
