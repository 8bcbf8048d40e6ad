"""A real engine of a demo model, without its thread."""

import pytest

from outrider.runtime.loader import LoadedModel, ModelSource, load_model
from tests.cluster import MODELS
from tests.verifier_service.engines import engine_of
from verifier_service.engine import VerifierEngine


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(ModelSource(str(MODELS / "draft"), dtype="float32", device="cpu"))


@pytest.fixture
def engine(loaded: LoadedModel) -> VerifierEngine:
    return engine_of(loaded)
