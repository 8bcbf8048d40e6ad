"""Servers, channels and errors over gRPC."""
