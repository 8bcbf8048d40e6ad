"""What both services stand on, beside the model: their life, settings, telemetry, and what they read and write."""
