"""Devices are found by name. Transformers does not mistake our package `kernels` for a distribution of that name."""

import importlib.metadata
import importlib.util
from pathlib import Path

import pytest
from transformers.utils import import_utils

from outrider.runtime.device import check_environment, find_device
from outrider.runtime.errors import CheckpointError
from outrider.service.settings import SettingsError


def test_transformers_sees_no_kernels_package() -> None:
    found = importlib.util.find_spec("kernels")
    assert found is not None
    assert found.origin is not None, "the name finds our package"
    for _ in range(2):
        assert import_utils.is_kernels_available() is False
        import_utils.is_kernels_available.cache_clear()
    check_environment()


def test_a_foreign_distribution_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "kernels-0.18.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.18.5\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert importlib.metadata.version("kernels") == "0.18.5"
    with pytest.raises(CheckpointError, match=r"'kernels' 0\.18\.5 is installed") as caught:
        check_environment()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["", "meta", "tpu", "cuda:99"])
def test_a_device_that_is_not_there_is_a_wrong_setting(name: str) -> None:
    """A service then ends with exit code 2, as docs/reference/errors.md says."""
    with pytest.raises(SettingsError, match=f"^--device is '{name}'; "):
        find_device(name)
