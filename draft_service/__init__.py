"""The draft service: the front door, and the small model behind it."""

import outrider  # noqa: F401  # before gRPC, which then logs as that says
