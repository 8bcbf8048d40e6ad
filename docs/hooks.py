"""Hooks of MkDocs: pages may link to files of the repository outside `docs/`, and fences may say why no test runs them.

A linked file becomes part of the site under `repository/`; a linked Markdown file becomes a page there, and so do
its links. A link to a folder becomes plain text. A link to nothing is a warning, so a strict build fails.
"""

import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
DOCS = "docs"
COPIES = "repository"

_log = get_plugin_logger("outrider")

_FENCE = re.compile(r"^( *(?:```+|~~~+)\w+) no-test:.*$", re.MULTILINE)
_LINK = re.compile(r"(?<!\\)(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
_CODE = re.compile(r"^( *)(```+|~~~+).*?^\1\2 *$", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files that pages link to."""
    waiting = [f"{DOCS}/{file.src_uri}" for file in files.documentation_pages()]
    seen = set(waiting)
    while waiting:
        page = waiting.pop()
        for target in _targets(page):
            if target in seen or target.startswith(f"{DOCS}/") or not (ROOT / target).is_file():
                continue
            seen.add(target)
            files.append(File.generated(config, f"{COPIES}/{target}", abs_src_path=str(ROOT / target)))
            if target.endswith(".md"):
                waiting.append(target)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links of a page at the copies, and take the marks of tests out of its fences."""
    here = _path(page.file.src_uri)

    def link(found: re.Match[str]) -> str:
        picture, text, target, anchor = found.groups()
        if _is_foreign(target):
            return found[0]
        path = _resolve(here, target)
        if (ROOT / path).is_dir():
            return str(text)
        if not (ROOT / path).is_file() and not path.startswith(f"{DOCS}/"):  # MkDocs itself looks for the others
            _log.warning("%s links to %s, which is not in the repository", here, target)
            return found[0]
        to = posixpath.relpath(_source(path), posixpath.dirname(page.file.src_uri))
        return f"{picture}[{text}]({to}{anchor or ''})"

    return _FENCE.sub(r"\1", _outside_code(markdown, link))


def _outside_code(markdown: str, link: Callable[[re.Match[str]], str]) -> str:
    """Rewrite links, but not in code."""
    parts, end = [], 0
    for code in _CODE.finditer(markdown):
        parts += [_LINK.sub(link, markdown[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, _LINK.sub(link, markdown[end:])])


def _targets(page: str) -> Iterator[str]:
    """Yield the paths, from the repository's root, that a page links to."""
    text = _CODE.sub("", (ROOT / page).read_text(encoding="utf-8"))
    yield from (_resolve(page, found[3]) for found in _LINK.finditer(text) if not _is_foreign(found[3]))


def _is_foreign(target: str) -> bool:
    return "://" in target or target.startswith(("mailto:", "/"))


def _resolve(page: str, target: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), target))


def _path(source: str) -> str:
    """Return where a source of the site lies in the repository."""
    return source.removeprefix(f"{COPIES}/") if source.startswith(f"{COPIES}/") else f"{DOCS}/{source}"


def _source(path: str) -> str:
    return path.removeprefix(f"{DOCS}/") if path.startswith(f"{DOCS}/") else f"{COPIES}/{path}"
