"""Headless Chromium, for tests of pages. `needs_browser` skips a test where Chromium or its driver is missing."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from selenium import webdriver

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = ("headless", "no-sandbox", "disable-gpu", "disable-background-networking", "disable-component-update")

needs_browser = pytest.mark.skipif(None in (CHROMIUM, DRIVER), reason="Chromium or ChromeDriver is not installed")


@contextmanager
def open_browser() -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for flag in FLAGS:
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER)) as browser:
        yield browser


def errors(browser: webdriver.Chrome) -> list[str]:
    """Return the errors that the page logged since the last call."""
    return [each["message"] for each in browser.get_log("browser") if each["level"] == "SEVERE"]
