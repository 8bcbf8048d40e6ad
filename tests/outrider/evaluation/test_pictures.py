"""Pictures are written as PNG and SVG, and several SVG pictures stand in one page."""

import io
from pathlib import Path
from xml.etree import ElementTree

import pytest

from outrider.evaluation.pictures import BLUE, Destination, bars, level, line, picture, svg

SVG = "{http://www.w3.org/2000/svg}"


def _draw(to: Destination, note: str = "a note") -> None:
    with picture(to, 1, 3, size=(3, 2), note=note) as panels:
        first, second, _ = panels[0]
        bars(first, ["low", "high"], {"measured": [(2.0, 1.5, 2.5), None]}, colours={"measured": BLUE}, text="{:.1f}")
        level(first)
        line(second, [(0, 1.0), (1, None), (2, 3.0)], label="line")


@pytest.mark.parametrize(("name", "start"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml")])
def test_the_suffix_gives_the_format(tmp_path: Path, name: str, start: bytes) -> None:
    path = tmp_path / name
    _draw(path)
    assert path.read_bytes().startswith(start)


def test_svg_is_one_element_and_the_same_each_time() -> None:
    text = svg(_draw)
    root = ElementTree.fromstring(text)
    assert root.tag == f"{SVG}svg"
    letters = {"".join(each.itertext()).strip() for each in root.iter(f"{SVG}text")}
    assert {"a note", "measured", "low", "high", "2.0"} <= letters
    assert svg(_draw) == text


def test_pictures_in_one_page_share_no_reference_by_chance() -> None:
    def another(to: io.StringIO) -> None:
        with picture(to, 2, 1, size=(5, 2)) as panels:
            line(panels[1][0], [(0, 1.0), (1, 2.0)], marker="o")

    def clips(text: str) -> dict[str, str]:
        found = ElementTree.fromstring(text).iter(f"{SVG}clipPath")
        return {each.attrib["id"]: ElementTree.tostring(each, encoding="unicode") for each in found}

    one, other = clips(svg(_draw)), clips(svg(another))
    assert one
    assert other
    assert all(one[name] == other[name] for name in one.keys() & other.keys())
