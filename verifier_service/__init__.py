"""The verifier service: runs the target model and judges proposals. It knows nothing of who drafts, or how."""

import outrider  # noqa: F401  # before gRPC, which then logs as that says
