"""GGUF files without llama.cpp: names, metadata, and a clear line where the extra is missing."""

import struct
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants

from outrider.runtime.checkpoint import gguf_fingerprint
from outrider.runtime.errors import CheckpointError
from outrider.runtime.gguf import Texts, read_metadata, resolve_file
from outrider.runtime.gguf_convert import convert
from outrider.runtime.gguf_tokenizer import gguf_tokenizer
from outrider.runtime.llama_loader import chosen_runtime, library, load_gguf
from outrider.runtime.loader import ModelSource, load_model
from tests.cluster import MODELS


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


WHOLE = b"".join(
    (
        b"GGUF",
        struct.pack("<IQQ", 3, 0, 4),
        text("general.architecture") + struct.pack("<I", 8) + text("llama"),
        text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 3) + text("a") + text("é") + text(""),
        text("tokenizer.ggml.token_type") + struct.pack("<IIQ3i", 9, 5, 3, 1, 3, -1),
        text("llama.rope.freq_base") + struct.pack("<If", 6, 0.5),
    )
)


def write(folder: Path, content: bytes) -> Path:
    (folder / "model.gguf").write_bytes(content)
    return folder / "model.gguf"


def test_metadata_is_read_and_arrays_of_text_are_counted(tmp_path: Path) -> None:
    path = write(tmp_path, WHOLE)
    assert read_metadata(path) == {
        "general.architecture": "llama",
        "tokenizer.ggml.tokens": Texts(3),
        "tokenizer.ggml.token_type": [1, 3, -1],
        "llama.rope.freq_base": 0.5,
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PK\x03\x04" + WHOLE[4:], r"is not a GGUF file: it begins with b'PK\\x03\\x04', not b'GGUF'"),
        (b"", "is not a GGUF file"),
        (b"GGUF\x63\0\0\0" + WHOLE[8:], "has version 99 of GGUF; versions 2 and 3 are supported"),
        *((WHOLE[:size], "is cut off or damaged") for size in (6, 40, 60, 110, len(WHOLE) - 1)),
        *((WHOLE.replace(text("a"), struct.pack("<Q", size)), "is cut off or damaged") for size in (1 << 62, 1 << 63)),
        (WHOLE.replace(text("llama"), struct.pack("<Q", 1 << 62)), "is cut off or damaged"),
    ],
)
def test_other_files_are_refused_in_one_line(content: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        read_metadata(write(tmp_path, content))
    assert "\n" not in str(caught.value)


def test_a_damaged_tokenizer_is_one_line() -> None:
    with pytest.raises(CheckpointError, match=r"cannot read the tokenizer in 'x\.gguf': EOF while parsing"):
        gguf_tokenizer(sys, None, {"tokenizer.huggingface.json": "{"}, "x.gguf")


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there is no file './none\.gguf'; give a GGUF file, or"):
        resolve_file("./none.gguf")
    with pytest.raises(CheckpointError, match=r"cannot read '.*': \[Errno 21\] Is a directory"):
        read_metadata(tmp_path)


def test_errors_say_that_a_model_is_a_gguf_file(tmp_path: Path) -> None:
    path = write(tmp_path, WHOLE)
    with pytest.raises(CheckpointError, match=r"model\.gguf' is a file; give the folder of a checkpoint"):
        load_model(ModelSource(str(path)))
    with pytest.raises(CheckpointError, match=r"has no config\.json; give one of its GGUF files: model\.gguf"):
        load_model(ModelSource(str(tmp_path)))
    with pytest.raises(CheckpointError, match=r"the name 'model\.q8' does not end in \.gguf; make"):
        chosen_runtime("llama.cpp", "model.q8")


def test_a_hub_id_names_a_file_of_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "models--org--model"
    for at, content in (("refs/main", b"abc"), ("snapshots/abc/small/model-Q8_0.gguf", WHOLE)):
        (repository / at).parent.mkdir(parents=True)
        (repository / at).write_bytes(content)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve_file("org/model/small/model-Q8_0.gguf").read_bytes() == WHOLE
    with pytest.raises(CheckpointError, match=r"'org/model/none\.gguf' is not a file here, and cannot be downloaded"):
        resolve_file("org/model/none.gguf")


def test_all_parts_of_a_split_model_are_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()

    def download(repository: str, file: str, revision: str | None) -> str:
        asked.append(f"{repository} {file} {revision}")
        return str(tmp_path / file)

    monkeypatch.setattr("outrider.runtime.gguf.hf_hub_download", download)
    first = "q4/model-00001-of-00003.gguf"
    assert resolve_file(f"org/model/{first}", "main") == tmp_path / first
    assert asked == [f"org/model q4/model-0000{number}-of-00003.gguf main" for number in (1, 2, 3)]


def test_the_fingerprint_of_a_split_model_is_that_of_all_parts(tmp_path: Path) -> None:
    """The first part may hold metadata alone."""
    first, second = (tmp_path / f"model-0000{number}-of-00002.gguf" for number in (1, 2))
    first.write_bytes(WHOLE)
    second.write_bytes(bytes(5000))
    before = gguf_fingerprint(first)
    second.write_bytes(bytes(4999) + b"\1")
    assert gguf_fingerprint(first) != before
    second.unlink()
    with pytest.raises(CheckpointError, match=r"cannot read '.*model-00002-of-00002\.gguf': .*No such file"):
        gguf_fingerprint(first)


def test_a_runtime_takes_its_own_kind_of_model() -> None:
    assert chosen_runtime("auto", "a/b/model-Q8_0.gguf") == chosen_runtime("llama.cpp", "x.GGUF") == "llama.cpp"
    assert chosen_runtime("auto", "models/demo/target") == chosen_runtime("torch", "org/model") == "torch"
    with pytest.raises(CheckpointError, match=r"only --runtime llama\.cpp runs it"):
        chosen_runtime("torch", "x.gguf")
    with pytest.raises(CheckpointError, match=r"outrider convert models/demo/target OUT\.gguf"):
        chosen_runtime("llama.cpp", "models/demo/target")


def test_a_missing_extra_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("llama_cpp", "gguf"):
        monkeypatch.setitem(sys.modules, module, None)
    library.cache_clear()
    with pytest.raises(CheckpointError, match=r"needs llama\.cpp, which is not installed .*'\.\[llama\]'"):
        load_gguf(ModelSource(str(write(tmp_path, WHOLE))))
    with pytest.raises(CheckpointError, match=r"needs the package gguf: pip install -e '\.\[llama\]'"):
        convert(str(MODELS / "draft"), tmp_path / "out.gguf", "f32")
    library.cache_clear()
