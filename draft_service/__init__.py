"""The draft service: serves clients, drafts with a small model, and has a verifier judge the drafts."""

import outrider  # noqa: F401  # before gRPC: it configures gRPC's logging
