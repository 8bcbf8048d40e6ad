"""`outrider transcribe` without a speech model: each error is one line."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from outrider.cli import main
from outrider.cli.transcribe import _line
from outrider.client import Client, FailedPrecondition, Segment

soundfile = pytest.importorskip("soundfile")


@pytest.fixture
def speech(tmp_path: Path) -> str:
    path = tmp_path / "speech.wav"
    soundfile.write(path, np.zeros(1600), 16_000)
    return str(path)


def _transcribe(*arguments: str, **options: Any) -> Result:
    return CliRunner().invoke(main, ["transcribe", *arguments], prog_name="outrider", **options)


def test_a_model_without_a_speech_encoder_is_one_line(draft_address: str, speech: str) -> None:
    refused = _transcribe("--draft", draft_address, speech)
    assert (refused.exit_code, refused.stdout) == (1, "")
    (line,) = refused.stderr.splitlines()
    assert line.startswith("outrider: FAILED_PRECONDITION: ")
    assert line.endswith(" has no speech encoder: it takes a prompt of text, not audio")
    with Client(draft_address) as client:
        for call in (client.complete, lambda audio: client.transcribe(audio).wait()):
            with pytest.raises(FailedPrecondition, match="no speech encoder"):
                call(audio=Path(speech))


@pytest.mark.parametrize(
    ("segment", "line"),
    [
        (Segment(0.0, 2.5, " Hello", ()), "[00:00.00 - 00:02.50] Hello"),
        (Segment(59.999, 3600.1, "x", ()), "[01:00.00 - 1:00:00.10] x"),
    ],
)
def test_times_of_a_line(segment: Segment, line: str) -> None:
    assert _line(segment, True) == line
    assert _line(segment, False) == segment.text.strip()
