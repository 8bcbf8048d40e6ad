"""Health on a port of its own, in plaintext: for probes that have no certificate.

It says what the service's own port says of its health, and nothing else is there.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from outrider.rpc.health import HealthState
from outrider.rpc.server import bind, create_server

# Requests name a service, and answers are a number.
_MAX_MESSAGE_BYTES = 4096


@asynccontextmanager
async def health_port(health: HealthState, address: str) -> AsyncIterator[str]:
    """Answers at `address`, `HOST:PORT`, until left; yields the address with the real port.

    Raises:
        StartupError: the port is taken, or the host is not this machine's.
    """
    server = create_server(max_message_bytes=_MAX_MESSAGE_BYTES, max_concurrent_streams=64)
    health.register(server)
    bound = bind(server, address)
    await server.start()
    try:
        yield bound
    finally:
        await server.stop(None)
