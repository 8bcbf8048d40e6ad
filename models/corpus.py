"""The training text: the running interpreter's standard library, in a fixed order, with a fixed held-out set.

It works on files and characters, without tokens and models. The text is under the PSF licence (PSF-2.0).
"""

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

END_OF_TEXT = "<|endoftext|>"

# Generated tables and machine-specific files teach a language model nothing.
SKIPPED_DIRECTORIES = frozenset({"site-packages", "__pycache__", "encodings", "pydoc_data", "lib-dynload", "_bundled"})
SKIPPED_PREFIXES = ("_sysconfigdata", "config-")
SKIPPED_FILES = frozenset({"lib2to3/tests/data/py2_test_grammar.py", "stringprep.py", "html/entities.py"})
TEST_DIRECTORIES = frozenset({"test", "tests", "idle_test"})
MAX_CHARACTERS = 400_000
MAX_NON_ASCII_SHARE = 0.01

# One test module in four: they are as long as the rest of the library together, and far more monotonous.
TESTS_KEPT_ONE_IN = 4
HELD_OUT_ONE_IN = 32


@dataclass(frozen=True)
class Document:
    """One module: its path below the standard library's directory (`/` between parts), and its text."""

    name: str
    text: str

    @property
    def held_out(self) -> bool:
        """Whether the module is kept from training (by hash of the name: about 3 %)."""
        return name_hash(self.name) % HELD_OUT_ONE_IN == 0


def name_hash(name: str) -> int:
    """A hash of a module's name that is the same on every machine and in every run."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def documents() -> list[Document]:
    """All documents of the standard library, ordered by the hash of their names."""
    return sorted(_read_all(Path(sysconfig.get_paths()["stdlib"])), key=lambda document: name_hash(document.name))


def training_documents() -> list[Document]:
    """The documents a model may learn from."""
    return [document for document in documents() if not document.held_out]


def training_text(megabytes: float) -> str:
    """The first characters of the training documents, this many millions."""
    return "\n".join(document.text for document in training_documents())[: int(megabytes * 1e6)]


def held_out_documents() -> list[Document]:
    """The documents no model and no tokenizer of the pair has seen."""
    return [document for document in documents() if document.held_out]


def _read_all(root: Path) -> Iterator[Document]:
    for path in root.rglob("*.py"):
        name = path.relative_to(root).as_posix()
        if not _wanted(name):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # some test modules are in other encodings on purpose
            continue
        if _readable(text):
            yield Document(name, text)


def _wanted(name: str) -> bool:
    parts = name.split("/")
    if not SKIPPED_DIRECTORIES.isdisjoint(parts) or name in SKIPPED_FILES:
        return False
    if any(part.startswith(SKIPPED_PREFIXES) for part in parts):
        return False
    is_test = not TEST_DIRECTORIES.isdisjoint(parts[:-1])
    return not is_test or (name_hash(name) // HELD_OUT_ONE_IN) % TESTS_KEPT_ONE_IN == 0


def _readable(text: str) -> bool:
    if not text.strip() or len(text) > MAX_CHARACTERS or END_OF_TEXT in text:
        return False
    return sum(not character.isascii() for character in text) <= MAX_NON_ASCII_SHARE * len(text)
