"""Running it: life, metrics, traces, dashboards and alerts of real services."""
