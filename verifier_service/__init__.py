"""The verifier service: runs the target model and judges proposals."""

import outrider  # noqa: F401  # before gRPC, which then logs as that says
