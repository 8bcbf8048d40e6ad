"""Settings of who may come in, over what, and how much each may ask for. Both services have them."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic_settings import BaseSettings, NoDecode


def split_commas(value: Any) -> Any:
    """Texts with commas as the list they stand for, each entry once."""
    texts = [value] if isinstance(value, str) else value
    return list(dict.fromkeys(part.strip() for text in texts for part in text.split(",") if part.strip()))


Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(split_commas)]


class SecuritySettings(BaseSettings):
    """Transport security and limits of a listener."""

    tls_cert: Path | None = Field(
        None,
        description="PEM file of the server's certificate, and of those between it and its CA; read anew on change",
    )
    tls_key: Path | None = Field(None, description="PEM file of its private key, without a passphrase")
    tls_client_ca: Path | None = Field(
        None, description="PEM file of the CA that clients must show a certificate of; default: clients need none"
    )
    allow_client_san: Names = Field(
        (),
        description="DNS name or URI that a client's certificate must have as a subjectAltName, letter for letter; "
        "several, with commas or by several flags: one of them",
    )
    auth_token_file: Path | None = Field(
        None, description="file of bearer tokens, one a line, of which every call must bear one; read anew on change"
    )
    plaintext: bool = Field(
        False, description="speak plaintext at addresses that are not loopback too, where nothing says TLS"
    )
    max_concurrent_streams: int = Field(
        1024, ge=1, description="calls in progress on one connection at most; more wait at the client"
    )
    max_client_sequences: int | None = Field(
        None,
        ge=1,
        description="sequences in progress of one client at most (each sample of a call is one); more are refused; "
        "default: any",
    )
    client_rate: float | None = Field(
        None, gt=0, description="sequences a second of one client in the long run; more are refused; default: any"
    )
    client_burst: int | None = Field(
        None,
        ge=1,
        description="sequences of one client that may come at once after a pause; default: those of one second",
    )
    max_connection_age: float | None = Field(
        None,
        gt=0,
        description="seconds after which a connection takes no new calls, so that clients resolve names and show "
        "certificates again; calls in progress go on; default: however old",
    )
