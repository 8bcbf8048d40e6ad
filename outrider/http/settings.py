"""The settings of the front."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ServerSettings:
    """How the front listens, whom it serves, and how it answers: the options of `outrider gateway` that begin with
    `--http`, which describe them, and some more.

    Attributes:
        body_timeout: seconds until a body must have arrived.
        framing: options of every text that hide its token counts from the network, of `outrider.client.Options`. With
            them there is no playground, whose stream names every round.
        idle_timeout: seconds that a connection may be without a whole request.
        slow_client_timeout: seconds that an answer may wait for its reader.
        grace: seconds that answers may take to end after a signal.
    """

    address: str
    tls_cert: Path | None = None
    tls_key: Path | None = None
    key_file: Path | None = None
    plaintext: bool = False
    client_rate: float | None = None
    client_burst: int | None = None
    max_client_sequences: int | None = None
    allowed_hosts: Sequence[str] = ()
    cors_origins: Sequence[str] = ()
    model: str | None = None
    max_samples: int = 256
    timeout: float = 600.0
    max_body_bytes: int = 16 * 1024 * 1024
    body_timeout: float = 60.0
    playground: bool = True
    framing: Mapping[str, Any] = field(default_factory=dict)
    vllm_metrics: bool = False
    idle_timeout: float = 30.0
    slow_client_timeout: float = 30.0
    grace: float = 30.0
