"""The site of the documentation: built strictly, whole, and without anything from other hosts."""

import re
from pathlib import Path
from urllib.parse import unquote


def test_files_that_pages_load_are_in_the_site(site: Path) -> None:
    """Pictures, scripts and styles: a browser would report one that is missing or on another host."""
    loads = re.compile(
        r"<(?:script|img|iframe|source)\b[^>]*?\ssrc=\"?([^\s\">]+)"
        r"|<link(?![^>]*canonical)[^>]*?\shref=\"?([^\s\">]+)"
    )
    for page in site.rglob("*.html"):
        for script, link in loads.findall(page.read_text(encoding="utf-8")):
            url = unquote(re.split("[?#]", script or link)[0])
            if url.startswith("data:"):
                continue
            assert not re.match(r"https?:|//", url), f"{page.relative_to(site)} loads {url}"
            file = site / url.removeprefix("/") if url.startswith("/") else page.parent / url
            assert file.exists(), f"{page.relative_to(site)}: there is no {url}"
    for style in site.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", style.read_text(encoding="utf-8")), style


def test_reasons_of_untested_blocks_are_not_shown(site: Path) -> None:
    assert [page.name for page in site.rglob("*.html") if "no-test:" in page.read_text(encoding="utf-8")] == []
