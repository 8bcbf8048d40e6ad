"""Import this before gRPC: it chooses how gRPC's core waits for messages, in a process that is a client alone.

By default the core hands each message from a thread that waits for the network to one that waits for messages. Without
the experiment `event_engine_client` one thread does both, which costs two thirds of the processor time. The core reads
the variable when it is imported, so it is removed at once: the services that this process starts keep their default.
"""

import os
import sys

_VARIABLE = "GRPC_EXPERIMENTS"

if "grpc" not in sys.modules and _VARIABLE not in os.environ:
    os.environ[_VARIABLE] = "-event_engine_client"
    try:
        import grpc  # noqa: F401
    finally:
        del os.environ[_VARIABLE]
