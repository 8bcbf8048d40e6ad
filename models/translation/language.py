"""English-like sentences and their translations into Velan, made by rules from a seed, and the score of a translation.

Velan puts the verb last, adjectives behind their noun and prepositions behind their phrase. Nouns have one of three
classes; article, adjective and verb agree with it. A reason goes before its result. Where a place and an object
meet, either may be first. After a numeral a noun stays singular. Many plurals and pasts are irregular.
"""

import itertools
import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from models.translation.lexicon import (
    CLASSES,
    INTRANSITIVE,
    NUMERALS,
    PREPOSITIONS,
    TIMES,
    TRANSITIVE,
    Lemma,
    Lexicon,
)

LEXICON = Lexicon()
HELD_OUT_ONE_IN = 16

_ARTICLES = ("la", "li", "lu")
_ENDINGS = {(number, noun_class): "aiu"[noun_class] + ("", "m")[number] for number in (0, 1) for noun_class in range(3)}
_OBJECT, _OBLIQUE = "n", "t"
_TENSES = {"past": "ed", "present": "os", "future": "ir"}


@dataclass(frozen=True)
class Phrase:
    """A noun with its adjective, numeral and clause. `numeral` is an index, as `noun` and `adjective` are."""

    noun: int
    plural: bool
    definite: bool
    adjective: int | None = None
    numeral: int | None = None
    relative: "Clause | None" = None


@dataclass(frozen=True)
class Clause:
    """Subject, verb, object, place and time. A relative clause has no subject of its own."""

    subject: Phrase
    verb: int
    tense: str
    negated: bool
    object: Phrase | None = None
    place: tuple[int, Phrase] | None = None
    time: str | None = None


@dataclass(frozen=True)
class Sentence:
    """One clause, or two joined by `and`, `but` or `because`."""

    clauses: tuple[Clause, ...]
    joined_by: str | None = None


@dataclass(frozen=True)
class Pair:
    """A sentence with its English text and one translation, its stems and its order drawn at random."""

    sentence: Sentence
    english: str
    velan: str

    @property
    def held_out(self) -> bool:
        """Whether training leaves this sentence out: by a hash of its English text."""
        return zlib.crc32(self.english.encode()) % HELD_OUT_ONE_IN == 0


def pairs(seed: int | str, held_out: bool) -> Iterator[Pair]:
    """Pairs for ever, the same ones for the same seed: those held out, or the others."""
    chance = random.Random(f"pairs {seed}")
    while True:
        sentence = _sentence(chance)
        pair = Pair(sentence, english(sentence), velan(sentence, chance))
        if pair.held_out == held_out:
            yield pair


def _sentence(chance: random.Random) -> Sentence:
    if chance.random() < 0.6:
        return Sentence((_clause(chance, None, 0.35),))
    joined_by = chance.choice(("and", "but", "because"))
    return Sentence((_clause(chance, None, 0.15), _clause(chance, None, 0.15)), joined_by)


def _clause(chance: random.Random, subject: Phrase | None, relatives: float) -> Clause:
    relative = subject is not None
    tense = chance.choice(tuple(_TENSES))
    transitive = chance.random() < 0.7
    verb = chance.randrange(len(TRANSITIVE))
    if not transitive:
        verb = len(TRANSITIVE) + chance.randrange(len(INTRANSITIVE))
    place = None
    if chance.random() < (0.2 if relative else 0.4):
        place = (chance.randrange(len(PREPOSITIONS)), _phrase(chance, 0.0))
    return Clause(
        subject or _phrase(chance, relatives),
        verb,
        tense,
        negated=chance.random() < 0.2,
        object=_phrase(chance, 0.0 if relative else relatives) if transitive else None,
        place=place,
        time=chance.choice(TIMES[tense]) if not relative and chance.random() < 0.3 else None,
    )


def _phrase(chance: random.Random, relatives: float) -> Phrase:
    numeral = chance.randrange(len(NUMERALS)) if chance.random() < 0.15 else None
    bare = Phrase(
        chance.randrange(len(LEXICON.nouns)),
        plural=numeral is not None or chance.random() < 0.35,
        definite=chance.random() < 0.7,
        adjective=chance.randrange(len(LEXICON.adjectives)) if chance.random() < 0.35 else None,
        numeral=numeral,
    )
    if chance.random() >= relatives:
        return bare
    relative = _clause(chance, bare, 0.0)
    return Phrase(bare.noun, bare.plural, bare.definite, bare.adjective, bare.numeral, relative)


# ------------------------------------------------------------------------------------------------------- English


def english(sentence: Sentence) -> str:
    """The English text."""
    words = _english_clause(sentence.clauses[0])
    if sentence.joined_by:
        words += [sentence.joined_by, *_english_clause(sentence.clauses[1])]
    return " ".join(words) + " ."


def _english_clause(clause: Clause, relative: bool = False) -> list[str]:
    words = [clause.time] if clause.time else []
    words += ["who"] if relative else _english_phrase(clause.subject)
    third, past, base = LEXICON.verbs[clause.verb].forms()
    plural = clause.subject.plural
    if clause.tense == "future":
        words += ["will", *(["not"] if clause.negated else []), base]
    elif clause.negated:
        words += ["did" if clause.tense == "past" else "do" if plural else "does", "not", base]
    else:
        words.append(past if clause.tense == "past" else base if plural else third)
    if clause.object:
        words += _english_phrase(clause.object)
    if clause.place:
        words += [PREPOSITIONS[clause.place[0]], *_english_phrase(clause.place[1])]
    return words


def _english_phrase(phrase: Phrase) -> list[str]:
    words = ["the"] if phrase.definite else [] if phrase.plural else ["one"]
    if phrase.numeral is not None:
        words.append(NUMERALS[phrase.numeral])
    if phrase.adjective is not None:
        words.append(LEXICON.adjectives[phrase.adjective].english)
    words.append(LEXICON.nouns[phrase.noun].forms()[phrase.plural])
    return words + (_english_clause(phrase.relative, relative=True) if phrase.relative else [])


# --------------------------------------------------------------------------------------------------------- Velan


class _Choices:
    """How one translation chooses among stems and orders: by chance, or always the first stem and a given order."""

    def __init__(self, chance: random.Random | None, places_first: Iterator[bool] | None = None) -> None:
        self.chance, self.places_first = chance, places_first

    def stem(self, word: Lemma, irregular: bool, kind: str, neighbour: int) -> str:
        stems = word.irregular if irregular and word.irregular else word.stems
        if self.chance is None or len(stems) == 1:
            return stems[0]
        return self.chance.choices(stems, LEXICON.preferences(word, kind, neighbour))[0]

    def place_first(self, preposition: int) -> bool:
        if self.places_first is not None:
            return next(self.places_first)
        return self.chance is not None and self.chance.random() < (0.2 + 0.1 * preposition)


def velan(sentence: Sentence, chance: random.Random) -> str:
    """One translation, its stems and orders drawn with `chance`."""
    return _velan(sentence, _Choices(chance))


def _velan(sentence: Sentence, choices: _Choices) -> str:
    parts = [_velan_clause(clause, choices) for clause in sentence.clauses]
    words = parts[0]
    if sentence.joined_by == "because":
        words = [*parts[1], LEXICON.particles["because"], *parts[0]]
    elif sentence.joined_by:
        words = [*parts[0], LEXICON.particles[sentence.joined_by], *parts[1]]
    return " ".join(words) + " ."


def _velan_clause(clause: Clause, choices: _Choices, relative: bool = False) -> list[str]:
    words = [LEXICON.times[clause.time]] if clause.time else []
    if not relative:
        words += _velan_phrase(clause.subject, "", clause.verb, choices)
    middle = []
    if clause.object:
        middle.append(_velan_phrase(clause.object, _OBJECT, clause.verb, choices))
    if clause.place:
        preposition, phrase = clause.place
        place = [*_velan_phrase(phrase, _OBLIQUE, clause.verb, choices), LEXICON.prepositions[preposition]]
        middle.insert(0 if clause.object is None or choices.place_first(preposition) else 1, place)
    words += itertools.chain(*middle)
    governor = clause.object or clause.subject
    stem = choices.stem(LEXICON.verbs[clause.verb], clause.tense == "past", "noun", governor.noun)
    number, noun_class = _agreement(clause.subject)
    words.append(stem + _TENSES[clause.tense] + _ENDINGS[number, noun_class])
    return words + ([LEXICON.particles["not"]] if clause.negated else [])


def _agreement(phrase: Phrase) -> tuple[int, int]:
    return int(phrase.plural and phrase.numeral is None), LEXICON.nouns[phrase.noun].noun_class


def _velan_phrase(phrase: Phrase, case: str, verb: int, choices: _Choices) -> list[str]:
    noun = LEXICON.nouns[phrase.noun]
    number, noun_class = _agreement(phrase)
    words = [_ARTICLES[noun_class]] if phrase.definite else []
    if phrase.numeral is not None:
        words.append(LEXICON.numerals[phrase.numeral])
    words.append(choices.stem(noun, bool(number), "verb", verb) + _ENDINGS[number, noun_class] + case)
    if phrase.adjective is not None:
        stem = choices.stem(LEXICON.adjectives[phrase.adjective], False, "noun", phrase.noun)
        words.append(stem + _ENDINGS[number, noun_class])
    if phrase.relative:
        clause = _velan_clause(phrase.relative, choices, relative=True)
        words += [LEXICON.particles["who"], *clause, LEXICON.particles["end"]]
    return words


# --------------------------------------------------------------------------------------------------------- score


def _first_stems() -> dict[str, str]:
    """Each stem that has synonyms, and the first of them."""
    words = [*LEXICON.nouns, *LEXICON.verbs, *LEXICON.adjectives]
    return {stem: group[0] for word in words for group in (word.stems, word.irregular) for stem in group}


_FIRST = _first_stems()


def canonical(text: str) -> str:
    """`text` with the first of its synonyms in place of each stem; words that are not Velan stay as they are."""
    return " ".join(_canonical_word(word) for word in text.split())


def _canonical_word(word: str) -> str:
    for length in range(len(word), 0, -1):
        if word[:length] in _FIRST:
            return _FIRST[word[:length]] + word[length:]
    return word


def translations(sentence: Sentence) -> list[str]:
    """Every right translation, in canonical form: one for each order of places and objects."""
    orders = itertools.product((False, True), repeat=_free_orders(sentence))
    return [_velan(sentence, _Choices(None, iter(order))) for order in orders]


def _free_orders(sentence: Sentence) -> int:
    clauses = list(sentence.clauses)
    for clause in sentence.clauses:
        places = [clause.place[1]] if clause.place else []
        phrases = [clause.subject, *([clause.object] if clause.object else []), *places]
        clauses += [phrase.relative for phrase in phrases if phrase.relative]
    return sum(1 for clause in clauses if clause.place and clause.object)


def is_right(text: str, sentence: Sentence) -> bool:
    """Whether `text` translates `sentence` without a fault."""
    return canonical(text) in translations(sentence)


assert len(_ARTICLES) == CLASSES
