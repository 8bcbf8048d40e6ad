"""The words of both languages: English ones by hand, Velan ones from syllables drawn with a fixed seed.

Each English lemma has one to three Velan stems that mean the same. Which of them a speaker takes is chance, and the
chance depends on the word that goes with it: `preferences` holds the odds.
"""

# ruff: noqa: SIM905 - lists of words, as they are easiest to read

import random
from dataclasses import dataclass

SEED = 19
CLASSES = 3

# Singular and plural.
NOUNS = """man/men woman/women child/children king/kings queen/queens farmer/farmers baker/bakers sailor/sailors
soldier/soldiers teacher/teachers thief/thieves doctor/doctors dog/dogs cat/cats horse/horses cow/cows sheep/sheep
goose/geese mouse/mice wolf/wolves bear/bears fish/fish bird/birds snake/snakes house/houses tower/towers bridge/bridges
boat/boats cart/carts table/tables chair/chairs bed/beds door/doors knife/knives cup/cups lamp/lamps book/books
letter/letters coin/coins ring/rings apple/apples egg/eggs loaf/loaves tree/trees river/rivers hill/hills garden/gardens
market/markets""".split()
# Third person, past, base; verbs with an object, then verbs without one.
TRANSITIVE = """sees/saw/see hears/heard/hear finds/found/find takes/took/take buys/bought/buy sells/sold/sell
breaks/broke/break builds/built/build paints/painted/paint carries/carried/carry hides/hid/hide loves/loved/love
fears/feared/fear follows/followed/follow leaves/left/leave draws/drew/draw washes/washed/wash steals/stole/steal
guards/guarded/guard forgets/forgot/forget""".split()
INTRANSITIVE = """sleeps/slept/sleep waits/waited/wait sings/sang/sing falls/fell/fall laughs/laughed/laugh
runs/ran/run rests/rested/rest swims/swam/swim weeps/wept/weep dances/danced/dance""".split()
ADJECTIVES = """old young big small red white black tall quiet angry happy hungry clever broken heavy golden""".split()
PREPOSITIONS = "in under behind near before without".split()
NUMERALS = "two three four five six seven".split()
TIMES = {"past": ["yesterday", "then"], "present": ["today", "now"], "future": ["tomorrow", "soon"]}

_CONSONANTS, _VOWELS = "p t k b d g m n s l r v z h".split(), "aeio"


@dataclass(frozen=True)
class Lemma:
    """One English lemma in Velan: stems of one meaning, and stems of the irregular form (empty where it is regular).

    `noun_class` means something for nouns alone.
    """

    english: str
    stems: tuple[str, ...]
    irregular: tuple[str, ...]
    noun_class: int = 0

    def forms(self) -> list[str]:
        """English forms, as the lists above have them."""
        return self.english.split("/")


class Lexicon:
    """Every word of Velan; the same each time, as the seed is fixed."""

    def __init__(self) -> None:
        self._chance = random.Random(SEED)
        self._taken: set[str] = set()
        # Every fourth noun has a plural of its own, every third verb a past of its own.
        self.nouns = [self._lemma(word, index % 4 == 0, index * 7 % CLASSES) for index, word in enumerate(NOUNS)]
        self.verbs = [self._lemma(word, index % 3 == 0) for index, word in enumerate(TRANSITIVE + INTRANSITIVE)]
        self.adjectives = [self._lemma(word) for word in ADJECTIVES]
        self.prepositions = [self._stem(1) for _ in PREPOSITIONS]
        self.numerals = [self._stem(1) for _ in NUMERALS]
        self.times = {time: self._stem(2) for times in TIMES.values() for time in times}
        self.particles = {name: self._stem(1) for name in ("who", "end", "not", "because", "and", "but")}
        vectors = {
            kind: [[self._chance.gauss(0, 1) for _ in range(3)] for _ in range(count)]
            for kind, count in (("noun", len(self.nouns)), ("verb", len(self.verbs)))
        }
        self._odds = {
            (word.english, kind, index): self._weights(word, vector)
            for word in [*self.nouns, *self.verbs, *self.adjectives]
            for kind, rows in vectors.items()
            for index, vector in enumerate(rows)
        }

    def preferences(self, word: Lemma, kind: str, neighbour: int) -> list[float]:
        """The odds of each stem of `word` next to the noun or verb (`kind`) of index `neighbour`."""
        return self._odds[word.english, kind, neighbour]

    def _lemma(self, english: str, irregular: bool = False, noun_class: int = 0) -> Lemma:
        count = self._chance.choice((1, 2, 2, 3))
        stems = tuple(self._stem(2) for _ in range(count))
        return Lemma(english, stems, tuple(self._stem(2) for _ in stems) if irregular else (), noun_class)

    def _stem(self, syllables: int) -> str:
        """A stem that is new; it ends in a consonant, so that suffixes (all begin with a vowel) can be told from it."""
        while True:
            parts = [self._chance.choice(_CONSONANTS) + self._chance.choice(_VOWELS) for _ in range(syllables)]
            stem = "".join(parts) + self._chance.choice("nslrkm")
            if stem not in self._taken:
                self._taken.add(stem)
                return stem

    def _weights(self, word: Lemma, vector: list[float]) -> list[float]:
        own = random.Random(f"{word.english} {word.stems}")
        scores = [sum(own.gauss(0, 1) * value for value in vector) for _ in word.stems]
        return [2.0**score for score in scores]
