"""Files that may change while they are in use: their meaning, read anew when one of them has another face.

Who asks is answered at once, from any thread: a look is one `stat` of each file.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

_logger = logging.getLogger(__name__)

Value = TypeVar("Value")
_Face: TypeAlias = tuple[tuple[int, int, int], ...]

# A file that changes between two looks at it is read again, so often at most.
_READS = 5


class FileProblem(ValueError):
    """A file cannot be read, or is not what it should be. The text is one line that names it, and nothing it holds."""


class Watched(Generic[Value]):
    """What some files mean together.

    A change that makes no sense (a file is gone, a certificate came before its key) leaves the last meaning in place,
    with one line in the log, until the next change.
    """

    def __init__(self, paths: Sequence[Path], read: Callable[[], Value]) -> None:
        """`read` makes the meaning of the files at `paths`; it raises `FileProblem` or `OSError` where there is none.

        Raises:
            FileProblem: there is none now.
        """
        self._paths = tuple(paths)
        self._read = read
        self._lock = threading.Lock()
        self._face, self._value = self._load()
        self._seen: _Face | None = self._face  # looked at last, whether or not it made sense
        self._version = 0

    def look(self) -> tuple[int, Value]:
        """How often the meaning has changed so far, and what it is."""
        with self._lock:
            face = self._look()
            if face != self._seen:
                self._seen = face
                self._renew()
            return self._version, self._value

    def _renew(self) -> None:
        try:
            face, value = self._load()
        except FileProblem as problem:
            _logger.warning("%s; what it held before stays in use", problem)
            return
        self._seen = face
        if face != self._face:
            self._face, self._value = face, value
            self._version += 1
            _logger.info("read anew: %s", ", ".join(map(str, self._paths)))

    def _load(self) -> tuple[_Face, Value]:
        """Reads until nothing has changed meanwhile: a certificate of one moment and a key of the next are no pair."""
        problem: FileProblem | None = None
        for _ in range(_READS):
            before, problem = self._look(), None
            try:
                value = self._read()
            except OSError as error:
                problem = FileProblem(
                    f"{error.filename or ', '.join(map(str, self._paths))}: {error.strerror or error}"
                )
            except FileProblem as error:
                problem = error
            if before is not None and self._look() == before:
                if problem is not None:
                    raise problem
                return before, value
            if before is None:
                break
        raise problem or FileProblem(f"{', '.join(map(str, self._paths))}: changed while being read")

    def _look(self) -> _Face | None:
        """What tells that a file has changed; None where one is not there."""
        try:
            found = [path.stat() for path in self._paths]
        except OSError:
            return None
        return tuple((each.st_ino, each.st_size, each.st_mtime_ns) for each in found)
