"""Fixtures: tiny checkpoints, saved once a run."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from outrider.runtime.loader import LoadedModel, ModelSource, load_model
from tests.outrider.runtime import tiny


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny model by its name in `tiny.FAMILIES`."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = tiny.save(tiny.FAMILIES[name](), tmp_path_factory.mktemp(name))
        return made[name]

    return get


@pytest.fixture(scope="session")
def load(checkpoint: Callable[[str], Path]) -> Callable[..., LoadedModel]:
    """Loads a tiny model anew: fusing takes the weights out of a model."""

    def get(name: str, dtype: str = "float32") -> LoadedModel:
        return load_model(ModelSource(str(checkpoint(name)), dtype=dtype, device="cpu"))

    return get
