"""Shared by both services and their clients. This module imports nothing of ours."""

import os

# gRPC's core logs connections to standard error; it reads this variable when it is imported. Failures arrive as the
# status of a call anyway. GRPC_VERBOSITY=error in the environment shows its lines.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
