"""Timelines of real requests, and of a round whose times at the verifier are known."""

from dataclasses import replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import pytest

from outrider.client import Chunk, Client, Completion, Finished, Started
from outrider.evaluation import EvaluationError
from outrider.evaluation.trace import (
    ALONE,
    DRAFT,
    PASS,
    QUEUE,
    REQUEST,
    SERVICES,
    VERIFICATION,
    WIRE,
    WITH,
    Span,
    Traced,
    chrome_trace,
    draw,
    record,
    spans,
)
from protos.outrider.v1 import draft_service_pb2 as pb

PROMPT = '"""Means of several kinds."""\n\n\ndef mean(values):\n' * 4  # several blocks of the KV cache
ROWS = [row for rows in SERVICES.values() for row in rows]
ROUNDING = 2


@pytest.fixture(scope="module")
def runs(draft_address: str) -> tuple[Traced, Traced]:
    """Sampled texts of one seed, which `record` draws."""
    with Client(draft_address, timeout=60) as client:
        options: Any = {"gamma": 4, "temperature": 1.0, "max_new_tokens": 24, "ignore_eos": True}
        return record(client.complete, PROMPT, options)


def _of(found: list[Span], row: str) -> list[Span]:
    return [span for span in found if span.row == row]


def _sum(found: list[Span], row: str) -> int:
    return sum(span.end - span.start for span in _of(found, row))


def test_both_texts_are_the_same_and_read_the_prompt(runs: tuple[Traced, Traced]) -> None:
    first, second = runs
    assert (first.name, second.name) == (WITH, ALONE)
    assert first.completion.token_ids == second.completion.token_ids
    assert len(first.completion.token_ids) == 24
    assert (first.completion.statistics.num_drafts > 0, second.completion.statistics.num_drafts) == (True, 0)
    assert [run.completion.usage.cached_tokens for run in runs] == [0, 0]


def test_spans_of_a_row_follow_each_other_within_the_request(runs: tuple[Traced, Traced]) -> None:
    for run in runs:
        found = spans(run)
        assert [row for row, _ in groupby(span.row for span in found)] == [
            row for row in ROWS if row != DRAFT or run is runs[0]
        ]
        for row in ROWS:
            own = _of(found, row)
            assert all(0 <= span.start <= span.end <= run.seconds * 1e6 + ROUNDING for span in own)
            assert all(before.end <= after.start for before, after in pairwise(own))


def test_parts_of_a_round_follow_each_other(runs: tuple[Traced, Traced]) -> None:
    for run in runs:
        rounds: dict[int, list[Span]] = {}
        for span in spans(run):
            if span.row != REQUEST:
                rounds.setdefault(span.details["round"], []).append(span)
        for own in rounds.values():
            there, *back = _of(own, WIRE)
            passes = zip(_of(own, QUEUE), _of(own, PASS), _of(own, VERIFICATION), back, strict=True)
            assert all(span.end <= there.start + ROUNDING for span in _of(own, DRAFT))
            for queue, forward, verification, verdict in passes:
                assert there.end - ROUNDING <= queue.start
                assert queue.end <= forward.start + ROUNDING
                assert forward.end == verification.start
                assert verification.end <= verdict.end, "it comes after its verification"


def test_sums_agree_with_the_statistics_of_the_response(runs: tuple[Traced, Traced]) -> None:
    for run in runs:
        found, counts, phases = spans(run), run.completion.statistics, run.phases_us
        close = ROUNDING * counts.num_rounds
        for row in (DRAFT, QUEUE, PASS, VERIFICATION):
            assert _sum(found, row) == pytest.approx(phases[row], abs=close), row
        if run.name == WITH:  # without proposals a verdict may be on the wire during the next pass
            assert _sum(found, WIRE) == pytest.approx(phases[WIRE], abs=close)
        judged = [span.details for span in _of(found, PASS)]
        assert len(judged) == counts.num_rounds
        assert sum(each["drafted"] for each in judged) == counts.num_draft_tokens
        assert sum(each["accepted"] for each in judged) == counts.num_accepted_tokens
        assert sum(len(span.details["tokens"]) for span in _of(found, DRAFT)) == counts.num_draft_tokens
        assert _sum(found, REQUEST) == round(run.seconds * 1e6)


def test_passes_of_the_target_are_counted_by_their_tokens(runs: tuple[Traced, Traced]) -> None:
    """A verdict may hold several tokens of a `Decode`."""
    drafted, alone = runs
    assert alone.target_passes == alone.completion.usage.completion_tokens > alone.completion.statistics.num_rounds
    assert drafted.target_passes == drafted.completion.statistics.num_rounds


def test_the_trace_is_in_the_trace_event_format(runs: tuple[Traced, Traced]) -> None:
    trace = chrome_trace(runs, {"about": "a test"})
    assert (trace["displayTimeUnit"], trace["otherData"]) == ("ms", {"about": "a test"})
    names: dict[tuple[str, int, int], str] = {}
    for event in trace["traceEvents"]:
        assert event["ph"] in ("M", "X")
        assert all(type(event[key]) is int for key in ("pid", "tid"))
        if event["ph"] == "M" and event["name"].endswith("_name"):
            names[event["name"], event["pid"], event["tid"]] = event["args"]["name"]
    complete = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(complete) == sum(len(spans(run)) for run in runs)
    for event in complete:
        assert type(event["ts"]) is type(event["dur"]) is int
        assert min(event["ts"], event["dur"]) >= 0
        assert names["thread_name", event["pid"], event["tid"]] == event["cat"]
        assert event["name"]
    processes = [name for (kind, _, _), name in names.items() if kind == "process_name"]
    assert processes == [f"{run.name}: {service}" for run in runs for service in SERVICES]


@pytest.mark.parametrize(("name", "start"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml")])
def test_the_picture_has_a_panel_for_each_text(
    runs: tuple[Traced, Traced], tmp_path: Path, name: str, start: bytes
) -> None:
    draw(tmp_path / name, runs)
    drawn = (tmp_path / name).read_bytes()
    assert drawn.startswith(start)
    if name.endswith(".svg"):
        text = drawn.decode()
        assert all(f"{run.name}: 24 tokens" in text for run in runs)
        assert text.count(f">{VERIFICATION}<") == len(runs)


# -------------------------------------------------------------------------------------------------- known times


def _traced(rounds: list[pb.RoundReport], *, seconds: float, total_us: int) -> Traced:
    end = pb.GenerateFinished(timings=pb.GenerateTimings(total_us=total_us))
    chunk = pb.GenerateChunk(token_ids=[1] * len(rounds), rounds=rounds)
    return Traced(WITH, Completion.of([Started.of(pb.GenerateStarted()), Chunk.of(chunk), Finished.of(end)]), seconds)


def _report(number: int, sent: int, came: int, *, queue: int, forward: int, verify: int = 0) -> pb.RoundReport:
    timings = pb.RoundTimings(verdict_us=came - sent, queue_us=queue, forward_us=forward, verify_us=verify)
    return pb.RoundReport(round=number, draft_start_us=sent, sent_us=sent, timings=timings)


def test_times_at_the_verifier_are_right_where_both_ways_take_as_long() -> None:
    """The request takes 500 µs to the draft service, each message between the services 100 µs.

    The second verdict of the `Decode` comes 700 µs late, together with the third.
    """
    decode = [
        _report(2, 5_000, 7_200, queue=500, forward=1_400, verify=100),
        _report(2, 7_200, 9_800, queue=100, forward=1_700, verify=100),
        _report(2, 9_800, 9_800, queue=100, forward=600),
    ]
    proposal = _report(1, 1_000, 3_200, queue=300, forward=1_500, verify=200)
    found = spans(_traced([proposal, *decode], seconds=0.011, total_us=10_000))
    places = {row: [(span.start - 500, span.end - 500) for span in _of(found, row)] for row in ROWS}
    assert places[PASS] == [(1_400, 2_900), (5_600, 7_000), (7_200, 8_900), (9_100, 9_700)]
    assert places[VERIFICATION] == [(2_900, 3_100), (7_000, 7_100), (8_900, 9_000), (9_700, 9_700)]
    assert places[QUEUE] == [(1_100, 1_400), (5_100, 5_600), (7_100, 7_200), (9_000, 9_100)]
    there_and_back = [(1_000, 1_100), (3_100, 3_200), (5_000, 5_100), (7_100, 7_200)]
    assert places[WIRE] == [*there_and_back, (9_000, 9_800), (9_800, 9_800)]


def test_a_text_without_all_times_is_refused() -> None:
    old = _traced([pb.RoundReport(round=1)], seconds=1.0, total_us=900_000).completion
    with pytest.raises(EvaluationError, match="reports no times of rounds; it is older than this command: upgrade it"):
        record(lambda *_, **__: old, PROMPT, {})
    (sample,) = _traced([_report(1, 10, 20, queue=1, forward=2)], seconds=1.0, total_us=900_000).completion.samples
    resumed = Completion(old.started, (replace(sample, num_resumes=1),))
    with pytest.raises(EvaluationError, match="failed during the text, so times are missing; run the command again"):
        record(lambda *_, **__: resumed, PROMPT, {})
