"""A report is one page that loads nothing, and escapes its texts."""

from html.parser import HTMLParser

from outrider.evaluation.report import Table, captioned, page, paragraph, points, section

TABLE = Table(("name", "value"), [("<b>", "1.0"), ("`code`", "2 & 3")])


class Seen(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_page_is_well_formed_and_escapes_its_text() -> None:
    svg = "<svg><text>letters</text></svg>"
    parts = section("Title", TABLE.html(), captioned(svg, "what it shows"))
    seen = Seen(page("A < B", paragraph("a & b"), points(["one"]), parts))
    assert seen.open == []
    assert "b" not in seen.tags
    assert seen.tags.count("tr") == 3
    for words in ("A < B", "a & b", "<b>", "2 & 3", "letters", "what it shows", "one"):
        assert words in seen.text
    assert "`" not in seen.text


def test_a_page_loads_nothing() -> None:
    seen = Seen(page("A page", section("Title", paragraph("text"))))
    assert {"script", "img", "iframe"}.isdisjoint(seen.tags)
    loads = [value for name, value in seen.attributes if name in ("src", "href")]
    assert loads == ["data:,"], "no icon is asked for"


def test_markdown_has_a_column_for_each_head() -> None:
    assert TABLE.markdown().splitlines() == [
        "| name | value |",
        "| --- | ---: |",
        "| <b> | 1.0 |",
        "| `code` | 2 & 3 |",
    ]
    assert TABLE.markdown(padded=True).splitlines() == [
        "| name   | value |",
        "| ------ | ----: |",
        "| <b>    |   1.0 |",
        "| `code` | 2 & 3 |",
    ]
