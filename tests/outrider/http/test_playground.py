"""The playground in a browser, and its endpoint."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

from outrider.client import Client
from tests import browser
from tests.cluster import Service
from tests.outrider.http.conftest import plain, running_front

PROMPT = "def area(radius):\n"
BODY = {"prompt": PROMPT, "max_tokens": 24, "temperature": 1.0, "seed": 5, "gamma": 4}
WAIT_S = 30.0


def events(http: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    with http.stream("POST", "/playground/generate", json={**BODY, **fields}) as answer:
        assert answer.status_code == 200, answer.read()
        return [json.loads(line.removeprefix("data: ")) for line in answer.iter_lines() if line]


def test_events_have_origins_and_probabilities(http: httpx.Client, ours: Client) -> None:
    found = events(http)
    assert found[0]["type"] == "started"
    assert found[-1]["type"] == "finished"
    chunks = [each for each in found if each["type"] == "chunk"]
    text = "".join(token for each in chunks for token in each["tokens"])
    wanted = ours.complete(PROMPT, max_new_tokens=24, temperature=1.0, seed=5, gamma=4)
    assert text == wanted.text
    rounds = [each for chunk in chunks for each in chunk["rounds"]]
    drafted = [each for each in rounds if each["drafted"]]
    assert drafted
    for each in drafted:
        judged = min(each["accepted"] + 1, len(each["drafted"]))
        assert all(0 <= p <= 1 for p in each["p"][:judged])
        assert len(each["p"]) >= judged


def test_the_target_alone_drafts_nothing(http: httpx.Client) -> None:
    chunks = [each for each in events(http, alone=True) if each["type"] == "chunk"]
    assert {origin for each in chunks for origin in each["origins"]} == {"target"}


@pytest.mark.parametrize(
    ("fields", "named"),
    [({"prompt": None}, "prompt"), ({"max_tokens": 0}, "max_tokens"), ({"gamma": 999}, "gamma"), ({"x": 1}, "x")],
)
def test_bad_input_is_named(http: httpx.Client, fields: dict[str, Any], named: str) -> None:
    answer = http.post("/playground/generate", json={**BODY, **fields})
    assert answer.status_code == 400
    assert named in answer.json()["error"]["message"]


def test_only_the_files_of_the_page_are_served(http: httpx.Client) -> None:
    for path in ("/", "/playground.css", "/playground.js"):
        answer = http.get(path)
        assert answer.status_code == 200
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
    for path in ("/playground.py", "/playground/index.html", "/playground/../app.py", "/%2e%2e/app.py"):
        assert http.get(path).status_code == 404


@pytest.fixture(scope="module")
def driver() -> Iterator[webdriver.Chrome]:
    with browser.open_browser() as driver:
        yield driver


def has_error(status: WebElement) -> bool:
    return "error" in (status.get_dom_attribute("class") or "")


def contrast(front: str, back: str) -> float:
    """Of two colours, as WCAG 2 defines it: 1 to 21."""

    def luminance(colour: str) -> float:
        red, green, blue, *_ = (float(each) / 255 for each in re.findall(r"[\d.]+", colour))
        linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in (red, green, blue)]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    darker, lighter = sorted((luminance(front), luminance(back)))
    return (lighter + 0.05) / (darker + 0.05)


@browser.needs_browser
@pytest.mark.parametrize(
    ("size", "scheme"), [((1200, 900), "light"), ((390, 844), "dark")], ids=["desk", "phone, in the dark"]
)
def test_a_text_is_written_with_colours(driver: webdriver.Chrome, url: str, size: tuple[int, int], scheme: str) -> None:
    screen = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": size[0] < 500}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    scheme_of_user = {"name": "prefers-color-scheme", "value": scheme}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme_of_user]})
    driver.get(url)
    tokens = driver.find_element(By.ID, "max_tokens")
    tokens.clear()
    tokens.send_keys("24")
    driver.find_element(By.ID, "gamma").send_keys("4")
    prompt = driver.find_element(By.ID, "prompt")
    prompt.clear()
    prompt.send_keys("<b>def</b> area(radius):")
    prompt.send_keys(Keys.CONTROL, Keys.ENTER)
    status = driver.find_element(By.ID, "status")
    WebDriverWait(driver, WAIT_S).until(lambda _: "times as fast" in status.text or has_error(status))
    assert "times as fast as the target alone" in status.text
    for name, kinds in (("pair", {"draft"}), ("alone", {"target"})):
        found = driver.find_elements(By.CSS_SELECTOR, f"#{name}-output .token")
        assert len(found) >= 24
        assert kinds <= {each.get_dom_attribute("class").split()[1] for each in found}
        figures = driver.find_element(By.ID, f"{name}-figures").text
        assert ("tokens/s" in figures, "the pair is" in figures) == (True, name == "alone")
    origins = [
        (each.value_of_css_property("color"), each.value_of_css_property("background-color"))
        for each in driver.find_elements(By.CSS_SELECTOR, "#legend .token")
    ]
    assert len({back for _, back in origins}) == 4
    assert min(contrast(*colours) for colours in origins) >= 4.5, "the least for text"
    page = driver.find_element(By.TAG_NAME, "body").value_of_css_property("background-color")
    assert (contrast(page, "0, 0, 0") < 3) == (scheme == "dark")
    output = driver.find_element(By.ID, "pair-output")
    output.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert "round 1" in driver.find_element(By.ID, "detail").text
    assert driver.find_elements(By.CSS_SELECTOR, "#timeline rect.phase-pass")
    overflow = "return document.documentElement.scrollWidth > document.documentElement.clientWidth"
    assert not driver.execute_script(overflow), "the page is as wide as the window"
    assert browser.errors(driver) == []
    entries = driver.execute_script("return performance.getEntriesByType('resource').map(each => each.name)")
    assert entries
    assert all(each.startswith(url) for each in entries), "no request leaves the host"
    assert driver.execute_script("return localStorage.length + sessionStorage.length + document.cookie.length") == 0


@browser.needs_browser
def test_an_error_is_shown(driver: webdriver.Chrome, url: str) -> None:
    driver.get(url)
    tokens = driver.find_element(By.ID, "max_tokens")
    tokens.clear()
    tokens.send_keys("999999")
    driver.find_element(By.ID, "write").click()
    status = driver.find_element(By.ID, "status")
    WebDriverWait(driver, WAIT_S).until(lambda _: has_error(status))
    assert "max_tokens is 999999" in status.text
    browser.errors(driver)  # the browser logs the status 400


def test_it_can_be_switched_off(chat_draft: Service) -> None:
    with running_front(chat_draft.address, playground=False) as url:
        for path in ("/", "/playground.js"):
            answer = httpx.get(url + path)
            assert answer.status_code == 404
            assert "the playground is off" in answer.json()["error"]["message"]
        assert httpx.post(url + "/playground/generate", json=BODY).status_code == 404


def test_it_is_off_where_token_counts_are_hidden(chat_draft: Service, ours: Client) -> None:
    """Every text asks for frames: one with p and q of its rounds would be refused."""
    framing = {"frame_bytes": 512, "fixed_size_rounds": True}
    with running_front(chat_draft.address, framing=framing) as url:
        for path in ("/", "/playground.js"):
            answer = plain.get(url + path)
            assert answer.status_code == 404
            assert "--frame-bytes" in answer.json()["error"]["message"]
        assert plain.post(url + "/playground/generate", json=BODY).status_code == 404
        body = {"prompt": PROMPT, "max_tokens": 24, "seed": 5, "logprobs": 1}
        choice = plain.post(url + "/v1/completions", json=body).json()["choices"][0]
        assert choice["text"] == ours.complete(PROMPT, max_new_tokens=24, seed=5).text
        answer = plain.post(url + "/v1/completions", json=body | {"echo": True})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "echo")
        answer = plain.post(url + "/v1/audio/transcriptions", files={"file": b"RIFF"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "file")
        assert "transcriptions are off" in answer.json()["error"]["message"]
    with running_front(chat_draft.address, framing={"frame_bytes": 16}) as url:
        refused = plain.post(url + "/v1/completions", json=body)
        assert "emission.frame_bytes is 16" in refused.text, "the service is asked for frames"


def test_the_page_needs_no_key_and_its_texts_do(chat_draft: Service, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("k" * 32 + "\n")
    keys.chmod(0o600)
    with running_front(chat_draft.address, key_file=keys) as url:
        assert httpx.get(url + "/").status_code == 200
        assert httpx.post(url + "/playground/generate", json=BODY).status_code == 401
        allowed = {"authorization": "Bearer " + "k" * 32}
        assert httpx.post(url + "/playground/generate", json=BODY, headers=allowed).status_code == 200
