"""Where plaintext may be spoken without being asked for: where no network is."""

from __future__ import annotations

import ipaddress

SOCKET = "unix:"
"""What the address of a socket in the file system begins with; its absolute path follows."""


def is_local(address: str) -> bool:
    """Whether `HOST:PORT` or `unix:PATH` is reached from this machine alone. A name but `localhost` may be anywhere."""
    if address.startswith(SOCKET):
        return True
    host = address.rpartition(":")[0].strip("[]").partition("%")[0]
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
