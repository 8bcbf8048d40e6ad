"""The OpenAI-compatible front: HTTP requests become calls of draft services. Needs the extra `http`, and no torch."""
