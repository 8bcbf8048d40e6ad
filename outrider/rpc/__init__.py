"""Servers, channels and errors over gRPC. Knows no model, no tensor, and not which service it carries."""
