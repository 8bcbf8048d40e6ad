"""`outrider check` passes an exact deployment, and finds services that were broken on purpose.

The pair is that of `tests/exactness`: 24 tokens, random weights, float32, so that texts of a seed repeat. Every fault
leaves text that looks right. All requests have seeds, so that each run is the same.

Power: over all sampled texts of `PLAN` (some 2,000 triples of tokens) a total variation of 0.1 between the cells of
three tokens is found with 95 %, at a level of one false alarm in 10,000 for all 39 tests together.
"""

import asyncio
import json
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kernels.rng import gumbel
from kernels.sampling import SamplingParams
from outrider.cli import main
from outrider.client import (
    AsyncClient,
    Client,
    Event,
    Options,
    PositionLogprobs,
    SpeculationPolicy,
    Started,
    TokenLogprob,
)
from outrider.evaluation.check import ROUNDING, check, compared
from outrider.evaluation.check_report import (
    ALONE,
    BY_ID,
    BY_PROBABILITY,
    EVERY,
    LOAD,
    LOCAL_TARGET,
    NEXT,
    NO_DRAFT,
    RESUMED,
    TARGET_ALONE,
    Report,
    Sampled,
    judged,
)
from outrider.evaluation.check_requests import Ask, Plan, Text
from outrider.evaluation.chisquare import Fit
from outrider.evaluation.reference import Copy, DecodeReference, LocalTarget
from tests.cluster import Cluster
from tests.exactness.services import PairServices

NARROW = SamplingParams(top_k=6, top_p=0.8)
FEW = Plan(
    load=8, alone=4, resumed=4, tokens=6, equal=2, equal_tokens=20, prompts=("abc", "hello"), gammas=(1, 4),
    settings=(SamplingParams(),),
)  # fmt: skip
PLAN = replace(FEW, load=8, alone=2, resumed=12, tokens=90, gammas=(2, 8))
ONE_PLACE = replace(FEW, load=1, alone=1, resumed=1, equal=1, equal_tokens=8, gammas=(4,))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PairServices]:
    with Cluster() as cluster:
        yield PairServices(cluster, tmp_path_factory.mktemp("pair"), seed=1, markov=False)


def checked(pair: PairServices, address: str, plan: Plan, *, local: bool = True) -> Report:
    async def run() -> Report:
        async with AsyncClient(address) as client:
            copy = Copy(str(pair.target), device="cpu") if local else None
            return await check(client, plan, copy, lambda stage, done, total: None)

    return asyncio.run(run())


def command(pair: PairServices, tmp_path: Path, *arguments: str) -> Result:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"text": text}) + "\n" for text in FEW.prompts))
    address = pair.draft().address
    given = ["--draft", address, "--prompts-file", str(prompts), "--gammas", "1,4", *arguments]
    return CliRunner().invoke(main, ["check", *given])


def test_an_exact_deployment_passes(pair: PairServices) -> None:
    report = checked(pair, pair.draft().address, PLAN)
    assert not report.is_biased
    three = [each.finds for each in report.tests if each.rule == EVERY and each.test != NEXT]
    assert max(each or 1.0 for each in three) <= 0.1
    assert report.finds == next(each.finds for each in report.tests if (each.test, each.rule) == (NEXT, EVERY))
    assert {each.where for each in report.tests} == {ALONE, LOAD, RESUMED, EVERY}
    assert {each.rule for each in report.tests} == {"tokenwise", "block", "coupled", NO_DRAFT, EVERY}
    assert {(each.kind, each.reference) for each in report.equalities} == {
        (kind, reference) for kind in ("greedy", "coupled") for reference in (TARGET_ALONE, LOCAL_TARGET)
    }
    assert all(each.tokens >= 40 and not each.near_ties for each in report.equalities)
    assert report.num_resumed >= 50
    assert set(report.drafted) == {"greedy", "tokenwise", "block", "coupled"}
    for rule, drafted in report.drafted.items():  # the most probable token of draft and target is the same
        assert 0 < report.accepted[rule] < drafted or (rule == "greedy" and report.accepted[rule] == drafted)
    assert report.verdict[0] == "No bias found."


class Recording(AsyncClient):
    """Records the policies of texts that name neither seed nor gamma, by the seed that they then have."""

    policies: dict[int, list[SpeculationPolicy]]

    async def generate(self, *given: Any, **options: Any) -> AsyncGenerator[Event, None]:
        async with aclosing(super().generate(*given, **options)) as events:
            async for event in events:
                if isinstance(event, Started) and options.keys().isdisjoint({"seed", "gamma"}):
                    self.policies[event.seed] = []
                if isinstance(event, Started) and event.seed in self.policies:
                    self.policies[event.seed].append(event.policy)
                yield event


def test_a_resumed_text_keeps_its_policy(pair: PairServices) -> None:
    """As with the client: with a seed alone the service would choose another one."""
    policies = dict[int, list[SpeculationPolicy]]()

    async def run() -> None:
        async with Recording(pair.draft().address) as client:
            client.policies = policies
            await check(client, replace(ONE_PLACE, resumed=4, gammas=(None, 4)), None, lambda stage, done, total: None)

    asyncio.run(run())
    assert {each for found in policies.values() for each in found} == {SpeculationPolicy.ADAPTIVE}
    assert max(map(len, policies.values())) > 1


@pytest.mark.parametrize(
    ("fault", "in_verifier", "plan", "test"),
    [
        ("untruncated_q", False, replace(ONE_PLACE, load=20, tokens=60, settings=(NARROW,)), BY_PROBABILITY),
        pytest.param(
            "negative_residual",
            True,
            replace(ONE_PLACE, load=40, tokens=30),
            BY_PROBABILITY,
            marks=pytest.mark.slow,
        ),
        ("draws_again_after_a_resume", True, replace(ONE_PLACE, resumed=44, tokens=3), BY_ID),
    ],
)
def test_a_biased_service_is_found(fault: str, in_verifier: bool, plan: Plan, test: str, pair: PairServices) -> None:
    """Each has a p-value below 1e-6, where 39 tests at a level of 1e-4 together reject one of 1.3e-6."""
    with pair.with_fault(fault, in_verifier=in_verifier) as service:
        report = checked(pair, service.address, plan)
    assert not report.wrong_texts
    assert test in {each.test for each in report.misfits}
    assert report.misfits[0].fit.p_value < 1e-6
    assert report.verdict[0].startswith("Biased")
    is_of_resumes = fault == "draws_again_after_a_resume"
    assert any("cut and resumed" in sentence for sentence in report.verdict) == is_of_resumes
    assert any("Speculation is at fault" in sentence for sentence in report.verdict) != is_of_resumes


@pytest.mark.parametrize(
    "local", [pytest.param(True, id="local target"), pytest.param(False, id="decode", marks=pytest.mark.slow)]
)
def test_text_of_a_seed_that_depends_on_the_draft_is_found(local: bool, pair: PairServices) -> None:
    with pair.with_fault("noise_of_the_round", in_verifier=True) as service:
        report = checked(pair, service.address, replace(FEW, load=1, alone=1, resumed=1), local=local)
    references = {TARGET_ALONE, LOCAL_TARGET} if local else {TARGET_ALONE}
    assert {(each.kind, each.reference) for each in report.wrong_texts} == {("coupled", each) for each in references}
    assert all(each.differences for each in report.equalities if each.kind == "coupled")
    assert any("speculation only" in sentence for sentence in report.verdict) != local


PROMPTS = ("abc", "b", "ca", "fed", "gg", "hij", "kl", "mnop")


def test_a_copy_in_another_dtype_differs_by_rounding_alone(pair: PairServices) -> None:
    """Texts of 300 tokens at temperature 0: near-ties in bfloat16, none in float32. A changed token is no near-tie."""
    with Client(pair.draft().address) as client:
        target = client.get_model().target
        texts = [client.complete(word, max_new_tokens=300, temperature=0, ignore_eos=True) for word in PROMPTS]
    prompts, gaps = [text.started.prompt_token_ids for text in texts], {}
    for dtype in ("float32", "bfloat16"):
        copy = Copy(str(pair.target), dtype=dtype, device="cpu")
        local = LocalTarget(copy, target, prompts, 300, ROUNDING[dtype])
        gaps[dtype] = max(max(local.gaps(nth, text.token_ids, None)) for nth, text in enumerate(texts))
    changed = [*texts[0].token_ids[:9], (texts[0].token_ids[9] + 1) % target.vocab_size]
    assert gaps["float32"] <= ROUNDING["float32"] < gaps["bfloat16"] <= ROUNDING["bfloat16"]
    assert local.gaps(0, changed, None)[9] > ROUNDING["bfloat16"]


async def test_both_references_leave_out_the_same_prefixes(pair: PairServices) -> None:
    """Those where rounding may move the cut of top-p, by the sum of probabilities at this temperature."""
    params, wide = SamplingParams(temperature=0.7, top_p=0.8), 0.1
    async with AsyncClient(pair.draft().address) as client:
        text = await client.complete("abc", max_new_tokens=60, temperature=1.0, seed=5, ignore_eos=True)
        prompts = [text.started.prompt_token_ids]
        wanted = [(0, tuple(text.token_ids[:length]), params) for length in range(60)]
        remote = await DecodeReference(client, prompts, 4, wide).distributions(wanted, lambda _: None)
        target = (await client.get_model()).target
        copy = LocalTarget(Copy(str(pair.target), device="cpu"), target, prompts, 60, wide)
        local = await copy.distributions(wanted, lambda _: None)
    sure = [remote[prefix].is_sure for prefix in wanted]
    assert sure == [local[prefix].is_sure for prefix in wanted]
    assert 0 < sum(sure) < len(sure)


def answer(*tokens: int, seed: int | None = None) -> Text:
    options = Options() if seed is None else Options(seed=seed)
    # Tokens 1 and 2 are 0.1 nats apart; all but the first three have less than the last of these.
    top = tuple(TokenLogprob(token, raw, raw) for token, raw in ((1, -1.0), (2, -1.1), (3, -3.0)))
    return Text(Ask("greedy", 0, LOAD, options), tokens, 1, logprobs=(PositionLogprobs(top[0], top),) * len(tokens))


@pytest.mark.parametrize(
    ("text", "tokens", "near_ties", "differences"),
    [
        (answer(1, 1, 1), 3, 0, 0),
        (answer(1, 2, 7), 2, 1, 0),  # texts are compared up to the first difference
        (answer(1, 3, 1), 2, 0, 1),
        (answer(9, 1, 1), 1, 0, 1),  # token 9 is not among the reported ones
    ],
)
def test_a_difference_within_rounding_is_a_near_tie(text: Text, tokens: int, near_ties: int, differences: int) -> None:
    found = compared(answer(1, 1, 1), text, 0.2)
    assert (found[0], found[1], len(found[2])) == (tokens, near_ties, differences)


def test_a_text_that_ends_early_is_a_difference() -> None:
    found = compared(answer(1, 1, 1), answer(1, 1), 0.2)
    assert found[:2] == (2, 0)
    assert "there are 2 tokens, the target alone wrote 3" in found[2][0]


def test_a_check_without_a_test_does_not_say_that_tokens_fit() -> None:
    """As of three sampled tokens, or of a temperature at which each token is certain."""
    tests = judged([Sampled(NEXT, EVERY, EVERY, 3, Fit(0.0, 0, 1.0, 0))], 0.0)
    report = Report("d", "t", "float32", TARGET_ALONE, "", 5e-4, {}, {}, 0, [], tests, 1.0)
    said = " ".join(report.verdict)
    assert "fit the target's distribution" not in said
    assert "too few, or too certain, for a test" in said


def test_the_power_is_that_of_next_tokens() -> None:
    """A bias within a cell of three tokens is not found, so their figure says nothing of single tokens."""
    next_token = Sampled(NEXT, EVERY, EVERY, 900, Fit(50.0, 60, 0.8, 800, 12))
    three = Sampled(BY_PROBABILITY, EVERY, EVERY, 90_000, Fit(20.0, 26, 0.8, 30_000, 1))
    report = Report("d", "t", "float32", TARGET_ALONE, "", 5e-4, {}, {}, 0, [], judged([next_token, three], 0.0), 1.0)
    of_next, of_three = (each.finds or 0.0 for each in report.tests)
    assert of_three < of_next == report.finds
    said = " ".join(report.verdict)
    assert f"A total variation of {of_next:.2g} or more, of next tokens after the 12 most frequent contexts" in said
    report = replace(report, tests=judged([replace(next_token, fit=Fit(0.0, 0, 1.0, 0)), three], 0.0))
    assert report.finds is None
    assert "the tail of the distribution, were not tested" in " ".join(report.verdict)


def test_an_unreported_token_may_be_a_near_tie_by_its_noise() -> None:
    """Under `coupled` with this seed, token 9 has so much noise that it may have won with a log-probability of -3."""
    noise = gumbel(2, [1], 10)[0]
    assert noise[9] - 3.0 > noise[1] - 1.0 - 0.2
    assert compared(answer(1, 1, 1, seed=2), answer(9, 1, 1, seed=2), 0.2)[:2] == (1, 1)


def test_the_command_without_a_local_target(pair: PairServices, tmp_path: Path) -> None:
    done = command(pair, tmp_path, "--texts", "12", "--tokens", "3", "--json")
    assert done.exit_code == 0, done.output
    document: dict[str, Any] = json.loads(done.stdout)
    assert document["is_biased"] is False
    assert document["reference"] == TARGET_ALONE
    assert len(document["tests"]) == 39
    assert document["finds"] > 0
    assert not {"\r", "\x1b"}.intersection(done.stderr)
    stages = [line.partition(" s: ")[2].partition(":")[0] for line in done.stderr.splitlines()]
    assert list(dict.fromkeys(stages)) == ["Texts one at a time", "Texts under load", "Reference"]


def test_a_biased_deployment_is_exit_code_1(pair: PairServices, tmp_path: Path) -> None:
    """Of a rounding below that of float32 any difference from the local copy in bfloat16 counts."""
    target = ("--target", str(pair.target), "--device", "cpu", "--dtype", "bfloat16")
    done = command(pair, tmp_path, *target, "--texts", "12", "--tokens", "3", "--rounding", "1e-9")
    assert done.exit_code == 1, done.output
    assert "Biased: the text of this deployment is not distributed as its target's." in done.stdout
    assert "Traceback" not in done.output


def test_a_check_that_crashes_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: Any) -> None:
        raise MemoryError("no memory")

    monkeypatch.setattr(sys.modules["outrider.cli.check"], "_checked", crash)
    done = CliRunner().invoke(main, ["check"])
    assert done.exit_code == 2
    assert "nothing was decided: MemoryError('no memory')" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--target", "DRAFT"), "give the checkpoint that the verifier loads"),
        (("--target", "/nowhere"), "/nowhere"),
        (("--drafter", "none"), "--drafter is none: there is no speculation to check"),
        (("--gammas", "1,17"), "--gammas has 17; the most of these services is 16 (--max-gamma)"),
        (("--draft", "127.0.0.1:1", "--timeout", "1"), "127.0.0.1:1"),
    ],
)
def test_a_check_that_cannot_run_is_exit_code_2(
    arguments: tuple[str, ...], message: str, pair: PairServices, tmp_path: Path
) -> None:
    folder = str(pair.drafts["uniform"])
    done = command(pair, tmp_path, "--texts", "4", *(folder if each == "DRAFT" else each for each in arguments))
    assert done.exit_code == 2, done.output
    *progress, line = done.stderr.strip().splitlines()
    assert message in line
    assert all(" s: Texts " in each for each in progress)
