"""The documentation names files that exist, and shows the pictures that its sources draw."""

import re

from docs.pictures.draw import HERE, pictures
from tests.project.tree import ROOT, sources

_PATH = re.compile(
    r"`((?:kernels|outrider|draft_service|verifier_service|protos|tests|benchmarks|models|examples|docs|deploy)"
    r"/[\w./-]*\w/?)`"
)


def test_files_that_pages_name_exist() -> None:
    missing = [
        f"{page.relative_to(ROOT)}: {name}"
        for page in sources(".md")
        if page.name != "CHANGELOG.md"
        for name in _PATH.findall(page.read_text(encoding="utf-8"))
        if not (ROOT / name).exists() and "/mine/" not in name  # a reader's own
    ]
    assert not missing, missing


def test_outrider_is_installed_from_a_clone() -> None:
    """No index has it."""
    wrong = [
        str(path.relative_to(ROOT))
        for path in (*sources(".md"), *sources(".py"))
        if re.search(r"pip install [\"']?outrider", path.read_text(encoding="utf-8"))
    ]
    assert not wrong, wrong


def test_pictures_are_those_of_their_sources() -> None:
    for name, svg in pictures().items():
        assert (HERE / name).read_text(encoding="utf-8") == svg, f"run `python docs/pictures/draw.py`: {name} is old"
