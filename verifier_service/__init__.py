"""The verifier service: runs the target model and verifies proposals."""

import outrider  # noqa: F401  # before gRPC: it configures gRPC's logging
