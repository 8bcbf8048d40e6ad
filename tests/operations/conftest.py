"""The house that the tests of this folder share."""

from collections.abc import Iterator

import pytest

from tests.operations.house import House, house


@pytest.fixture(scope="module")
def watched() -> Iterator[House]:
    """Two verifiers and two draft services, healthy and watched."""
    with house() as running:
        yield running
