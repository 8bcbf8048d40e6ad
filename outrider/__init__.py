"""What both services and their clients stand on; imports nothing of its own by itself."""

import os

# gRPC's core writes to standard error by itself, of connections that come and go, and reads this when it is imported.
# All that matters of it comes as the status of a call. GRPC_VERBOSITY=error in the environment brings its lines back.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
