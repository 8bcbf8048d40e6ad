"""`Generate` over gRPC, against real processes: the text is the target's, and it ends where it should."""

import math
import time
from typing import Any

import grpc
import pytest
import torch

from kernels.sampling import SamplingParams, probabilities
from outrider.cli.processes import ServiceProcess
from outrider.seeds import derive_seed
from protos.outrider.v1 import draft_service_pb2, sampling_pb2
from protos.outrider.v1.draft_service_pb2_grpc import DraftServiceStub
from tests.cluster import Service, wait_until
from tests.draft_service import oracle
from tests.draft_service.calls import (
    BLOCK,
    COUPLED,
    PROMPT,
    TOKENWISE,
    generate,
    request,
    result_of,
    sampling,
    write,
)
from tests.draft_service.pairs import BREAKING_TOKEN, DRAFT_CONTEXT

IDS = oracle.encode(PROMPT)
TOKENS = 28
LIVELY: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": TOKENS, "ignore_eos": True}


@pytest.mark.parametrize("gamma", [0, 1, 5, 16])
def test_greedy_text_is_the_targets_own_with_any_gamma(draft: grpc.Channel, gamma: int) -> None:
    sample = write(draft, gamma=gamma, max_new_tokens=TOKENS, ignore_eos=True)
    assert sample.ids == oracle.greedy(IDS, TOKENS)
    assert sample.text == oracle.decode(IDS + sample.ids)[len(PROMPT) :]
    assert sample.reason == "LENGTH"
    assert sample.end.statistics.num_drafts == 0 if gamma == 0 else sample.end.statistics.num_drafts > 0


def test_a_text_without_drafts_begins_in_the_step_of_its_prompt(draft: grpc.Channel, target_process: Service) -> None:
    def steps() -> float:
        return target_process.count("outrider_step_forward_seconds_count")

    # The verifier counts a step at the next one, or when idle: `before` may lack the step of this text, but not the
    # passes of an earlier test.
    write(draft, [39, *IDS], gamma=0, max_new_tokens=1)
    before = steps()
    for first in range(40, 48):
        write(draft, [first, *IDS], gamma=0, max_new_tokens=1)
    wait_until(lambda: steps() - before >= 8)
    assert steps() - before <= 9


def test_started_repeats_the_effective_request(draft: grpc.Channel) -> None:
    message = request(request_id="mine", max_new_tokens=9, sampling=sampling(0.0, seed=77))
    started = generate(draft, message).started
    assert (started.request_id, started.seed, started.max_new_tokens) == ("mine", 77, 9)
    assert list(started.prompt_token_ids) == IDS
    models = DraftServiceStub(draft).GetModel(draft_service_pb2.DraftServiceGetModelRequest())
    assert started.weights_fingerprint == models.target.weights_fingerprint
    assert started.rule == COUPLED, "a seed without a rule"
    assert started.policy == draft_service_pb2.SPECULATION_POLICY_ADAPTIVE
    seeded = request(max_new_tokens=1, sampling=sampling(1.0, seed=77, rule=TOKENWISE))
    assert generate(draft, seeded).started.policy == draft_service_pb2.SPECULATION_POLICY_FIXED
    assert generate(draft, request(max_new_tokens=1, sampling=sampling())).started.rule == models.target.default_rule


@pytest.mark.parametrize("length", [127, 128])
def test_a_request_id_may_be_as_long_as_allowed(draft: grpc.Channel, length: int) -> None:
    """The verifier's ids, which have a limit too, are made of it."""
    message = request(request_id="x" * length, max_new_tokens=2)
    assert generate(draft, message).started.request_id == "x" * length


def test_the_seed_that_the_service_chose_repeats_the_text(draft: grpc.Channel) -> None:
    fields: dict[str, Any] = {"gamma": 5, "max_new_tokens": 16, "ignore_eos": True}
    first = generate(draft, request(sampling=sampling(1.0), **fields))
    params = sampling(1.0, seed=first.started.seed, rule=first.started.rule)
    assert write(draft, sampling=params, **fields).ids == first.samples[0].ids


def test_a_text_that_fills_the_context_ends_with_length(draft: grpc.Channel) -> None:
    models = DraftServiceStub(draft).GetModel(draft_service_pb2.DraftServiceGetModelRequest())
    longest = models.model.limits.max_sequence_tokens
    prompt = (IDS * longest)[: longest - 3]
    result = generate(draft, request(prompt, gamma=0, ignore_eos=True))  # without max_new_tokens
    assert result.started.max_new_tokens == 3
    (sample,) = result.samples
    assert (len(sample.ids), sample.reason) == (3, "LENGTH")


@pytest.mark.parametrize("rule", [TOKENWISE, COUPLED])
def test_reports_and_statistics_agree_with_the_stream(draft: grpc.Channel, rule: sampling_pb2.AcceptanceRule) -> None:
    speculation = draft_service_pb2.SpeculationParams(gamma=4, report_rounds=True)
    fields = LIVELY | {"sampling": sampling(1.0, seed=1, rule=rule)}
    sample = write(draft, speculation=speculation, **fields)
    at, drafted, accepted, chances = 0, list[int](), list[int](), list[float]()
    for number, report in enumerate(sample.rounds, start=1):
        tokens, count = list(report.drafted_token_ids), report.accepted
        assert (report.round, report.output_length) == (number, at)
        assert len(report.drafted_texts) == len(tokens) == min(4, TOKENS - at - 1), "a named γ is fixed"
        assert sample.ids[at : at + count] == tokens[:count]
        judged = min(count + 1, len(tokens))
        assert len(report.beta) == (0 if rule == COUPLED else judged)
        corrected = sample.origins[at + count] == draft_service_pb2.TOKEN_ORIGIN_CORRECTION
        assert corrected == (count < len(tokens))
        at += count + 1
        drafted.append(len(tokens))
        accepted.append(count)
        chances += report.beta or [float(index < count) for index in range(judged)]
    assert at == TOKENS == len(sample.ids) == len(sample.token_texts)
    assert sample.origins.count(draft_service_pb2.TOKEN_ORIGIN_DRAFT) == sum(accepted)
    counts, timings, usage = sample.end.statistics, sample.end.timings, sample.end.usage
    assert (counts.num_rounds, counts.num_drafts) == (len(drafted), sum(map(bool, drafted)))
    assert (counts.num_draft_tokens, counts.num_accepted_tokens) == (sum(drafted), sum(accepted))
    assert list(counts.num_draft_tokens_per_pos) == [sum(n > index for n in drafted) for index in range(4)]
    assert list(counts.num_accepted_tokens_per_pos) == [sum(n > index for n in accepted) for index in range(4)]
    assert counts.draft_acceptance_rate == pytest.approx(sum(accepted) / sum(drafted))
    assert counts.mean_acceptance_length == pytest.approx(1 + sum(accepted) / counts.num_drafts)
    assert counts.alpha == pytest.approx(sum(chances) / len(chances))
    assert counts.mean_gamma == pytest.approx(sum(drafted) / len(drafted))
    assert counts.policy == draft_service_pb2.SPECULATION_POLICY_FIXED
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(IDS), TOKENS)
    assert 0 < timings.forward_us < timings.verdict_us < timings.total_us
    first = timings.first_round
    assert 0 < first.draft_us < timings.draft_us
    assert 0 < first.forward_us < first.verdict_us < timings.verdict_us, "one round of several"
    assert write(draft, gamma=4, **fields).ids == sample.ids, "reports change no token"


@pytest.mark.parametrize("gamma", [4, 0], ids=["proposals", "decode"])
def test_times_of_rounds_are_in_order_and_sum_to_those_of_the_sample(draft: grpc.Channel, gamma: int) -> None:
    speculation = draft_service_pb2.SpeculationParams(gamma=gamma, report_rounds=True)
    sample = write(draft, speculation=speculation, sampling=sampling(1.0, seed=1), **LIVELY)
    whole, last, rounding = sample.end.timings, 0, 2
    for report in sample.rounds:
        times = report.timings
        assert report.draft_start_us >= last - rounding, "drafting begins after the verdict before"
        assert report.draft_start_us + times.draft_us <= report.sent_us + rounding
        at_verifier = times.queue_us + times.forward_us + times.verify_us
        assert at_verifier > 0
        assert at_verifier <= times.verdict_us + rounding or not gamma  # verdicts of a Decode come while it runs
        assert bool(times.draft_us) == bool(report.drafted_token_ids)
        last = report.sent_us + times.verdict_us
    assert last <= whole.total_us + rounding
    for field in whole.first_round.DESCRIPTOR.fields:
        found = sum(getattr(report.timings, field.name) for report in sample.rounds)
        assert found == pytest.approx(getattr(whole, field.name), abs=len(sample.rounds)), field.name
    assert sample.rounds[0].timings == whole.first_round


@pytest.mark.parametrize(
    "fields",
    [
        {"sampling": sampling(1.0, seed=3)},
        {"sampling": sampling(0.0, seed=3)},
        {"sampling": sampling(1.0, seed=3, presence_penalty=0.2)},
    ],
    ids=["coupled", "greedy", "penalty"],
)
def test_an_entropy_bound_shortens_proposals_and_changes_no_token(draft: grpc.Channel, fields: dict[str, Any]) -> None:
    free, bounded, unbounded = (
        write(
            draft,
            speculation=draft_service_pb2.SpeculationParams(gamma=8, max_entropy=bound, report_rounds=True),
            **LIVELY | fields,
        )
        for bound in (None, 0.5, math.inf)
    )
    assert bounded.ids == free.ids == unbounded.ids
    counts, all_counts = bounded.end.statistics, free.end.statistics
    assert unbounded.end.statistics.num_short_drafts == all_counts.num_short_drafts == 0
    assert counts.num_short_drafts > 2
    assert counts.num_draft_tokens < all_counts.num_draft_tokens
    assert counts.draft_acceptance_rate > all_counts.draft_acceptance_rate
    assert all(report.drafted_token_ids for report in bounded.rounds[:-2])


@pytest.mark.parametrize("gamma", [0, 5])
def test_a_stop_token_ends_the_text_and_is_not_in_it(draft: grpc.Channel, gamma: int) -> None:
    free = write(draft, gamma=gamma, **LIVELY)
    stop = free.ids[20]
    at = free.ids.index(stop)
    sample = write(draft, gamma=gamma, stop_token_ids=[stop], **LIVELY)
    assert sample.ids == free.ids[: at + 1]
    assert sample.reason == "STOP_TOKEN"
    assert sample.end.stop_token_id == stop
    assert sample.text == oracle.decode(IDS + free.ids[:at])[len(PROMPT) :]


def test_stop_tokens_wait_for_min_new_tokens(draft: grpc.Channel) -> None:
    stop = oracle.greedy(IDS, 3)[2]
    sample = write(draft, stop_token_ids=[stop], min_new_tokens=7, max_new_tokens=20, ignore_eos=True)
    assert stop not in sample.ids[:7]
    assert len(sample.ids) >= 7


def test_eos_ends_the_text_unless_ignored(draft: grpc.Channel) -> None:
    forced = sampling(0.0, seed=1, logit_bias=[sampling_pb2.LogitBias(token_id=0, bias=100.0)])
    assert write(draft, sampling=forced, max_new_tokens=5).ids == [0]
    sample = write(draft, sampling=forced, max_new_tokens=5, ignore_eos=True)
    assert (sample.ids, sample.text, sample.reason) == ([0] * 5, "", "LENGTH")
    sample = write(draft, sampling=forced, max_new_tokens=5, ignore_eos=True, keep_special_tokens=True)
    assert sample.text == "<|endoftext|>" * 5


@pytest.mark.parametrize(("gamma", "length"), [(0, 3), (5, 1), (5, 9)])
def test_a_stop_string_cuts_the_text_before_it(draft: grpc.Channel, gamma: int, length: int) -> None:
    free = write(draft, gamma=gamma, **LIVELY)
    middle = len(free.text) // 2
    stop = free.text[middle : middle + length]
    sample = write(draft, gamma=gamma, stop=["never to be seen", stop], **LIVELY)
    expected = free.text[: free.text.index(stop)]
    assert (sample.text, sample.reason, sample.end.stop) == (expected, "STOP_STRING", stop)
    assert sample.ids == free.ids[: len(sample.ids)]
    assert sample.end.usage.completion_tokens == len(sample.ids)


def test_a_time_limit_ends_the_text_with_its_tokens_so_far(draft: grpc.Channel) -> None:
    message = request(temperature=1.0, max_new_tokens=900, ignore_eos=True)
    for milliseconds in (400, 800, 1600, 3200):
        message.time_limit.FromMilliseconds(milliseconds)
        (sample,) = generate(draft, message).samples
        assert sample.reason == "TIME_LIMIT"
        if sample.ids:  # a busy machine may not come to the first token in less
            break
    assert 0 < len(sample.ids) < 900
    assert sample.text == oracle.decode(IDS + sample.ids)[len(PROMPT) :]
    assert sample.end.timings.total_us >= 0.97 * 1000 * milliseconds


def test_samples_have_the_texts_of_their_own_seeds(draft: grpc.Channel) -> None:
    fields: dict[str, Any] = {"sampling": sampling(1.0, seed=8), "max_new_tokens": 12, "ignore_eos": True}
    samples = generate(draft, request(n=4, **fields)).samples
    assert [sample.end.index for sample in samples] == [0, 1, 2, 3]
    assert len({tuple(sample.ids) for sample in samples}) == 4
    for index, sample in enumerate(samples):
        fields["sampling"].seed = derive_seed(8, index)
        assert sample.ids == write(draft, **fields).ids


@pytest.mark.parametrize("gamma", [0, 4])
def test_joined_responses_are_those_of_a_stream(draft: grpc.Channel, gamma: int) -> None:
    """In one message for each second, and with privacy of emission each on its own."""
    message = request(gamma=gamma, sampling=sampling(1.0, seed=8), max_new_tokens=40, ignore_eos=True, n=2, stop=["("])
    expected = generate(draft, message)
    message.joined_responses = True
    began = time.monotonic()
    responses = list(DraftServiceStub(draft).Generate(message, timeout=60))
    assert len(responses) <= 2 + (time.monotonic() - began)
    result = result_of(each for response in responses for each in response.joined or [response])
    for one, other in zip(result.samples, expected.samples, strict=True):
        assert (one.ids, one.text, one.reason) == (other.ids, other.text, other.reason)
    message.emission.frame_bytes = 512
    assert not any(each.joined for each in DraftServiceStub(draft).Generate(message, timeout=60))


def test_the_first_token_of_a_joined_text_is_timed_when_it_was_written(draft: grpc.Channel) -> None:
    timings = write(draft, gamma=0, max_new_tokens=200, ignore_eos=True, joined_responses=True).end.timings
    assert timings.first_round.forward_us > 0.9 * timings.forward_us, "one verdict has all tokens"
    assert 0 < timings.time_to_first_token_us < 0.5 * timings.total_us


@pytest.mark.parametrize("gamma", [0, 4])
def test_logprobs_are_the_targets(draft: grpc.Channel, gamma: int) -> None:
    params = sampling(0.8, seed=3, top_k=30, top_p=0.9)
    logprobs = sampling_pb2.LogprobsParams(top_n=5)
    sample = write(draft, gamma=gamma, sampling=params, logprobs=logprobs, max_new_tokens=24, ignore_eos=True)
    assert len(sample.logprobs) == len(sample.ids) == 24
    rows = oracle.logits(IDS + sample.ids)[len(IDS) - 1 : -1]
    raw = torch.log_softmax(rows.double(), dim=-1)
    adjusted = probabilities(rows, SamplingParams(temperature=0.8, top_k=30, top_p=params.top_p), torch.float64).log()
    for i, (token, at) in enumerate(zip(sample.ids, sample.logprobs, strict=True)):
        assert at.token.token_id == token
        assert at.token.raw == pytest.approx(raw[i, token].item(), abs=2e-3)
        assert at.token.adjusted == pytest.approx(adjusted[i, token].item(), abs=2e-3)
        assert len(at.top) == 5
        best = raw[i].topk(5).values.tolist()
        assert [entry.raw for entry in at.top] == pytest.approx(best, abs=2e-3)
        for entry in at.top:
            expected = adjusted[i, entry.token_id].item()
            assert entry.adjusted == (-math.inf if expected == -math.inf else pytest.approx(expected, abs=2e-3))


SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"sampling": sampling(0.0)},
    "coupled": {"sampling": sampling(1.0, seed=4)},
    "tokenwise": {"sampling": sampling(1.0, seed=4, rule=TOKENWISE)},
    "block": {"sampling": sampling(1.0, seed=4, rule=BLOCK)},
}


def chunks_of(draft: grpc.Channel, message: draft_service_pb2.GenerateRequest) -> list[draft_service_pb2.GenerateChunk]:
    responses = DraftServiceStub(draft).Generate(message, timeout=30)
    return [response.chunk for response in responses if response.WhichOneof("event") == "chunk"]


@pytest.mark.parametrize(
    ("name", "end"), [("greedy", "limit"), ("coupled", "stop token"), ("tokenwise", "stop string"), ("block", "limit")]
)
def test_a_request_resumed_after_any_chunk_gives_the_same_tokens(draft: grpc.Channel, name: str, end: str) -> None:
    """Also where text is held because it may become a stop string, and where only the end is lost.

    Under `tokenwise` and `block` too: with a fixed γ, a round whose tokens were not sent has the same draws again
    (invariant 2).
    """
    options: dict[str, Any] = {"gamma": 3, "max_new_tokens": 14, "ignore_eos": True, **SAMPLINGS[name]}
    free = write(draft, IDS, **options)
    middle = len(free.text) // 2
    options["stop"] = [free.text[2:middle] + "\0", free.text[middle:] + "\0"]
    if end == "stop string":
        options["stop"].append(free.text[middle : middle + 9])
    elif end == "stop token":
        last = max(free.ids, key=free.ids.index)  # the token whose first occurrence is last
        options["stop_token_ids"] = [last]
    whole = write(draft, IDS, **options)
    assert max(whole.held) >= 4
    sent, text, held = list[int](), "", 0
    for chunk in chunks_of(draft, request(IDS, **options)):
        before = len(sent) - held
        sent, held = [*sent, *chunk.token_ids], chunk.held_tokens
        if len(sent) - held > before:
            text += chunk.text
        else:
            assert not chunk.text or end == "stop string", "only the last chunk has part of a token's text"
        shown = sent[: len(sent) - held]
        if end == "stop token" and shown[-1:] == [last]:
            shown.pop()  # it has no text
        assert text == oracle.decode(IDS + shown)[len(PROMPT) :]
        if len(sent) == len(free.ids) and not held:
            break  # complete: the service would refuse to resume it
        rest = write(draft, IDS, committed_token_ids=sent, held_tokens=held, **options)
        assert text + rest.text == whole.text
        assert sent[: len(whole.ids)] + rest.ids == whole.ids
        ends = [(each.reason, each.end.stop, each.end.stop_token_id) for each in (rest, whole)]
        assert ends[0] == ends[1]
        assert rest.end.usage.completion_tokens == max(0, len(whole.ids) - len(sent))
    assert sent[: len(whole.ids)] == whole.ids


def test_a_request_resumes_inside_a_character(draft: grpc.Channel) -> None:
    first, second = (oracle.byte_token(byte) for byte in "é".encode())
    params = sampling(0.0, seed=1, logit_bias=[{"token_id": first, "bias": 100.0}])
    chunk = chunks_of(draft, request(IDS, gamma=0, sampling=params, max_new_tokens=1))[0]
    assert (list(chunk.token_ids), chunk.text, chunk.held_tokens) == ([first], "", 1)
    params = sampling(0.0, seed=1, logit_bias=[{"token_id": second, "bias": 100.0}])
    rest = write(draft, IDS, sampling=params, committed_token_ids=[first], held_tokens=1, max_new_tokens=2)
    assert (rest.ids, rest.text) == ([second], "é")


def test_a_chat_prompt_follows_the_models_template(draft: grpc.Channel) -> None:
    turns = [("system", "Be brief."), ("user", "")]
    messages = [draft_service_pb2.ChatMessage(role=role, content=content) for role, content in turns]
    result = generate(draft, request(chat=draft_service_pb2.ChatPrompt(messages=messages), max_new_tokens=4))
    expected = oracle.encode("system: Be brief.\nuser: \nassistant:")
    assert list(result.started.prompt_token_ids) == expected


def test_the_target_continues_alone_beyond_the_drafts_context(draft: grpc.Channel) -> None:
    prompt = (IDS * 40)[: DRAFT_CONTEXT - 20]
    sample = write(draft, prompt, gamma=5, max_new_tokens=40, ignore_eos=True)
    assert sample.ids == oracle.greedy(prompt, 40)
    counts = sample.end.statistics
    assert 0 < counts.num_drafts < counts.num_rounds
    beyond = (IDS * 40)[: DRAFT_CONTEXT + 10]
    sample = write(draft, beyond, gamma=5, max_new_tokens=8, ignore_eos=True)
    assert sample.ids == oracle.greedy(beyond, 8)
    assert sample.end.statistics.num_drafts == 0


def test_the_target_continues_alone_if_the_drafter_fails(draft: grpc.Channel, pair_process: ServiceProcess) -> None:
    prompt = [*IDS, BREAKING_TOKEN, 7]
    sample = write(draft, prompt, request_id="breaks", gamma=5, max_new_tokens=12, ignore_eos=True)
    assert sample.ids == oracle.greedy(prompt, 12)
    assert sample.end.statistics.num_drafts == 0
    wait_until(lambda: any("drafting failed" in line and "breaks" in line for line in pair_process.log_lines()))


def test_tokens_before_a_failure_of_the_drafter_are_sent(draft: grpc.Channel, pair_process: ServiceProcess) -> None:
    params = sampling(0.0, seed=1, logit_bias=[{"token_id": BREAKING_TOKEN, "bias": 100.0}])
    sample = write(draft, IDS, request_id="breaks late", sampling=params, gamma=5, max_new_tokens=12, ignore_eos=True)
    assert sample.ids == [BREAKING_TOKEN] * 12
    counts = sample.end.statistics
    assert (counts.num_drafts, counts.num_draft_tokens, counts.num_draft_recoveries) == (1, 1, 0)
    assert counts.num_draft_failures >= 1
    wait_until(lambda: any("drafting failed" in line and "breaks late" in line for line in pair_process.log_lines()))


SIGMOID = sampling_pb2.ACCEPTANCE_RULE_SIGMOID


def by_sigmoid(temperature: float) -> dict[str, Any]:
    scales = sampling_pb2.SigmoidScales(alpha=-1e4, beta=1e4)
    return {"sampling": sampling(temperature, seed=5, rule=SIGMOID, sigmoid=scales), "ignore_eos": True}


def test_lossy_texts_are_labelled(draft: grpc.Channel) -> None:
    """`sigmoid` above temperature 0, and lenience below 1."""
    assert generate(draft, request(max_new_tokens=2, **by_sigmoid(1.0))).started.lossy
    greedy = generate(draft, request(max_new_tokens=TOKENS, **by_sigmoid(0.0)))
    assert not greedy.started.lossy
    assert greedy.samples[0].ids == oracle.greedy(IDS, TOKENS)
    for temperature, lenience in ((0.0, 0.5), (1.0, 0.5), (1.0, 1.0)):
        params = sampling(temperature, seed=1, lenience=lenience)
        assert generate(draft, request(sampling=params, max_new_tokens=2)).started.lossy == (lenience < 1)
    models = DraftServiceStub(draft).GetModel(draft_service_pb2.DraftServiceGetModelRequest())
    assert list(models.model.lossy_rules) == list(models.target.lossy_rules) == [SIGMOID]


def test_proposals_with_logits_fit_into_a_message(draft: grpc.Channel) -> None:
    """The limit of 65,536 bytes holds 15 tokens of 2,048 logits. With the paper's scales nearly all are accepted."""
    speculation = draft_service_pb2.SpeculationParams(gamma=15, report_rounds=True)
    sample = write(draft, speculation=speculation, max_new_tokens=48, **by_sigmoid(1.0))
    assert max(len(report.drafted_token_ids) for report in sample.rounds) == 15
    assert sample.end.statistics.draft_acceptance_rate > 0.98
    assert write(draft, max_new_tokens=8, **by_sigmoid(1.0)).end.statistics.num_drafts > 0
