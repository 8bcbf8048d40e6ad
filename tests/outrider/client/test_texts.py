"""The text of tokens is cut into the parts of each token."""

import random

import pytest

from outrider.client.texts import parts_of_tokens

LETTERS = ["a", " a", "b", "é", "謝", " 鑫", "🙂", "\n", ""]


@pytest.mark.parametrize(
    ("text", "token_texts", "parts"),
    [
        ("ab c", ["a", "b", " c"], ["a", "b", " c"]),
        ("x é y", ["x", " \ufffd", "\ufffd", " y"], ["x", " ", "é", " y"]),
        ("é", ["\ufffd", "\ufffd"], ["", "é"]),
        ("Hello world", ["Hello", "world"], ["Hello", " world"]),
        ("a謝鑫b", ["a", "\ufffd", "\ufffd", "", "\ufffd", "\ufffd", "b"], ["a", "", "謝", "", "", "鑫", "b"]),
        ("so it is so", [" so", " it", " is", " so"], ["so", " it", " is", " so"]),
        ("", [], []),
        ("", ["", ""], ["", ""]),
    ],
)
def test_each_token_has_its_part(text: str, token_texts: list[str], parts: list[str]) -> None:
    assert parts_of_tokens(text, token_texts) == parts


def test_parts_join_to_the_text_and_whole_tokens_are_found() -> None:
    random_ = random.Random(1)
    for _ in range(500):
        pieces = [random_.choice(LETTERS) for _ in range(random_.randrange(12))]
        broken = [random_.random() < 0.2 for _ in pieces]
        texts = ["\ufffd" if is_broken else piece for piece, is_broken in zip(pieces, broken, strict=True)]
        parts = parts_of_tokens("".join(pieces), texts)
        assert "".join(parts) == "".join(pieces)
        if not any(broken):
            assert parts == pieces
