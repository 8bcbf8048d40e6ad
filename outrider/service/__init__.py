"""Shared by both services: lifecycle, settings, loading, logs, metrics, traces, and conversion of messages."""
