"""Who calls: the names that a client's certificate bears, and which of them may come in.

The handshake has checked by then that the certificate is of the CA; here it is held against a list.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from outrider.rpc.errors import permission_denied, unauthenticated

# What gRPC calls the names of a certificate's subjectAltName, by kind. Addresses and e-mail are no identities here.
_KINDS = ("peer_uri", "peer_dns")
_SHOWN = 8  # names in a message at most


def names_of(auth_context: Mapping[str, Iterable[bytes]]) -> tuple[str, ...]:
    """The URI and DNS names of the peer's certificate, as it has them; none where it has shown no certificate."""
    return tuple(name.decode("utf-8", "replace") for kind in _KINDS for name in auth_context.get(kind, ()))


class AllowedClients:
    """The names of the clients that may come in. A certificate with one of them suffices."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)

    def check(self, auth_context: Mapping[str, Iterable[bytes]]) -> str:
        """The name by which a peer comes in, as its certificate has it, letter for letter.

        Raises:
            RequestError: UNAUTHENTICATED: it has shown no certificate; PERMISSION_DENIED: it is called otherwise.
        """
        if not auth_context.get("x509_pem_cert"):
            raise unauthenticated("no client certificate was shown; this server asks for one")
        seen = names_of(auth_context)
        for name in seen:
            if name in self._names:
                return name
        allowed = _listed(sorted(self._names))
        raise permission_denied(
            f"the client's certificate names {_listed(seen) or 'no DNS name and no URI'}; allowed are {allowed}",
            seen=_listed(seen),
            allowed=allowed,
        )


def address_of(peer: str) -> str:
    """The address of a peer as gRPC names it (`ipv4:1.2.3.4:567`), without its port, which each connection has anew."""
    return peer if peer.startswith("unix") else peer.rpartition(":")[0] or peer


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
