"""The settings of the front."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ServerSettings:
    """How the front listens, whom it serves, and how it answers.

    Attributes:
        address: `HOST:PORT`; port 0: a free one.
        tls_cert: PEM file of the certificate and its chain; None: plaintext.
        tls_key: PEM file of its private key.
        key_file: file of the keys that clients send, one a line; None: no key is asked for.
        plaintext: allow plaintext at addresses that are not loopback.
        client_rate: sequences a second that one client may start; None: no limit.
        client_burst: sequences that one client may start at once; None: those of one second.
        max_client_sequences: of one client in progress; None: no limit.
        allowed_hosts: names that a Host header may have, beside addresses and localhost; `*.NAME` stands for the names
            under it, `*` for all.
        cors_origins: origins of pages whose scripts may call; none: no page of another origin.
        model: its name for callers; None: that of the target.
        max_samples: prompts times `n` of one request.
        timeout: seconds of one request.
        max_body_bytes: of a body other than a transcription's.
        body_timeout: seconds until a body must have arrived.
        playground: serve the playground at `/`.
        framing: options of every text that hide its token counts from the network, of `outrider.client.Options`. With
            them there is no playground, whose stream names every round.
        vllm_metrics: show metrics under vLLM's names, too.
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
