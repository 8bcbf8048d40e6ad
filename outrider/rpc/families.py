"""A host that has addresses of both families is one host: which of them stand for it."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def is_ipv6(address: str) -> bool:
    """Whether `IP:PORT` has an IPv6 address, which stands in brackets."""
    return address.startswith("[")


def of_one_family(addresses: Sequence[str], before: Collection[str] = ()) -> list[str]:
    """Of the addresses `IP:PORT` that a name stands for those of one family, each once and in their order.

    A host that has both would count twice otherwise. The family with more of them is taken, so that hosts that have
    only one are left out as seldom as may be; where there are as many of both, that of `before`, which were taken last;
    and at first that of the first one, since resolvers name first what is best reached (RFC 6724).
    """
    found = list(dict.fromkeys(addresses))
    families = [[each for each in found if is_ipv6(each) is wanted] for wanted in (False, True)]
    if not all(families):
        return found
    kept = next(iter(before), found[0])
    return max(families, key=lambda family: (len(family), is_ipv6(family[0]) is is_ipv6(kept)))
