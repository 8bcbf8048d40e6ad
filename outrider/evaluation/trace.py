"""One request on one time axis: where each round spent its time, as Chrome trace JSON and as a picture [L Figure 5].

The draft service measures when it drafted, sent and got its verdict; the verifier measures durations. Clocks are not
compared: of the time that a round was on the wire, half counts before the verifier's work and half after it. So does
the time of the request between client and draft service.
"""

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from outrider.client import Completion, Options, Timings
from outrider.client.events import Round, RoundTimings
from outrider.evaluation import EvaluationError
from outrider.evaluation.streams import target_passes

REQUEST, DRAFT, WIRE, QUEUE, PASS, VERIFICATION = "request", "draft", "wire", "queue", "target pass", "verification"

SERVICES = {"client": (REQUEST,), "draft service": (DRAFT, WIRE), "verifier service": (QUEUE, PASS, VERIFICATION)}
"""The rows of a trace, by the process that measured them."""

WITH, ALONE = "with speculation", "target alone"

# Enough tokens for each mode to have run each kind of step.
_WARM_UP_TOKENS = 16
# Shares of a picture's width: of a bar with a white edge, and of one with text.
_LEAST_STEP, _LEAST_WITH_TEXT = 0.002, 0.016


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a row, in whole microseconds since the client sent the request.

    Attributes:
        details: for the reader.
    """

    row: str
    name: str
    start: int
    end: int
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Traced:
    """One text. `seconds` is by the client's clock, from the request to the end."""

    name: str
    completion: Completion
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.completion.usage.completion_tokens / self.seconds

    @property
    def target_passes(self) -> int:
        return target_passes(self.completion.statistics, self.completion.usage.completion_tokens)

    @property
    def phases_us(self) -> dict[str, int]:
        """Microseconds of each row, summed over all rounds, by the statistics of the response.

        Between the verdicts of a `Decode`, `wire` is the rest of the time, after the other rows.
        """
        times = self.completion.timings
        wire = max(0, times.verdict_us - _at_verifier(times))
        phases = (times.draft_us, wire, times.queue_us, times.forward_us, times.verify_us)
        return dict(zip((DRAFT, WIRE, QUEUE, PASS, VERIFICATION), phases, strict=True))

    @property
    def rest_us(self) -> int:
        """The request without these: the way of the client, and other work of the draft service."""
        return max(0, round(self.seconds * 1e6) - sum(self.phases_us.values()))


def record(complete: Callable[..., Completion], prompt: str, options: Options) -> tuple[Traced, Traced]:
    """Writes the text with speculation, then by the target alone, after a short text of each as warm-up.

    Each text reads its prompt: they share no KV cache, unless `options` has a `cache_salt`. Above temperature 0 with
    neither `seed` nor `rule` a seed is drawn, whose rule `coupled` gives both the same text.

    Args:
        complete: as `Client.complete`.
        prompt: of both texts.
        options: of both texts; `gamma` and `drafter` of the first only.

    Raises:
        EvaluationError: the draft service reports no times, or failed during a text.
        OutriderError: a request failed.
    """
    given: dict[str, Any] = dict(options)
    if given.get("temperature") != 0 and given.keys().isdisjoint({"seed", "rule"}):
        given["seed"] = secrets.randbits(63)

    def write(name: str, **changes: Any) -> Traced:
        fresh = {"cache_salt": f"trace-{secrets.token_hex(8)}"}
        sent = time.perf_counter()
        done = complete(prompt, **{**fresh, **given, "report_rounds": True, **changes})
        return Traced(name, done, time.perf_counter() - sent)

    alone: dict[str, Any] = {"gamma": 0, "speculation": None}
    for changes in ({}, alone):
        write("", max_new_tokens=min(_WARM_UP_TOKENS, given.get("max_new_tokens", _WARM_UP_TOKENS)), **changes)
    first = write(WITH)
    second = write(ALONE, **alone, seed=first.completion.seed, rule=first.completion.rule)
    for traced in (first, second):
        _check(traced.completion)
    return first, second


def _check(completion: Completion) -> None:
    sample = completion.samples[0]
    if sample.num_resumes:
        raise EvaluationError("the draft service failed during the text, so times are missing; run the command again")
    if not any(each.timings.verdict_us for each in sample.rounds):
        raise EvaluationError("the draft service reports no times of rounds; it is older than this command: upgrade it")


def spans(traced: Traced) -> list[Span]:
    """The spans of a text, by row and start. Spans of a row do not overlap."""
    whole = round(traced.seconds * 1e6)
    completion = traced.completion
    arrived = max(0, whole - completion.timings.total_us) // 2
    found = [Span(REQUEST, "request", 0, whole, {"request_id": completion.started.request_id})]
    for _, verdicts in groupby(completion.samples[0].rounds, key=lambda each: each.round):
        found += _spans_of_round(list(verdicts), arrived)
    rows = [row for rows in SERVICES.values() for row in rows]
    return list(_in_turn(sorted(found, key=lambda span: (rows.index(span.row), span.start))))


def _spans_of_round(verdicts: Sequence[Round], arrived: int) -> Iterator[Span]:
    """The spans of a proposal with its verdict, or of a `Decode` with its verdicts.

    `arrived` is when the request arrived at the draft service.
    """
    first = verdicts[0]
    number = {"round": first.round}
    if first.drafted_token_ids:
        start = arrived + first.draft_start_us
        drafted = {**number, "tokens": list(first.drafted_texts)}
        yield Span(DRAFT, f"draft of {len(first.drafted_token_ids)}", start, start + first.timings.draft_us, drafted)
    sent = arrived + first.sent_us
    came = [arrived + each.sent_us + each.timings.verdict_us for each in verdicts]
    ends = _latest_ends(verdicts, came)
    way = max(0, ends[0] - _at_verifier(first.timings) - sent) // 2
    yield Span(WIRE, "to the verifier", sent, sent + way, number)
    for verdict, latest, arrival in zip(verdicts, ends, came, strict=True):
        times, end = verdict.timings, latest - way
        verified = end - times.verify_us
        passed = verified - times.forward_us
        judged = {**number, "drafted": len(verdict.drafted_token_ids), "accepted": verdict.accepted}
        yield Span(QUEUE, "queue", passed - times.queue_us, passed, number)
        yield Span(PASS, "target pass", passed, verified, judged)
        yield Span(VERIFICATION, "verification", verified, end, {**judged, "beta": list(verdict.beta)})
        yield Span(WIRE, "to the draft service", end, arrival, number)


def _at_verifier(times: Timings | RoundTimings) -> int:
    return times.queue_us + times.forward_us + times.verify_us


def _latest_ends(verdicts: Sequence[Round], came: Sequence[int]) -> list[int]:
    """When the work on each verdict ended at the latest: before it came, and before the work on the next one began."""
    ends, latest = list[int](), came[-1]
    for verdict, arrival in zip(reversed(verdicts), reversed(came), strict=True):
        ends.append(min(arrival, latest))
        latest = ends[-1] - _at_verifier(verdict.timings)
    return ends[::-1]


def _in_turn(ordered: Sequence[Span]) -> Iterator[Span]:
    """The spans with those of a row one after the other.

    On the wire the verdicts of a `Decode` may follow each other before the first has come. Other overlaps are of a
    microsecond, by rounding.
    """
    for _, row in groupby(ordered, key=lambda span: span.row):
        last = 0
        for span in row:
            start = max(span.start, last)
            last = max(span.end, start)
            yield Span(span.row, span.name, start, last, span.details)


# ------------------------------------------------------------------------------------------------------------- output


def chrome_trace(runs: Sequence[Traced], about: Mapping[str, Any]) -> dict[str, Any]:
    """The runs in the Trace Event Format of Chrome and Perfetto: complete events, with metadata that names their rows.

    Each service of each run is a process, and each row a thread. All runs begin at 0. `about` becomes `otherData`.
    """
    events: list[dict[str, Any]] = []
    pid = 0
    for run in runs:
        places: dict[str, tuple[int, int]] = {}
        for service, rows in SERVICES.items():
            pid += 1
            events.append(_metadata("process_name", pid, 0, name=f"{run.name}: {service}"))
            events.append(_metadata("process_sort_index", pid, 0, sort_index=pid))
            for tid, row in enumerate(rows, start=1):
                places[row] = pid, tid
                events.append(_metadata("thread_name", pid, tid, name=row))
                events.append(_metadata("thread_sort_index", pid, tid, sort_index=tid))
        for span in spans(run):
            at, thread = places[span.row]
            names = {"ph": "X", "name": span.name, "cat": span.row, "pid": at, "tid": thread}
            events.append(names | {"ts": span.start, "dur": span.end - span.start, "args": dict(span.details)})
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(about)}


def _metadata(kind: str, pid: int, tid: int, **values: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": values}


def draw(path: Path, runs: Sequence[Traced]) -> None:
    """Draws a panel for each run, on one scale, with a row for each part of a round. Needs the extra `bench`.

    A proposal after the first is divided evenly among its tokens: only its whole time is measured.
    """
    from outrider.evaluation.pictures import BLUE, GREEN, LIGHT, ORANGE, SAND, picture

    colours = {DRAFT: ORANGE, WIRE: SAND, QUEUE: LIGHT, PASS: BLUE, VERIFICATION: GREEN}
    end = max(run.seconds for run in runs) * 1e3
    note = (
        "In a target pass: accepted/drafted tokens. "
        "One clock: half of a round's time on the wire counts before the queue, half after verification."
    )
    with picture(path, len(runs), 1, size=(10, 1.75), note=note) as panels:
        for run, panel in zip(runs, panels[:, 0], strict=True):
            rows = {row: place for place, row in enumerate(colours)}
            bars: dict[tuple[str, str], list[tuple[float, float]]] = {}
            for span in spans(run):
                if span.row in rows:
                    own = _bars(span, end)
                    # A white edge parts neighbours; a bar that is thinner than its edge would vanish.
                    edge = "white" if own[0][1] > _LEAST_STEP * end else colours[span.row]
                    bars.setdefault((span.row, edge), []).extend(own)
                    if span.row == PASS and span.details["drafted"] and own[0][1] > _LEAST_WITH_TEXT * end:
                        text, middle = "{accepted}/{drafted}".format_map(span.details), own[0][0] + own[0][1] / 2
                        panel.text(middle, rows[PASS], text, ha="center", va="center", fontsize=6, color="white")
            for (row, edge), own in bars.items():
                panel.broken_barh(own, (rows[row] - 0.4, 0.8), facecolor=colours[row], edgecolor=edge, linewidth=0.25)
            panel.set_yticks(range(len(rows)), list(rows))
            panel.set_ylim(len(rows) - 0.5, -0.5)
            panel.set_xlim(0, end * 1.01)
            panel.axvline(run.seconds * 1e3, color="#333333", linewidth=0.8, linestyle=":")
            panel.set_title(_title(run), fontsize=9, loc="left")
        panels[-1][0].set_xlabel("milliseconds since the client sent the request", fontsize=8)


def _bars(span: Span, end: float) -> list[tuple[float, float]]:
    """Starts and lengths of the bars of a span, in milliseconds; the axis ends at `end`."""
    start, length = span.start / 1e3, (span.end - span.start) / 1e3
    count = len(span.details["tokens"]) if span.row == DRAFT and span.details["round"] > 1 else 1
    if length < count * _LEAST_STEP * end:
        count = 1
    return [(start + length * i / count, length / count) for i in range(count)]


def _title(run: Traced) -> str:
    tokens = run.completion.usage.completion_tokens
    return f"{run.name}: {tokens} tokens in {run.seconds * 1e3:.0f} ms, {run.target_passes} target passes"
