"""A report as one HTML page that loads nothing: text, tables, and pictures as inline SVG. It follows the dark mode.

In texts, what stands between backticks is code.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True, slots=True)
class Table:
    """A table of text; the first row is its head, and `keys` columns at the left name the row."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    keys: int = 1

    def markdown(self, *, padded: bool = False) -> str:
        """Return it as Markdown; `padded`: each column has one width, so that it reads as plain text too."""
        dashes = ["---"] * self.keys + ["---:"] * (len(self.head) - self.keys)
        lines = [list(self.head), dashes, *map(list, self.rows)]
        if padded:
            for column, rule in enumerate(dashes):
                width = max(len(line[column]) for line in lines)
                for line in lines:
                    line[column] = line[column].ljust(width) if rule == "---" else line[column].rjust(width)
            lines[1] = [rule.strip().rjust(len(rule), "-") for rule in dashes]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def html(self) -> str:
        body = "\n".join(self._row(row, "td") for row in self.rows)
        return (
            f'<div class="wide"><table>\n<thead>\n{self._row(self.head, "th")}\n</thead>\n'
            f"<tbody>\n{body}\n</tbody>\n</table></div>"
        )

    def _row(self, cells: Sequence[str], tag: str) -> str:
        names = "".join(f'<{tag} class="key">{_inline(cell)}</{tag}>' for cell in cells[: self.keys])
        return f"<tr>{names}{''.join(f'<{tag}>{_inline(cell)}</{tag}>' for cell in cells[self.keys :])}</tr>"


def paragraph(text: str) -> str:
    """Return a paragraph of text."""
    return f"<p>{_inline(text)}</p>"


def points(sentences: Sequence[str]) -> str:
    """Return a list."""
    return f"<ul>{''.join(f'<li>{_inline(each)}</li>' for each in sentences)}</ul>"


def captioned(svg: str, caption: str) -> str:
    """Return a picture; in the dark mode its lightness is inverted, and hues stay."""
    return f"<figure>{svg}<figcaption>{_inline(caption)}</figcaption></figure>"


def section(heading: str, *parts: str) -> str:
    """Return parts below a heading."""
    return "\n".join([f"<section><h2>{_inline(heading)}</h2>", *parts, "</section>"])


def page(title: str, *parts: str) -> str:
    """Return the whole page, of parts in HTML."""
    body = "\n".join([f"<h1>{_inline(title)}</h1>", *parts])
    return _PAGE.format(title=escape(title), style=_STYLE, body=body)


def _inline(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""

_STYLE = """
:root { --ground: #ffffff; --text: #1d2430; --faint: #5d6776; --line: #d8dde4; --shade: #f4f6f8; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #14181f; --text: #e4e8ee; --faint: #9aa3b0; --line: #343c48; --shade: #1d232c; }
}
body {
  margin: 2rem auto; padding: 0 1rem; max-width: 68rem; background: var(--ground); color: var(--text);
  font: 16px/1.5 system-ui, "Segoe UI", Helvetica, Arial, sans-serif;
}
h1 { font-size: 1.6rem; margin-bottom: 0.5rem; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 0.6rem; padding-top: 0.6rem; border-top: 1px solid var(--line); }
p, ul { max-width: 48rem; }
code { font: 0.88em ui-monospace, Menlo, Consolas, monospace; background: var(--shade); padding: 0.1em 0.3em; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.25rem 0.7rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th { color: var(--faint); font-weight: 600; vertical-align: bottom; }
.key { text-align: left; }
tbody tr:hover { background: var(--shade); }
figure { margin: 1rem 0; padding: 0.6rem; border: 1px solid var(--line); border-radius: 6px; }
figure svg { display: block; max-width: 100%; height: auto; margin: auto; }
figcaption { color: var(--faint); font-size: 0.88rem; margin-top: 0.4rem; }
@media (prefers-color-scheme: dark) {
  figure { background: #191919; }
  figure svg { filter: invert(0.9) hue-rotate(180deg); }
}
@media print { body { margin: 0; max-width: none; } section { break-inside: avoid; } }
"""
