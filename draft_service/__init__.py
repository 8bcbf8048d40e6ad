"""The draft service: serves clients, drafts tokens with a small model, and sends them to a verifier."""

import outrider  # noqa: F401  # before gRPC: it configures gRPC's logging
