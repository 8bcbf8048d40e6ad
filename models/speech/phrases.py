"""The texts: short orders in English and German, made by rules; one means the other word by word."""

import random

LANGUAGES = ("en", "de")

_DIGITS = "zero/null one/eins two/zwei three/drei four/vier five/fünf six/sechs seven/sieben eight/acht nine/neun"
_WORDS = """call/rufe count/zähle open/öffne close/schließe turn/gehe left/links right/rechts door/tür window/fenster
gate/tor red/rot green/grün blue/blau light/licht box/kiste stop/halte now/jetzt"""
DIGITS = [entry.split("/")[0] for entry in _DIGITS.split()]
GERMAN = dict(entry.split("/") for entry in f"{_DIGITS} {_WORDS}".split())

# Each word is one of its alternatives; # is a digit.
_PATTERNS = [
    "call|count # # #",
    "# # # #",
    "# #",
    "open|close door|window|gate #",
    "open|close red|green|blue box",
    "turn left|right",
    "turn left|right now",
    "red|green|blue light #",
    "stop|count now",
    "stop # # now",
]


def phrase(chance: random.Random) -> tuple[str, ...]:
    """One order, in English words."""
    words = []
    for part in chance.choice(_PATTERNS).split():
        words.append(chance.choice(DIGITS if part == "#" else part.split("|")))
    return tuple(words)


def spoken(words: tuple[str, ...], language: str) -> str:
    """The order in `language`."""
    return " ".join(words if language == "en" else (GERMAN[word] for word in words))
