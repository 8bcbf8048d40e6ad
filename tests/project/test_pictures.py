"""The committed pictures of the documentation are those that their sources draw."""

from docs.pictures.draw import HERE, pictures


def test_pictures_are_those_of_their_sources() -> None:
    for name, svg in pictures().items():
        assert (HERE / name).read_text(encoding="utf-8") == svg, f"run `python docs/pictures/draw.py`: {name} is old"
