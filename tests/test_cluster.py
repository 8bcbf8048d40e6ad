"""The addresses of the services that tests start."""

import random

import pytest

from tests import cluster


def test_no_address_is_chosen_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing listens at them yet: a service does so seconds later."""
    first = random.SystemRandom().randrange(20_000, 29_000)
    monkeypatch.setattr(cluster, "_PORTS", (first, first + 60))
    chosen = [cluster.free_address() for _ in range(40)]
    assert len(set(chosen)) == 40
