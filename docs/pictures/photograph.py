"""Takes the picture of the playground: `python -m docs.pictures.photograph`, with the demo pair; needs Chromium."""

from pathlib import Path

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

from outrider.client import AsyncClient
from outrider.http.server import BackgroundServer, HttpServer
from outrider.http.settings import ServerSettings
from tests.browser import open_browser
from tests.cluster import Cluster, wait_healthy

PICTURE = Path(__file__).with_name("playground.png")


def main() -> None:
    """Start a pair with a front, and take the picture."""
    with Cluster() as cluster:
        verifier = cluster.verifier()
        draft = cluster.draft(verifier)
        wait_healthy(verifier, draft)
        server = HttpServer(ServerSettings("127.0.0.1:0"), lambda: AsyncClient(draft.address))
        with BackgroundServer(server), open_browser() as browser:
            for _ in range(2):  # the first text warms up
                photograph(browser, server.url)


def photograph(browser: webdriver.Chrome, url: str) -> None:
    """Write a text, choose a rejected token, and save the page as `PICTURE`."""
    browser.set_window_size(1100, 1080)
    browser.get(url)
    temperature = browser.find_element(By.ID, "temperature")
    temperature.clear()
    temperature.send_keys("0.7")
    browser.find_element(By.ID, "gamma").send_keys("5")
    browser.find_element(By.ID, "write").click()
    status = browser.find_element(By.ID, "status")
    WebDriverWait(browser, 60).until(lambda _: "times as fast" in status.text)
    browser.execute_script("panes.pair.choose(panes.pair.spans.findIndex(e => e.classList.contains('rejected')))")
    browser.save_screenshot(str(PICTURE))


if __name__ == "__main__":
    main()
