"""Fingerprints change with the model and the vocabulary, and with nothing else."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from outrider.runtime.errors import CheckpointError
from outrider.runtime.fingerprint import tokenizer_fingerprint, weights_fingerprint


@pytest.fixture
def folder(checkpoint: Callable[[str], Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))


def edit(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}, indent=4))


def test_it_depends_on_the_content_alone(folder: Path, tmp_path: Path) -> None:
    before = weights_fingerprint(folder)
    assert len(before) == 64
    copied = shutil.copytree(folder, tmp_path / "elsewhere")
    edit(folder, transformers_version="9.9", _name_or_path="/somewhere")
    (folder / "README.md").write_text("not a weight")
    assert weights_fingerprint(folder) == weights_fingerprint(copied) == before


def test_a_change_of_the_configuration_changes_it(folder: Path) -> None:
    before = weights_fingerprint(folder)
    edit(folder, rms_norm_eps=1e-4)
    assert weights_fingerprint(folder) != before


@pytest.mark.parametrize("place", [12, -1, "first byte after the header"])
def test_a_changed_byte_in_header_or_sample_changes_it(folder: Path, place: int | str) -> None:
    before = weights_fingerprint(folder)
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    at = place if isinstance(place, int) else 8 + int.from_bytes(content[:8], "little")
    content[at] ^= 1
    path.write_bytes(content)
    assert weights_fingerprint(folder) != before


def test_a_large_file_is_sampled_evenly_and_never_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.zeros(4 << 20, dtype=torch.uint8)}, path)
    before = weights_fingerprint(tmp_path)
    size = path.stat().st_size
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):  # among any 80 KiB one place is sampled
        with path.open("r+b") as file:
            at = min(int(share * size) + 200, size - (80 << 10))
            file.seek(at)
            original = file.read(80 << 10)
            file.seek(at)
            file.write(b"\x01" * (80 << 10))
        assert weights_fingerprint(tmp_path) != before, share
        with path.open("r+b") as file:
            file.seek(at)
            file.write(original)
    assert weights_fingerprint(tmp_path) == before


def test_a_file_of_any_size_is_read_in_a_moment(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.zeros(8, dtype=torch.uint8)}, path)
    with path.open("r+b") as file:
        file.truncate(1 << 40)  # a hole of a tebibyte: reading it whole would outlast any test
    assert len(weights_fingerprint(tmp_path)) == 64


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        weights_fingerprint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no weights"):
        weights_fingerprint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((1 << 40).to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match="cut off"):
        weights_fingerprint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not JSON"):
        weights_fingerprint(tmp_path)


class Vocabulary(dict[str, int]):
    def get_vocab(self) -> dict[str, int]:
        return self


def test_the_vocabularys_fingerprint_is_its_map() -> None:
    base = Vocabulary(a=0, b=1, ab=2)
    assert tokenizer_fingerprint(base) == tokenizer_fingerprint(Vocabulary(ab=2, b=1, a=0))
    others = [
        Vocabulary(a=1, b=0, ab=2),
        Vocabulary(a=0, b=1),
        Vocabulary(a=0, b=1, ab=2, added=3),
        Vocabulary(a=0, b=12),
    ]
    assert len({tokenizer_fingerprint(vocabulary) for vocabulary in (base, *others)}) == 5
