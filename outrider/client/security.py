"""How a client speaks to draft services: TLS or plaintext, and the token that its calls carry."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from outrider.rpc.auth import OwnToken
from outrider.rpc.channel import is_local
from outrider.rpc.tls import TLS, ChannelTLS

Metadata: TypeAlias = tuple[tuple[str, str], ...]


class Security:
    """What a client was told of it."""

    def __init__(self, tls: TLS | None = None, token_file: str | Path | None = None) -> None:
        """Raises `ValueError` (`FileProblem`) where a file is missing, or is not what it should be."""
        self.tls = None if tls is None else ChannelTLS(tls)
        self._token = None if token_file is None else OwnToken(token_file)

    def metadata(self) -> Metadata:
        """What every call carries, as its file has it now."""
        return () if self._token is None else self._token.metadata()


def check_plaintext(names: Sequence[str], *, tls: TLS | None, plaintext: bool) -> None:
    """Checks that plaintext stays on this machine, or is meant to leave it.

    Raises:
        ValueError: neither; or both TLS and plaintext are asked for.
    """
    if tls is not None and plaintext:
        raise ValueError("tls and plaintext exclude each other")
    for name in names:
        if tls is None and not plaintext and not is_local(name):
            raise ValueError(
                f"{name} is not a loopback address, and plaintext can be read on the way there: give tls=TLS(...), or "
                "plaintext=True where the network is trusted"
            )
