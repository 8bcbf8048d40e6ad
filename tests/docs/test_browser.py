"""The site in headless Chromium: pages open without an error, search finds, the dark mode can be chosen."""

import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.support.ui import WebDriverWait

from tests.browser import errors, needs_browser, open_browser

pytestmark = needs_browser

PAGES = ("index", "tutorial/first-text", "how-to/kubernetes", "reference/settings", "explanation/architecture")


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *arguments: Any) -> None: ...


@pytest.fixture(scope="module")
def url(site: Path) -> Iterator[str]:
    broken = "<script src='missing.js'></script><script>console.error('logged'); throw Error('thrown')</script>"
    (site / "broken.html").write_text(broken)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
    (site / "broken.html").unlink()


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    with open_browser() as browser:
        yield browser


@pytest.mark.parametrize("page", PAGES)
def test_pages_open_without_errors(browser: webdriver.Chrome, url: str, page: str) -> None:
    browser.get(f"{url}/{page}.html")
    assert errors(browser) == []
    assert browser.execute_script("return document.querySelectorAll('article h1').length") == 1
    assert browser.execute_script("return [...document.images].every(image => image.naturalWidth > 0)")


def test_search_finds_a_page(browser: webdriver.Chrome, url: str) -> None:
    browser.get(f"{url}/index.html?q=failover")
    results = "return document.querySelectorAll('.md-search-result__link').length > 0"
    WebDriverWait(browser, 20).until(lambda page: page.execute_script(results))
    assert errors(browser) == []


def test_dark_mode_can_be_chosen(browser: webdriver.Chrome, url: str) -> None:
    browser.get(f"{url}/index.html")
    scheme = "return document.body.getAttribute('data-md-color-scheme')"
    before = browser.execute_script(scheme)
    browser.execute_script("[...document.querySelectorAll('label[for^=__palette]')].find(each => !each.hidden).click()")
    WebDriverWait(browser, 20).until(lambda page: page.execute_script(scheme) != before)
    assert errors(browser) == []


def test_errors_of_a_page_are_noticed(browser: webdriver.Chrome, url: str) -> None:
    browser.get(f"{url}/broken.html")
    found = "\n".join(errors(browser))
    for error in ("missing.js", "logged", "thrown"):
        assert error in found
