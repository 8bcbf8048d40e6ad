"""The results of a check, and what they mean in words."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from outrider.evaluation.chisquare import Fit, detectable
from outrider.evaluation.token_fit import holm
from outrider.rpc.errors import counted

LEVEL = 1e-4
POWER = 0.95
_NOMINAL = LEVEL / 2
"""The level by χ²'s tails. Those of counts are heavier: simulated checks reject up to 1.7 times as often."""
ALONE, LOAD, RESUMED = "alone", "under load", "resumed"
NO_DRAFT, EVERY = "no draft", "all"
NEXT, BY_PROBABILITY, BY_ID = "next token", "three tokens, by probability", "three tokens, by id"
GREEDY, COUPLED = "greedy", "coupled"
TARGET_ALONE, LOCAL_TARGET = "target alone", "local target"


@dataclass(frozen=True, slots=True)
class Equality:
    """Texts compared token for token.

    Attributes:
        kind: `GREEDY` or `COUPLED`.
        reference: `TARGET_ALONE` (the deployment without a draft) or `LOCAL_TARGET`.
        where: `ALONE`, `LOAD` or `RESUMED`; or `EVERY`.
        texts: compared.
        tokens: compared; a text counts up to its first difference from the target alone.
        near_ties: differences within rounding.
        differences: others.
        example: the first of them, in words.
    """

    kind: str
    reference: str
    where: str
    texts: int
    tokens: int
    near_ties: int
    differences: int
    example: str

    @property
    def is_biased(self) -> bool:
        return self.differences > 0


@dataclass(frozen=True, slots=True)
class Sampled:
    """One statistical test.

    Attributes:
        test: `NEXT`, `BY_PROBABILITY` or `BY_ID`.
        rule: of the texts; `NO_DRAFT`, or `EVERY` with a draft.
        where: `ALONE`, `LOAD` or `RESUMED`; or `EVERY`.
        tokens: of the texts.
        fit: χ².
        finds: the total variation that it finds with `POWER`, between its cells; None if there are too few counts.
        is_biased: whether Holm's method rejects it.
    """

    test: str
    rule: str
    where: str
    tokens: int
    fit: Fit
    finds: float | None = None
    is_biased: bool = False


def judged(tests: Sequence[Sampled], allowed: float) -> list[Sampled]:
    """Return the tests with what Holm's method rejects, and with their power at Bonferroni's level.

    `allowed` is the χ² distance of one token's distribution that rounding explains.
    """
    rejected = holm([each.fit.p_value for each in tests], _NOMINAL)
    level = _NOMINAL / len(tests)

    def finds(test: Sampled) -> float | None:
        fit, per_count = test.fit, allowed if test.test == NEXT else 3 * allowed
        return detectable(fit.df, fit.n, level=level, power=POWER, allowed=per_count) if fit.df and fit.n else None

    return [replace(each, finds=finds(each), is_biased=no) for each, no in zip(tests, rejected, strict=True)]


@dataclass(frozen=True, slots=True)
class Report:
    """What a check found.

    Attributes:
        reference: `LOCAL_TARGET` or `TARGET_ALONE`.
        reference_dtype: of the local copy.
        rounding: difference of two scores, in nats, that may be due to rounding.
        drafted: tokens drafted, by rule.
        accepted: those of them that were accepted.
        num_resumed: texts that were cut and resumed.
    """

    draft: str
    target: str
    dtype: str
    reference: str
    reference_dtype: str
    rounding: float
    drafted: Mapping[str, int]
    accepted: Mapping[str, int]
    num_resumed: int
    equalities: Sequence[Equality]
    tests: Sequence[Sampled]
    seconds: float

    @property
    def is_biased(self) -> bool:
        return bool(self.wrong_texts or self.misfits)

    @property
    def wrong_texts(self) -> list[Equality]:
        return [each for each in self.equalities if each.is_biased]

    @property
    def misfits(self) -> list[Sampled]:
        """The rejected tests, the clearest first."""
        return sorted((each for each in self.tests if each.is_biased), key=lambda each: each.fit.p_value)

    @property
    def next_tokens(self) -> Sampled | None:
        """The test of next tokens of all texts with a draft; None if it has no cells."""
        return next((each for each in self.tests if (each.test, each.rule) == (NEXT, EVERY) and each.fit.df), None)

    @property
    def finds(self) -> float | None:
        """The total variation of next tokens that would be found, after the most frequent contexts."""
        return None if self.next_tokens is None else self.next_tokens.finds

    @property
    def verdict(self) -> list[str]:
        """What was found, as sentences."""
        return _biased(self) if self.is_biased else _exact(self)


_TEXT = {GREEDY: "Text at temperature 0", COUPLED: "Text of one seed under the rule coupled"}


def _exact(report: Report) -> list[str]:
    ties = sum(each.near_ties for each in report.equalities)
    kinds = " and ".join(dict.fromkeys(_TEXT[each.kind] for each in report.equalities)).replace("and Text", "and text")
    near = f", but for {ties} near-ties (scores within {report.rounding:g} nats)" if ties else ""
    sampled = "Sampled tokens were too few, or too certain, for a test of their distribution."
    if report.next_tokens is not None:
        contexts = counted(report.next_tokens.fit.rows, "most frequent context")
        sampled = (
            f"Sampled tokens fit the target's distribution. A total variation of {report.finds:.2g} or more, of next "
            f"tokens after the {contexts}, would have been found with a chance of {POWER:.0%}; rare tokens of a "
            "context count as one."
        )
    elif any(each.fit.df for each in report.tests):
        sampled = (
            "Sampled tokens fit the target's distribution, in the few cells of three tokens. Single tokens, and so the "
            "tail of the distribution, were not tested: no context was frequent enough."
        )
    return [
        "No bias found.",
        f"{kinds}: the same tokens with a draft and without{near}.",
        sampled,
        f"An exact deployment fails this check once in {1 / LEVEL:,.0f} runs.",
        *_scope(report),
    ]


def _biased(report: Report) -> list[str]:
    said = ["Biased: the text of this deployment is not distributed as its target's."]
    for reference in (TARGET_ALONE, LOCAL_TARGET):
        for kind in (GREEDY, COUPLED):
            wrong = [each for each in report.wrong_texts if (each.kind, each.reference) == (kind, reference)]
            if wrong:
                count = sum(each.differences for each in wrong)
                said.append(
                    f"{_TEXT[kind]} is not that of the {reference}: {count} differences; first: {wrong[0].example}."
                )
    if report.misfits:
        first = report.misfits[0]
        said.append(
            f"Sampled tokens do not fit the target's distribution: {len(report.misfits)} of {len(report.tests)} tests "
            f"fail; the clearest is {first.test} ({_named(first)}), p = {first.fit.p_value:.1g}."
        )
    return [*said, _advice(report), *_scope(report)]


def _named(test: Sampled) -> str:
    return "all texts with a draft" if test.rule == EVERY else f"{test.rule}, {test.where}"


def _advice(report: Report) -> str:
    """Where to look first."""
    misfits = [each for each in report.misfits if each.rule != EVERY]
    without = [each for each in misfits if each.rule == NO_DRAFT and each.where != RESUMED]
    if without:
        return "The target alone does not fit either: look at the verifier's weights, dtype and sampling first."
    wrong = [each for each in report.wrong_texts if each.reference == TARGET_ALONE]
    if report.wrong_texts and not wrong:
        return "A draft changes nothing, but the target alone does not write as the local copy: compare both first."
    places = {each.where for each in misfits} | {each.where for each in wrong}
    if places == {RESUMED}:
        return "Only texts that were cut and resumed differ: look at how a request continues."
    if places == {LOAD} and not report.misfits:  # misfits are clearest there, since most texts are
        return "Only texts under load differ: look at batches and the KV cache of the services."
    rules = {each.rule for each in misfits if each.rule != NO_DRAFT} | {each.kind for each in wrong}
    only = f" Only {next(iter(rules))} text is affected." if len(rules) == 1 else ""
    return f"Speculation is at fault: look at draft probabilities, acceptance, and the token after a rejection.{only}"


def _scope(report: Report) -> list[str]:
    if report.reference == LOCAL_TARGET:
        return []
    return [
        "The reference was the deployment's own target without a draft: this tests speculation only. With --target the "
        "target is tested too."
    ]
