"""What was measured is on disk at once, and an interrupted benchmark goes on where it stopped."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.record import Record

HEAD: dict[str, Any] = {"command": "first", "settings": {"prompts": 2}, "models": {}}


def test_each_change_is_on_disk_when_it_returns(tmp_path: Path) -> None:
    record = Record.open(tmp_path / "sub" / "r.json", HEAD, resume=False)
    record.add_runs([{"prompt": 0}])
    assert json.loads(record.path.read_text())["runs"] == [{"prompt": 0}]
    record.once("tuning", "demo", lambda: {"gamma": 4})
    assert json.loads(record.path.read_text())["tuning"] == {"demo": {"gamma": 4}}
    assert [file.name for file in record.path.parent.iterdir()] == ["r.json"]


def test_resumed_it_knows_what_is_done(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    before = Record.open(path, HEAD, resume=False)
    before.once("tuning", "demo", lambda: {"gamma": 4})
    before.add_runs([{"prompt": 0, "temperature": "1", "tokens": 5}])
    after = Record.open(path, HEAD, resume=True)
    assert after.has_run(prompt=0, temperature="1")
    assert not after.has_run(prompt=1, temperature="1")
    assert after.once("tuning", "demo", lambda: pytest.fail("it was tuned already")) == {"gamma": 4}


def test_not_resumed_it_begins_anew(tmp_path: Path) -> None:
    Record.open(tmp_path / "r.json", HEAD, resume=False).add_runs([{"prompt": 0}])
    assert Record.open(tmp_path / "r.json", HEAD, resume=False).runs == []


def test_other_settings_are_not_mixed_in(tmp_path: Path) -> None:
    Record.open(tmp_path / "r.json", HEAD, resume=False).add_runs([{"prompt": 0}])
    with pytest.raises(ValueError, match=r"r\.json cannot be resumed: it was made with other settings"):
        Record.open(tmp_path / "r.json", HEAD | {"settings": {"prompts": 3}}, resume=True)
