"""Frozen values with the fields of the contract's messages, by name, and its enums."""

import struct
from collections.abc import Callable
from dataclasses import fields
from enum import StrEnum
from functools import cache, lru_cache
from operator import attrgetter
from typing import Any, Self, TypeAlias, get_args, get_origin, get_type_hints


class Named(StrEnum):
    """An enum of the contract: its names without their prefix, in lower case."""

    @classmethod
    def of(cls, number: int) -> Self:
        found: Self = _by_number(cls)[number]
        return found

    @property
    def number(self) -> int:
        return list(type(self)).index(self)


class _Numbered(dict[int, Any]):
    """The members of an enum by their numbers, from 0; a number that is none has the first one. To read it is a call in
    C: a chunk has a number for each token.
    """

    def __missing__(self, number: int) -> Any:
        return self[0]


@cache
def _by_number(kind: type[Named]) -> _Numbered:
    return _Numbered(enumerate(kind))


class Mirror:
    """A dataclass whose fields are those of one message, by name."""

    __slots__ = ()

    @classmethod
    def of(cls, message: Any) -> Self:
        return cls(*cls._read(message))

    @classmethod
    def _read(cls, message: Any) -> list[Any]:
        """The values of the first fields; those that the message does not have come last."""
        kind: Any = cls
        get, converters = _reader(kind, message.DESCRIPTOR)
        values = list(get(message))
        for place, convert in converters:
            values[place] = convert(values[place])
        return values


_Convert: TypeAlias = Callable[[Any], Any]


@cache
def _reader(kind: Any, message: Any) -> tuple[_Convert, tuple[tuple[int, _Convert], ...]]:
    """What reads all fields of such a message at once, and what converts those at some places."""
    hints = get_type_hints(kind)
    names = [each.name for each in fields(kind)]
    known = [name for name in names if name in message.fields_by_name]
    assert known == names[: len(known)]
    assert len(known) > 1  # else the getter returns no tuple
    converters = ((place, _converter(hints[name])) for place, name in enumerate(known))
    return attrgetter(*known), tuple((place, convert) for place, convert in converters if convert is not None)


def _converter(hint: Any) -> _Convert | None:
    if hint is float:
        return _shortest
    if isinstance(hint, type) and issubclass(hint, Named):
        return _by_number(hint).__getitem__
    if isinstance(hint, type) and issubclass(hint, Mirror):
        return hint.of
    if get_origin(hint) is tuple:
        item = _converter(get_args(hint)[0])
        return tuple if item is None else lambda items: tuple(map(item, items)) if items else ()
    return None


@lru_cache(1024)  # of a prompt, `raw` and `adjusted` are the same
def _shortest(value: float) -> float:
    """The shortest decimal of the same float32: 0.7, not 0.699999988079071."""
    exact = struct.pack("<f", value)
    return next((short for n in (6, 7, 8) if struct.pack("<f", short := float(f"{value:.{n}g}")) == exact), value)
