"""Bearer tokens: those that a server takes, and the one that a client sends. Each from a file that may change.

A token is never logged and never part of a message. A server keeps digests alone.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable
from pathlib import Path

from outrider.rpc.errors import unauthenticated
from outrider.rpc.watched import FileProblem, Watched

METADATA_KEY = "authorization"
_SCHEME = "bearer "

# Shorter ones are guessed; the alphabet is that of RFC 6750.
LEAST_CHARS = 16
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")


class Tokens:
    """The tokens that a server takes: one a line; empty lines and those that begin with `#` are none.

    Raises:
        FileProblem: the file cannot be read, holds no token, or a line that cannot be one.
    """

    def __init__(self, path: Path) -> None:
        self._watched = Watched([path], lambda: tuple(_digest(token) for _, token in _read(path)))

    def check(self, metadata: Iterable[tuple[str, str | bytes]]) -> str:
        """Whose token a call bears: a name that says nothing of the token, and is the same for as long as the file.

        The time it takes does not depend on how much of a token is right, nor on which one it is.

        Raises:
            RequestError: UNAUTHENTICATED: the call bears none, or one that is not in the file.
        """
        given = [value for key, value in metadata if key == METADATA_KEY]
        if not given:
            raise unauthenticated("the call bears no token; this server asks for 'authorization: Bearer TOKEN'")
        text = given[0] if isinstance(given[0], str) else given[0].decode("latin-1")
        if len(given) > 1 or not text.lower().startswith(_SCHEME):
            raise unauthenticated("the call's 'authorization' is not 'Bearer TOKEN'")
        sent = _digest(text[len(_SCHEME) :])
        found = ""
        for digest in self._watched.look()[1]:
            if hmac.compare_digest(digest, sent):
                found = f"token {hashlib.sha256(digest).hexdigest()[:16]}"
        if not found:
            raise unauthenticated("the call's token is none of those that this server takes")
        return found


class OwnToken:
    """The token that a client sends: the first one of its file.

    Raises:
        FileProblem: the file cannot be read, or holds none.
    """

    def __init__(self, path: str | Path) -> None:
        file = Path(path)
        self._watched = Watched([file], lambda: _read(file)[0][1])

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What a call carries."""
        return ((METADATA_KEY, f"Bearer {self._watched.look()[1]}"),)


def _read(path: Path) -> list[tuple[int, str]]:
    """The tokens of a file, with the numbers of their lines."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except UnicodeDecodeError:
        raise FileProblem(f"{path}: is no text in ASCII") from None
    found = [(number, line.strip()) for number, line in enumerate(lines, 1)]
    tokens = [(number, line) for number, line in found if line and not line.startswith("#")]
    if not tokens:
        raise FileProblem(f"{path}: holds no token; one a line is expected")
    for number, token in tokens:
        if len(token) < LEAST_CHARS:
            raise FileProblem(f"{path}: line {number} has {len(token)} characters; a token has at least {LEAST_CHARS}")
        if not _TOKEN.fullmatch(token):
            raise FileProblem(f"{path}: line {number} is no token: letters, digits and . _ ~ + / - with = at the end")
    return tokens


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
