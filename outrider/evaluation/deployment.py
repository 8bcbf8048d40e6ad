"""Measures a pair of services as its clients see it: the target alone, fixed γ, the default policy, each drafter.

All arms write equally many texts after the same prompts, and take turns; other work on the machines affects them alike.
A cell is one arm at one temperature with one number of streams. Its figures are medians over the repeats.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, product
from random import Random
from statistics import median
from typing import Any

from outrider import theory
from outrider.client import AsyncClient, Completion, Drafter, Finished, InvalidRequest, Options, Started, Statistics
from outrider.evaluation import EvaluationError
from outrider.evaluation.clips import Clip, Source, request_of
from outrider.evaluation.streams import (
    PHASES,
    Request,
    Served,
    for_each,
    judged_tokens,
    phase_seconds,
    serve,
    target_passes,
)
from outrider.rpc.errors import counted

Json = dict[str, Any]

ALONE, POLICY = "target alone", "default policy"

ROUND = (*PHASES, "other")
"""Parts of a round: the phases, and all other work of the draft service from the first token to the end.

A round without a draft is one token."""

PROMPTS = (
    'def mean(values):\n    """Return the arithmetic mean of a list of numbers."""\n',
    "The history of the lighthouse begins with fires that were lit on hills near a harbour. Later",
    "Question: Why is the sky blue?\nAnswer:",
    "import json\nfrom pathlib import Path\n\n\ndef read_settings(path):\n",
)
"""Continued where no other prompts are given."""

_WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a measurement: the options of `outrider bench`, which describe them.

    Attributes:
        prompts: taken in turn; clips for a pair of speech models.
        drafters: the first one is that of the fixed γ and the default policy; each other one drafts with one γ.
    """

    prompts: Sequence[Source]
    gammas: tuple[int, ...] = (2, 4, 8)
    drafters: tuple[Drafter, ...] = (Drafter.MODEL,)
    temperatures: tuple[float, ...] = (0.0, 1.0)
    streams: tuple[int, ...] = (1, 4, 16)
    texts: int = 4
    max_new_tokens: int = 64
    repeats: int = 3
    stop_at_eos: bool = False

    def arms(self) -> dict[str, Json]:
        """Return the options of the client that select each arm, by its name, the target alone first."""
        first, *others = self.drafters
        middle = sorted(self.gammas)[len(self.gammas) // 2]  # with it drafters are compared
        fixed = {f"γ = {gamma}": {"gamma": gamma, "drafter": first} for gamma in self.gammas}
        compared = {f"{drafter}, γ = {middle}": {"gamma": middle, "drafter": drafter} for drafter in others}
        return {ALONE: {"gamma": 0}, **fixed, POLICY: {"drafter": first}, **compared}

    @property
    def num_texts(self) -> int:
        """Texts of the whole measurement, those of the warm-up included."""
        return len(self.arms()) * len(self.temperatures) * sum(self.streams) * (1 + self.repeats * self.texts)

    @property
    def prompts_of_repeat(self) -> int:
        """Prompts of each cell of a repeat: the same with any number of streams, and each equally often."""
        return self.texts * math.gcd(*self.streams)

    @property
    def num_prompts(self) -> int:
        """Prompts that the measurement uses."""
        return min(len(self.prompts), self.repeats * self.prompts_of_repeat)


@dataclass(slots=True)
class Run:
    """One repeat of one cell. `speech` are the seconds of speech of each text that is `served`; none without speech."""

    temperature: float
    streams: int
    arm: str
    repeat: int
    served: list[Served] = field(default_factory=list)
    speech: list[float] = field(default_factory=list)

    @property
    def answered(self) -> list[Served]:
        return [each for each in self.served if each.stamps]

    @property
    def finished(self) -> list[Finished]:
        """The ends of the texts whose statistics are known."""
        return [each.finished for each in self.answered if each.finished is not None]

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all streams over the time from the first request to the last token."""
        return self._per_second(sum(each.tokens for each in self.answered))

    @property
    def speech_per_second(self) -> float | None:
        """Seconds of speech that were transcribed in a second, by all streams; None without speech."""
        if not any(self.speech):
            return None
        return self._per_second(sum(s for s, each in zip(self.speech, self.served, strict=True) if each.stamps))

    def _per_second(self, amount: float) -> float:
        seconds = max((each.end for each in self.answered), default=0.0)
        return amount / seconds if seconds else 0.0

    @property
    def ttft_ms(self) -> float | None:
        """Median time from a request to its first token."""
        return _median_ms(each.seconds_to_first for each in self.answered)

    @property
    def tpot_ms(self) -> float | None:
        """Median over the texts of the time per token after the first piece."""
        return _median_ms(each.seconds_per_token for each in self.answered)

    @property
    def predicted_tpot_ms(self) -> float | None:
        """The time per token by [L Theorem 3.8]; None unless all rounds have drafts, but for the first or last one."""
        counts, times = [each.statistics for each in self.finished], round_seconds(self.finished)
        alpha, passes = mean_alpha(counts), _passes(self.finished)
        if times is None or alpha is None or sum(each.num_drafts for each in counts) < passes - len(counts):
            return None
        gamma = sum(each.num_draft_tokens for each in counts) / passes
        return 1e3 * predicted_seconds(alpha, gamma, sum(times.values()))


async def measure(
    client: AsyncClient,
    settings: Settings,
    runs: list[Run],
    report: Callable[[str, str, int], None] = lambda stage, cell, texts: None,
) -> None:
    """Measure all cells.

    Args:
        runs: takes each run when it is complete: what an error or a cancellation leaves.
        report: called with the names of the current repeat and of the current cell, and the number of texts that were
            written since the last call.

    Raises:
        EvaluationError: a prompt cannot be used; nothing was measured.
        OutriderError: a request failed.
    """
    salts, arms = count(), settings.arms()
    await _check_prompts(client, settings)

    async def write(stage: str, run: Run, texts: int, max_new_tokens: int) -> Run:
        name = f"T = {run.temperature:g}, {counted(run.streams, 'stream')}, {run.arm}"
        report(stage, name, 0)
        options = arms[run.arm] | {
            "temperature": run.temperature, "max_new_tokens": max_new_tokens, "ignore_eos": not settings.stop_at_eos,
        }  # fmt: skip
        sources = list(_turn(settings, run.repeat, texts * run.streams))
        requests: list[Request] = []
        for prompt, speech in map(request_of, sources):
            # A salt of its own: no text finds its prompt in a prefix cache.
            requests.append((prompt, options | speech | {"cache_salt": f"outrider bench {next(salts)}"}))
        run.served = await serve(client, requests, run.streams, report=lambda: report(stage, name, 1))
        run.speech = [each.samples.seconds if isinstance(each, Clip) else 0.0 for each in sources]
        return run

    cells = list(product(settings.temperatures, settings.streams))
    for temperature, streams in cells:
        for arm in arms:  # the policy learns from whole texts
            tokens = settings.max_new_tokens if arm == POLICY else _WARM_UP_TOKENS
            await write("Warm-up", Run(temperature, streams, arm, 0), 1, min(tokens, settings.max_new_tokens))
    for repeat in range(settings.repeats):
        stage = f"Repeat {repeat + 1} of {settings.repeats}"
        for nth, (temperature, streams) in enumerate(cells):
            for arm in _in_turn(arms, repeat, nth):
                run = Run(temperature, streams, arm, repeat)
                runs.append(await write(stage, run, settings.texts, settings.max_new_tokens))


def _in_turn(arms: Iterable[str], repeat: int, cell: int) -> list[str]:
    """The arms of a cell, in an order that depends on both numbers alone: no arm always follows the same one."""
    order = [*arms]
    Random(f"{repeat} {cell}").shuffle(order)
    return order


def _turn(settings: Settings, repeat: int, number: int) -> Iterator[Source]:
    """So many prompts. Those of a repeat follow the ones of the repeat before, so that all prompts occur."""
    size, prompts = settings.prompts_of_repeat, settings.prompts
    return (prompts[(repeat * size + nth % size) % len(prompts)] for nth in range(number))


async def _check_prompts(client: AsyncClient, settings: Settings) -> None:
    """Begins a text after each prompt, and drops it: a bad prompt of a later repeat is an error now."""

    async def begin(number: int) -> None:
        prompt, speech = request_of(settings.prompts[number])
        options = Options(gamma=0, max_new_tokens=settings.max_new_tokens, ignore_eos=not settings.stop_at_eos)
        events = client.generate(prompt, **(speech | options))
        try:
            async for event in events:
                if isinstance(event, Started):
                    break
        except InvalidRequest as error:
            raise EvaluationError(f"prompt {number + 1} cannot be used: {error.message}") from error
        finally:
            await events.aclose()

    await for_each(range(settings.num_prompts), begin, min(settings.streams))


def summarise(runs: Sequence[Run], settings: Settings) -> list[Json]:
    """Return the figures of each cell, in the order of temperatures, streams and arms. None: nothing to measure.

    - `tokens_per_second`, `ttft_ms`, `tpot_ms`: median, lowest and highest repeat; see `Run`.
    - `speech_per_second`: seconds of speech transcribed in a second; None without speech.
    - `ratio`: tokens/s over those of the target alone in the same repeat.
    - `alpha`: mean over the judged tokens. `gamma`: drafted tokens of a round. `policy`: that chose γ.
    - `round_us`: means over all rounds but the first of each text, which reads the prompt. See `ROUND`.
    - `predicted_tpot_ms`: median of the repeats; by [L Theorem 3.8], from α, γ and the times of each.
    - `refused`: texts that the service refused because it was full.
    """
    cells = []
    for temperature, streams in product(settings.temperatures, settings.streams):
        here = [run for run in runs if (run.temperature, run.streams) == (temperature, streams)]
        alone = {run.repeat: run.tokens_per_second for run in here if run.arm == ALONE}
        for arm in settings.arms():
            own = [run for run in here if run.arm == arm]
            cells.append({"temperature": temperature, "streams": streams, "arm": arm, **_cell(own, alone)})
    return cells


def missing(cells: Sequence[Json], settings: Settings) -> list[str]:
    """Return what an incomplete measurement lacks: a sentence for each temperature and number of streams."""
    found = []
    for temperature, streams in product(settings.temperatures, settings.streams):
        here = [cell for cell in cells if (cell["temperature"], cell["streams"]) == (temperature, streams)]
        lacking = {cell["arm"]: cell["repeats"] for cell in here if cell["repeats"] < settings.repeats}
        if lacking:
            arms = ", ".join(f"{arm} has {number}" for arm, number in lacking.items())
            if len(lacking) == len(here) and len(set(lacking.values())) == 1:
                arms = f"each arm has {min(lacking.values())}"
            found.append(f"T = {temperature:g}, {counted(streams, 'stream')}: {arms} of {settings.repeats} repeats.")
    return found


def _cell(runs: Sequence[Run], alone: dict[int, float]) -> Json:
    texts = [each for run in runs for each in run.answered]
    finished = [each for run in runs for each in run.finished]
    statistics = [each.statistics for each in finished]
    drafted, passes, times = (
        sum(each.num_draft_tokens for each in statistics),
        _passes(finished),
        round_seconds(finished),
    )
    predicted = [run.predicted_tpot_ms for run in runs]
    return {
        "drafter": statistics[0].drafter.value if drafted else Drafter.NONE.value,
        "policy": statistics[0].policy.value if statistics else None,
        "tokens_per_second": _spread(run.tokens_per_second for run in runs),
        "speech_per_second": _spread(run.speech_per_second for run in runs),
        "ratio": _spread(run.tokens_per_second / alone[run.repeat] for run in runs if alone.get(run.repeat)),
        "ttft_ms": _spread(run.ttft_ms for run in runs),
        "tpot_ms": _spread(run.tpot_ms for run in runs),
        "predicted_tpot_ms": _median(predicted),
        "alpha": mean_alpha(statistics),
        "gamma": drafted / passes if passes else 0.0,
        "tokens_per_round": sum(each.usage.completion_tokens for each in finished) / passes if passes else None,
        "round_us": None if times is None else {phase: 1e6 * each for phase, each in times.items()},
        "repeats": len(runs),
        "texts": len(texts),
        "refused": sum(each.refused for run in runs for each in run.served),
    }


def mean_alpha(statistics: Iterable[Statistics]) -> float | None:
    """Return α over the judged tokens of all texts; None without one."""
    judged = [(judged_tokens(each), each.alpha) for each in statistics]
    total = sum(count for count, _ in judged)
    return sum(count * alpha for count, alpha in judged) / total if total else None


def _passes(texts: Iterable[Finished]) -> int:
    return sum(target_passes(each.statistics, each.usage.completion_tokens) for each in texts)


def round_seconds(texts: Iterable[Finished | Completion]) -> dict[str, float] | None:
    """Return the mean seconds of each part of a round, without the first of each text; None if there are no others."""
    sums, rounds = dict.fromkeys(ROUND, 0.0), 0
    for text in texts:
        times = text.timings
        whole, first = phase_seconds(times), phase_seconds(times.first_round)
        for phase in PHASES:
            sums[phase] += whole[phase] - first[phase]
        sums["other"] += (times.total_us - times.time_to_first_token_us - times.failover_us) / 1e6
        rounds += target_passes(text.statistics, text.usage.completion_tokens) - 1
    if rounds < 1:
        return None
    sums["other"] -= sum(sums[phase] for phase in PHASES)
    # Drafting begins before the last text is sent: by so little the parts may overlap.
    return {part: max(0.0, seconds) / rounds for part, seconds in sums.items()}


def predicted_seconds(alpha: float, gamma: float, round_seconds: float) -> float:
    """Return the seconds per token, (γ·t_q + t_p(γ+1) + R) / E(γ, α) [L Thm 3.8, with the network].

    Args:
        alpha: chance that a drafted token is accepted.
        gamma: mean drafted tokens of a round; between two whole numbers E is interpolated.
        round_seconds: the numerator, of which all terms are measured.
    """
    low = math.floor(gamma)
    least, most = (theory.expected_tokens(min(alpha, 1.0), each) for each in (low, low + 1))
    return round_seconds / (least + (gamma - low) * (most - least))


def _median(values: Iterable[float | None]) -> float | None:
    """Median of those that are known."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _median_ms(seconds: Iterable[float | None]) -> float | None:
    return _median(None if each is None else 1e3 * each for each in seconds)


def _spread(values: Iterable[float | None]) -> Json | None:
    """Median, lowest and highest of those that are known."""
    known = [value for value in values if value is not None]
    return {"median": median(known), "low": min(known), "high": max(known)} if known else None
