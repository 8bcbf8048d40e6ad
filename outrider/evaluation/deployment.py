"""Measures a pair of services as its clients see it: the target alone, fixed γ, the default policy, each drafter.

All arms write equally many texts after the same prompts, and take turns; other work on the machines affects them alike.
A cell is one arm at one temperature with one number of streams. Its figures are medians over the repeats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, product
from statistics import median
from typing import Any

from outrider import theory
from outrider.client import AsyncClient, Drafter, Statistics, Timings
from outrider.evaluation.clips import Clip, Source, request_of
from outrider.evaluation.streams import PHASES, Request, Served, phase_seconds, serve
from outrider.rpc.errors import counted

Json = dict[str, Any]

ALONE, POLICY = "target alone", "default policy"

ROUND = (*PHASES, "other")
"""Parts of a round: the phases, and all other work of the draft service from the first token to the end."""

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
        OutriderError: a request failed.
    """
    salts, arms = count(), settings.arms()

    async def write(stage: str, run: Run, texts: int, max_new_tokens: int) -> Run:
        name = f"T = {run.temperature:g}, {counted(run.streams, 'stream')}, {run.arm}"
        report(stage, name, 0)
        options = arms[run.arm] | {
            "temperature": run.temperature, "max_new_tokens": max_new_tokens, "ignore_eos": not settings.stop_at_eos,
        }  # fmt: skip
        sources = list(_turn(settings.prompts, run.repeat, texts * run.streams))
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
            first = (repeat + nth) % len(arms)  # none always follows the same one
            for arm in [*arms, *arms][first : first + len(arms)]:
                run = Run(temperature, streams, arm, repeat)
                runs.append(await write(stage, run, settings.texts, settings.max_new_tokens))


def _turn(prompts: Sequence[Source], repeat: int, number: int) -> Iterator[Source]:
    """So many prompts; each repeat begins where the one before has ended, so that all prompts occur."""
    return (prompts[nth % len(prompts)] for nth in range(repeat * number, (repeat + 1) * number))


def summarise(runs: Sequence[Run], settings: Settings) -> list[Json]:
    """Return the figures of each cell, in the order of temperatures, streams and arms. None: nothing to measure.

    - `tokens_per_second`, `ttft_ms`, `tpot_ms`: median, lowest and highest repeat; see `Run`.
    - `speech_per_second`: seconds of speech transcribed in a second; None without speech.
    - `ratio`: tokens/s over those of the target alone in the same repeat.
    - `alpha`: mean over texts, by their drafted tokens. `gamma`: drafted tokens of a round. `policy`: that chose γ.
    - `round_us`: means over all rounds but the first of each text, which reads the prompt.
    - `predicted_tpot_ms`: by [L Theorem 3.8], from α, γ and the times of the cell.
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
    statistics = [each.statistics for each in texts if each.statistics is not None]
    rounds, drafted = sum(each.rounds for each in texts), sum(each.drafted for each in texts)
    alpha = sum((each.alpha or 0.0) * each.drafted for each in texts) / drafted if drafted else None
    gamma = drafted / rounds if rounds else 0.0
    times = round_seconds((each.statistics, each.timings) for each in (text.finished for text in texts) if each)
    tokens, predicted = sum(each.tokens for each in texts), None
    proposals = sum(each.num_drafts for each in statistics)
    if times is not None and drafted and proposals >= rounds - len(texts):
        predicted = predicted_seconds(alpha or 0.0, gamma, sum(times.values()))
    elif times is not None and tokens > len(texts):  # a verdict of a `Decode` holds several tokens, but for the first
        predicted = sum(times.values()) * (rounds - len(texts)) / (tokens - len(texts))
    return {
        "drafter": statistics[0].drafter.value if drafted else Drafter.NONE.value,
        "policy": statistics[0].policy.value if statistics else None,
        "tokens_per_second": _spread(run.tokens_per_second for run in runs),
        "speech_per_second": _spread(run.speech_per_second for run in runs),
        "ratio": _spread(run.tokens_per_second / alone[run.repeat] for run in runs if alone.get(run.repeat)),
        "ttft_ms": _spread(run.ttft_ms for run in runs),
        "tpot_ms": _spread(run.tpot_ms for run in runs),
        "predicted_tpot_ms": None if predicted is None else 1e3 * predicted,
        "alpha": alpha,
        "gamma": gamma,
        "tokens_per_round": tokens / rounds if rounds else None,
        "round_us": None if times is None else {phase: 1e6 * each for phase, each in times.items()},
        "repeats": len(runs),
        "texts": len(texts),
        "refused": sum(each.refused for run in runs for each in run.served),
    }


def round_seconds(texts: Iterable[tuple[Statistics, Timings]]) -> dict[str, float] | None:
    """Return the mean seconds of each part of a round, without the first of each text; None if there are no others."""
    sums, rounds = dict.fromkeys(ROUND, 0.0), 0
    for statistics, times in texts:
        whole, first = phase_seconds(times), phase_seconds(times.first_round)
        for phase in PHASES:
            sums[phase] += whole[phase] - first[phase]
        sums["other"] += (times.total_us - times.time_to_first_token_us - times.failover_us) / 1e6
        rounds += statistics.num_rounds - 1
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


def _median_ms(seconds: Iterable[float | None]) -> float | None:
    known = [each for each in seconds if each is not None]
    return 1e3 * median(known) if known else None


def _spread(values: Iterable[float | None]) -> Json | None:
    """Median, lowest and highest of those that are known."""
    known = [value for value in values if value is not None]
    return {"median": median(known), "low": min(known), "high": max(known)} if known else None
