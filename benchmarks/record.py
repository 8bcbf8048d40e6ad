"""The JSON document of a benchmark: written part by part as the parts come, so that an interrupted run can go on."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self


class Record:
    """A document on disk. Every change is there, whole, before the call that made it returns."""

    def __init__(self, path: Path, document: dict[str, Any]) -> None:
        self.path = path
        self.document = document

    @classmethod
    def open(cls, path: Path, head: dict[str, Any], *, resume: bool) -> Self:
        """A new document that begins with `head`; with `resume`, the one at `path` where its settings are the same.

        Raises:
            ValueError: there is one to resume, but it was made with other settings.
        """
        if resume and path.is_file():
            found = json.loads(path.read_text(encoding="utf-8"))
            differing = [key for key in ("settings", "models") if found.get(key) != head.get(key)]
            if differing:
                raise ValueError(f"{path.name} cannot be resumed: it was made with other {' and '.join(differing)}")
            return cls(path, found | {key: head[key] for key in head.keys() - found.keys()})
        record = cls(path, head | {"tuning": {}, "runs": []})
        record.save()
        return record

    @property
    def runs(self) -> list[dict[str, Any]]:
        """All runs so far, each with its keys."""
        runs: list[dict[str, Any]] = self.document["runs"]
        return runs

    def has_run(self, **keys: Any) -> bool:
        """Whether a run with these keys is there."""
        return any(all(run.get(name) == value for name, value in keys.items()) for run in self.runs)

    def add_runs(self, runs: list[dict[str, Any]]) -> None:
        """Takes in runs."""
        self.runs.extend(runs)
        self.save()

    def once(self, section: str, key: str, make: Callable[[], Any]) -> Any:
        """The entry `key` of a section; made, and kept, where it is not there yet."""
        entries = self.document.setdefault(section, {})
        if key not in entries:
            entries[key] = make()
            self.save()
        return entries[key]

    def put(self, key: str, value: Any) -> None:
        """Sets an entry of the document."""
        self.document[key] = value
        self.save()

    def save(self) -> None:
        """Writes it, under its name only when whole."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(part, self.path)
