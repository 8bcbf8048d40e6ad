"""Cuts a text into the parts of its tokens."""

from collections.abc import Sequence

_BROKEN = "\ufffd"  # in the text of a token that holds a part of a character

# A token holds at most so many characters of a text in which it cannot be found.
_MOST_CHARACTERS = 8


def parts_of_tokens(text: str, token_texts: Sequence[str]) -> list[str]:
    """Cuts a text into the parts of its tokens; joined they are the text. `token_texts` is each token's text alone.

    A token's text alone is not always its part: a character may span tokens, and some tokenizers drop the space before
    a word. Tokens that cannot be found share the text between their neighbours, in equal parts.
    """
    parts = [""] * len(token_texts)
    lost: list[int] = []  # tokens not found since the last one that was
    position = 0
    for i, token_text in enumerate(token_texts):
        if not token_text:
            continue
        found = _find(text, token_text, position, len(lost))
        if found < 0:
            lost.append(i)
            continue
        end = found + len(token_text)
        if lost:
            _share(text[position:found], lost, parts)
            lost, position = [], found
        parts[i] = text[position:end]
        position = end
    if lost:
        _share(text[position:], lost, parts)
    elif parts:
        parts[-1] += text[position:]
    return parts


def _find(text: str, token_text: str, position: int, lost: int) -> int:
    """Where the token begins, after so many lost tokens; -1 if it is not found near."""
    if _BROKEN in token_text:
        return -1
    found = text.find(token_text, position, position + lost * _MOST_CHARACTERS + len(token_text) + 1)
    return found if lost or not text[position:found].strip() else -1


def _share(text: str, tokens: Sequence[int], parts: list[str]) -> None:
    begin = 0
    for count, token in enumerate(tokens, 1):
        end = len(text) * count // len(tokens)
        parts[token], begin = text[begin:end], end
