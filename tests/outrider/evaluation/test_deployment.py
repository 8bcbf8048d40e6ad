"""Figures of a deployment: computed by hand from known texts, and the closed loop against a real pair."""

import itertools
from dataclasses import asdict, replace

import pytest

from outrider.client import AsyncClient, Drafter, Finished, OutriderError
from outrider.evaluation import EvaluationError, deployment_report
from outrider.evaluation.deployment import (
    ALONE,
    POLICY,
    Run,
    Settings,
    _in_turn,
    _turn,
    measure,
    missing,
    predicted_seconds,
    summarise,
)
from outrider.evaluation.streams import Request, Served, serve
from protos.outrider.v1 import draft_service_pb2 as pb

TINY = Settings(prompts=["x"], gammas=(2,), temperatures=(0.0,), streams=(1,), repeats=2)


def _finished(
    rounds: int, drafted: int, accepted: int, alpha: float, *, tokens: int = 0, drafts: int | None = None
) -> Finished:
    """A text of rounds with one token beyond the accepted ones, or of so many tokens.

    Its first round took 100 ms, and each later one 10: 2 of drafting, 1 on the wire, 1 of queue, 4 of pass, 1 of
    verification, 1 of other work.
    """
    later = rounds - 1
    first = pb.RoundTimings(draft_us=20_000, verdict_us=75_000, queue_us=5_000, forward_us=50_000, verify_us=10_000)
    return Finished.of(
        pb.GenerateFinished(
            usage=pb.Usage(completion_tokens=tokens or rounds + accepted),
            statistics=pb.SpeculationStatistics(
                num_rounds=rounds,
                num_drafts=drafts if drafts is not None else rounds if drafted else 0,
                num_draft_tokens_per_pos=[(drafted + 1) // 2, drafted // 2],  # γ = 2
                num_accepted_tokens_per_pos=[(accepted + 1) // 2, accepted // 2],
                num_draft_tokens=drafted,
                num_accepted_tokens=accepted,
                alpha=alpha,
                drafter=pb.DRAFTER_MODEL,
                policy=pb.SPECULATION_POLICY_FIXED,
            ),
            timings=pb.GenerateTimings(
                time_to_first_token_us=100_000,
                total_us=100_000 + later * 10_000,
                draft_us=first.draft_us + later * 2_000,
                verdict_us=first.verdict_us + later * 7_000,
                queue_us=first.queue_us + later * 1_000,
                forward_us=first.forward_us + later * 4_000,
                verify_us=first.verify_us + later * 1_000,
                first_round=first,
            ),
        )
    )


def _run(arm: str, repeat: int, *served: Served) -> Run:
    return Run(0.0, 1, arm, repeat, list(served))


def test_figures_of_a_cell_are_those_of_its_texts() -> None:
    drafted = [
        Served(0.0, ((0.1, 3), (0.2, 3), (0.3, 3)), finished=_finished(3, 6, 6, 1.0)),
        Served(0.3, ((0.5, 1), (0.9, 2)), finished=_finished(2, 2, 1, 0.6)),
    ]
    runs = [
        _run(ALONE, 0, Served(0.0, ((0.5, 1), (1.0, 1)), finished=_finished(2, 0, 0, 0.0))),
        _run("γ = 2", 0, *drafted),
        _run(ALONE, 1, Served(0.0, ((0.25, 1), (0.5, 1)), finished=_finished(2, 0, 0, 0.0))),
        _run("γ = 2", 1, *drafted),
    ]
    alone, fixed, policy = summarise(runs, TINY)
    assert [each["arm"] for each in (alone, fixed, policy)] == [ALONE, "γ = 2", POLICY]
    assert alone["tokens_per_second"] == {"median": 3.0, "low": 2.0, "high": 4.0}
    assert alone["ratio"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    assert (alone["alpha"], alone["gamma"], alone["drafter"]) == (None, 0.0, "none")
    assert alone["predicted_tpot_ms"] is None
    assert fixed["tokens_per_second"]["median"] == pytest.approx(12 / 0.9)
    assert fixed["ratio"]["low"] == pytest.approx(12 / 0.9 / 4)
    assert fixed["ratio"]["high"] == pytest.approx(12 / 0.9 / 2)
    assert fixed["ttft_ms"]["median"] == pytest.approx((100 + 200) / 2)
    assert fixed["tpot_ms"]["median"] == pytest.approx((200 / 6 + 400 / 2) / 2), "without the first piece"
    assert fixed["alpha"] == pytest.approx((6 * 1.0 + 2 * 0.6) / 8)
    assert fixed["gamma"] == pytest.approx(8 / 5)
    assert fixed["tokens_per_round"] == pytest.approx(12 / 5)
    assert fixed["round_us"] == pytest.approx(
        {"draft": 2e3, "wire": 1e3, "queue": 1e3, "forward": 4e3, "verify": 1e3, "other": 1e3}
    ), "without the first round"
    assert fixed["predicted_tpot_ms"] == pytest.approx(1e3 * predicted_seconds(0.9, 1.6, 0.01))
    assert policy["tokens_per_second"] is None


def test_a_round_without_a_draft_is_one_token() -> None:
    """A `Decode` answers many tokens with one verdict: here 2 verdicts, in 20 ms, have 9 tokens after the first."""
    alone = _finished(3, 0, 0, 0.0, tokens=10)
    mixed = _finished(3, 2, 2, 1.0, tokens=12, drafts=1)  # 2 accepted, and 10 passes
    settings = replace(TINY, repeats=1)
    cells = summarise([_run(ALONE, 0, _served(alone)), _run(POLICY, 0, _served(mixed))], settings)
    for cell in (cells[0], cells[2]):
        assert sum(cell["round_us"].values()) == pytest.approx(20_000 / 9)
        assert cell["predicted_tpot_ms"] is None, "it is that of rounds with drafts"
    assert cells[0]["tokens_per_round"] == 1
    assert cells[2]["tokens_per_round"] == pytest.approx(12 / 10)
    assert cells[2]["gamma"] == pytest.approx(2 / 10)


def _served(finished: Finished) -> Served:
    return Served(0.0, ((0.1, 1), (0.2, finished.usage.completion_tokens - 1)), finished=finished)


def test_alpha_is_over_judged_tokens() -> None:
    """Of two proposals of 2 one is accepted at its first place: 3 tokens were judged. The other text has 4 of 4."""
    texts = [_served(_finished(2, 4, 1, 0.5)), _served(_finished(2, 4, 4, 1.0))]
    (cell,) = [each for each in summarise([_run("γ = 2", 0, *texts)], TINY) if each["texts"]]
    assert cell["alpha"] == pytest.approx((3 * 0.5 + 4 * 1.0) / 7)


def test_the_prediction_is_the_median_of_the_repeats() -> None:
    settings = replace(TINY, repeats=3)
    runs = [_run("γ = 2", nth, _served(_finished(3, 6, 6, alpha))) for nth, alpha in enumerate((0.5, 0.6, 1.0))]
    (cell,) = [each for each in summarise(runs, settings) if each["texts"]]
    assert cell["predicted_tpot_ms"] == pytest.approx(1e3 * predicted_seconds(0.6, 2.0, 0.01))


def _concluded(*cells: tuple[str, float, float, float, float], repeats: int = 5) -> str:
    """The sentence on arms with a γ, and the median, least and largest ratio."""
    known = [
        {
            "temperature": 0, "streams": 1, "arm": arm, "gamma": gamma, "policy": "adaptive", "repeats": repeats,
            "ratio": {"median": median, "low": low, "high": high},
        }
        for arm, gamma, median, low, high in ((ALONE, 0.0, 1.0, 1.0, 1.0), *cells)
    ]  # fmt: skip
    (sentence,) = deployment_report.conclusions({"cells": known})
    return sentence


def test_no_arm_follows_another_one_in_all_repeats() -> None:
    for cell in range(4):
        orders = [_in_turn("abcd", repeat, cell) for repeat in range(3)]
        assert [sorted(order) for order in orders] == [[*"abcd"]] * 3
        assert not set.intersection(*(set(itertools.pairwise(order)) for order in orders))


def test_an_arm_is_fastest_only_if_no_range_overlaps() -> None:
    first, near, far = ("γ = 2", 2.0, 1.5, 1.4, 1.6), ("γ = 4", 4.0, 1.4, 1.3, 1.45), ("γ = 8", 8.0, 1.2, 1.1, 1.3)
    assert "γ = 2 is fastest in all 5 repeats, 1.50 (1.40–1.60) times" in _concluded(first, far)
    assert "no test" in _concluded(first, far, repeats=3)
    assert "no test" not in _concluded(first, far)
    alike = _concluded(first, near, far)
    assert "fastest" not in alike
    assert "above 1 in all 5 repeats; no clear difference from γ = 4" in alike
    assert "γ = 8" not in alike


@pytest.mark.parametrize("repeats", [1, 3, 5])
def test_what_is_no_difference_is_no_conclusion(repeats: int) -> None:
    unclear = _concluded(("γ = 2", 2.0, 1.1, 0.9, 1.2), repeats=repeats)
    assert ("one repeat shows no difference" if repeats == 1 else "no clear difference from the target") in unclear
    slower = _concluded(("γ = 2", 2.0, 0.8, 0.7, 0.9), repeats=repeats)
    assert ("the target alone is fastest" in slower) == (repeats > 1)
    policy = _concluded(("γ = 2", 2.0, 1.5, 1.4, 1.6), (POLICY, 0.0, 1.7, 1.65, 1.8), repeats=repeats)
    assert f"{POLICY} is" not in policy
    assert ("the default policy drafted nothing" in policy) == (repeats > 1)


def test_all_rows_of_a_repeat_have_the_same_prompts_equally_often() -> None:
    settings = replace(TINY, prompts=[str(n) for n in range(9)], streams=(2, 4, 6), texts=2, repeats=2)
    for repeat in range(2):
        turns = [list(_turn(settings, repeat, settings.texts * streams)) for streams in settings.streams]
        assert len({frozenset(turn) for turn in turns}) == 1
        assert all(len({turn.count(prompt) for prompt in turn}) == 1 for turn in turns)
    assert settings.num_prompts == 8
    assert replace(settings, prompts=["x"]).num_prompts == 1


async def test_a_bad_prompt_is_an_error_before_anything_is_measured(draft_address: str) -> None:
    runs: list[Run] = []
    settings = replace(TINY, prompts=["x", "y" * 1_000_000], texts=1)
    async with AsyncClient(draft_address, timeout=60) as client:
        with pytest.raises(EvaluationError, match="prompt 2 cannot be used: "):
            await measure(client, settings, runs)
    assert runs == []


def test_refused_texts_count_for_nothing_else() -> None:
    runs = [_run(arm, 0, Served(0.0, refused=True)) for arm in (ALONE, "γ = 2", POLICY)]
    for cell in summarise(runs, TINY):
        assert (cell["refused"], cell["texts"]) == (1, 0)
        assert cell["ratio"] is cell["ttft_ms"] is cell["round_us"] is cell["predicted_tpot_ms"] is None


@pytest.mark.parametrize(("gamma", "tokens"), [(0.0, 1.0), (2.0, 1.75), (1.5, 1.625)])
def test_predictions_follow_the_theorem(gamma: float, tokens: float) -> None:
    """E(γ, ½) is 1, 1.5, 1.75; a mean between two γ is interpolated."""
    assert predicted_seconds(0.5, gamma, 0.02) == pytest.approx(0.02 / tokens)


def test_drafters_after_the_first_share_one_gamma() -> None:
    settings = Settings(prompts=["x"], gammas=(2, 8, 4), drafters=(Drafter.MODEL, Drafter.LOOKUP))
    names = settings.arms()
    assert list(names) == [ALONE, "γ = 2", "γ = 8", "γ = 4", POLICY, "lookup, γ = 4"]
    assert names["lookup, γ = 4"] == {"gamma": 4, "drafter": Drafter.LOOKUP}
    assert settings.num_texts == 6 * 2 * (1 + 4 + 16) * (1 + 3 * 4)


async def test_a_closed_loop_keeps_its_streams_busy(draft_address: str) -> None:
    requests: list[Request] = [
        ("def add(a, b):", {"max_new_tokens": 4 + nth, "temperature": 0.0, "ignore_eos": True}) for nth in range(6)
    ]
    reported = itertools.count()
    async with AsyncClient(draft_address, timeout=60) as client:
        served = await serve(client, requests, 2, report=lambda: [next(reported)].clear())
    assert next(reported) == 6
    assert [each.tokens for each in served] == [4, 5, 6, 7, 8, 9]
    for each in served:
        assert each.finished is not None
        assert each.finished.timings.total_us < 1e6 * (each.end - each.due) + 50_000
        assert each.finished.timings.time_to_first_token_us < 1e6 * (each.stamps[0][0] - each.due)
    ends = sorted(each.end for each in served)
    for due in sorted(each.due for each in served)[2:]:
        assert any(end <= due for end in ends[:-1]), "a stream waits for the end of its text"
    assert sum(each.due < ends[0] for each in served) == 2


async def test_the_first_error_ends_all_streams(draft_address: str) -> None:
    requests: list[Request] = [("x", {"max_new_tokens": 64}), ("x", {"top_p": 0.0}), ("x", {"max_new_tokens": 64})]
    async with AsyncClient(draft_address, timeout=60) as client:
        with pytest.raises(OutriderError, match="top_p"):
            await serve(client, requests, 2)


def test_an_incomplete_measurement_has_a_report() -> None:
    """One run of one cell, of 12 cells: the report has gaps, and names them."""
    settings = replace(TINY, temperatures=(0.0, 1.0), streams=(1, 4))
    text = Served(0.0, ((0.5, 1), (1.0, 1)), finished=_finished(2, 0, 0, 0.0))
    cells = summarise([_run(ALONE, 0, text)], settings)
    lacking = missing(cells, settings)
    assert lacking == [
        "T = 0, 1 stream: target alone has 1, γ = 2 has 0, default policy has 0 of 2 repeats.",
        "T = 0, 4 streams: each arm has 0 of 2 repeats.",
        "T = 1, 1 stream: each arm has 0 of 2 repeats.",
        "T = 1, 4 streams: each arm has 0 of 2 repeats.",
    ]
    model = {"name": "m", "dtype": "float32", "device": "cpu"}
    document = {
        "models": {"target": model, "draft": model},
        "settings": asdict(settings) | {"prompts": None, "audio": [], "used_prompts": 1, "given_prompts": 1},
        "cells": cells, "missing": lacking, "address": "a:1", "time": "now", "version": "1", "command": "bench",
    }  # fmt: skip
    assert deployment_report.conclusions(document)[0] == "T = 0, 1 stream: nothing was measured."
    page = deployment_report.html(document)
    assert all(sentence in page for sentence in lacking)
    assert page.count("<svg") == 2
