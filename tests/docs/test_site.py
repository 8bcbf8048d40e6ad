"""The site of the documentation: built strictly, nothing from other hosts, and opened in a browser without an error."""

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.docs.browser import PROGRAM, Browser
from tests.project.tree import ROOT

pytestmark = pytest.mark.skipif(
    find_spec("material") is None, reason="MkDocs Material is not installed: pip install '.[docs]'"
)

KINDS = ("tutorial/first-text", "how-to/kubernetes", "reference/settings", "explanation/architecture")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture(scope="module")
def url(site: Path) -> Iterator[str]:
    # A page that the tests alone have, to see that errors are noticed.
    (site / "broken.html").write_text(
        "<script src='missing.js'></script><script>console.error('said'); throw Error('thrown')</script>"
    )
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if PROGRAM is None:
        pytest.skip("there is no chromium to open the pages")
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


def test_every_page_of_the_navigation_is_built(site: Path) -> None:
    # A README is the index of its folder.
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").replace("/README.md", "/index.md")
    named = re.findall(r": ([\w/-]+)\.md$", text, re.MULTILINE)
    assert len(named) > 20
    assert [name for name in named if not (site / f"{name}.html").is_file()] == []


def test_nothing_comes_from_other_hosts(site: Path) -> None:
    """Of pages what a browser loads by itself; of styles and scripts all that they could load."""
    loads = re.compile(
        r"<(?:script|img|iframe|source)[^>]*?\ssrc=\"?(https?:)?//|<link(?![^>]*canonical)[^>]*?\shref=\"?(https?:)?//"
    )
    for page in site.rglob("*.html"):
        found = loads.search(page.read_text(encoding="utf-8"))
        assert not found, f"{page.relative_to(site)}: {found}"
    for style in site.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", style.read_text(encoding="utf-8")), style


def test_marks_of_tests_are_not_shown(site: Path) -> None:
    assert [page.name for page in site.rglob("*.html") if "no-test:" in page.read_text(encoding="utf-8")] == []


def test_errors_of_a_page_are_noticed(browser: Browser, url: str) -> None:
    browser.open(f"{url}/broken.html")
    found = "\n".join(browser.errors)
    for error in ("missing.js", "said", "thrown"):
        assert error in found, browser.errors


@pytest.mark.parametrize("page", ["index", *KINDS])
def test_pages_open_without_errors(browser: Browser, url: str, page: str) -> None:
    browser.open(f"{url}/{page}.html")
    assert browser.errors == []
    assert browser.evaluate("document.querySelectorAll('article h1').length") == 1
    assert browser.evaluate("[...document.images].every(image => image.naturalWidth > 0)")


def test_search_finds_a_page(browser: Browser, url: str) -> None:
    browser.open(f"{url}/index.html?q=failover")
    browser.wait_until("document.querySelectorAll('.md-search-result__link').length > 0")
    assert browser.errors == []


def test_the_dark_mode_can_be_chosen(browser: Browser, url: str) -> None:
    browser.open(f"{url}/index.html")
    scheme = "document.body.getAttribute('data-md-color-scheme')"
    before = browser.evaluate(scheme)
    browser.evaluate("[...document.querySelectorAll('label[for^=__palette]')].find(each => !each.hidden).click()")
    browser.wait_until(f"{scheme} != {before!r}")
    assert browser.errors == []
