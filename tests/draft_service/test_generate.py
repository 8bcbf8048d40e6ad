"""`Generate` over gRPC, against real processes: the text is the target's, and it ends where it should."""

import math
from typing import Any

import grpc
import pytest
import torch

from draft_service.request import derive_seed
from kernels.sampling import SamplingParams, probabilities
from outrider.cli.processes import ServiceProcess
from protos.outrider.v1 import draft_service_pb2, sampling_pb2
from protos.outrider.v1.draft_service_pb2_grpc import DraftServiceStub
from tests.draft_service import oracle
from tests.draft_service.calls import BLOCK, COUPLED, PROMPT, TOKENWISE, generate, request, sampling, write
from tests.draft_service.pairs import BREAKING_TOKEN, DRAFT_CONTEXT

IDS = oracle.encode(PROMPT)
TOKENS = 28
LIVELY: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": TOKENS, "ignore_eos": True}


@pytest.mark.parametrize("gamma", [0, 1, 5, 16])
def test_greedy_text_is_the_targets_own_whatever_gamma(draft: grpc.Channel, gamma: int) -> None:
    sample = write(draft, gamma=gamma, max_new_tokens=TOKENS, ignore_eos=True)
    assert sample.ids == oracle.greedy(IDS, TOKENS)
    assert sample.text == oracle.decode(IDS + sample.ids)[len(PROMPT) :]
    assert sample.reason == "LENGTH"
    assert sample.end.statistics.num_drafts == 0 if gamma == 0 else sample.end.statistics.num_drafts > 0


def test_response_says_what_was_understood(draft: grpc.Channel) -> None:
    message = request(request_id="mine", max_new_tokens=9, sampling=sampling(0.0, seed=77))
    started = generate(draft, message).started
    assert (started.request_id, started.seed, started.max_new_tokens) == ("mine", 77, 9)
    assert list(started.prompt_token_ids) == IDS
    models = DraftServiceStub(draft).GetModel(draft_service_pb2.DraftServiceGetModelRequest())
    assert started.weights_fingerprint == models.target.weights_fingerprint
    assert started.rule == COUPLED, "a seed, and no rule"
    assert generate(draft, request(max_new_tokens=1, sampling=sampling())).started.rule == models.target.default_rule


def test_statistics_agree_with_what_was_streamed(draft: grpc.Channel) -> None:
    sample = write(draft, gamma=4, **LIVELY)
    counts, usage = sample.end.statistics, sample.end.usage
    drafted = sample.origins.count(draft_service_pb2.TOKEN_ORIGIN_DRAFT)
    assert drafted == counts.num_accepted_tokens == sum(counts.num_accepted_tokens_per_pos)
    assert counts.num_draft_tokens == sum(counts.num_draft_tokens_per_pos)
    assert len(sample.ids) == TOKENS == drafted + counts.num_rounds
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(IDS), TOKENS)
    assert 0 < counts.alpha < 1
    assert counts.mean_acceptance_length == pytest.approx(1 + counts.num_accepted_tokens / counts.num_drafts)
    timings = sample.end.timings
    assert 0 < timings.forward_us < timings.verdict_us < timings.total_us


@pytest.mark.parametrize("rule", [TOKENWISE, COUPLED])
def test_rounds_are_reported_as_they_went(draft: grpc.Channel, rule: sampling_pb2.AcceptanceRule) -> None:
    speculation = draft_service_pb2.SpeculationParams(gamma=4, report_rounds=True)
    fields = LIVELY | {"sampling": sampling(1.0, seed=1, rule=rule)}
    sample = write(draft, speculation=speculation, **fields)
    at = 0
    for number, report in enumerate(sample.rounds, start=1):
        drafted, accepted = list(report.drafted_token_ids), report.accepted
        assert (report.round, report.output_length) == (number, at)
        assert len(report.drafted_texts) == len(drafted) <= 4
        assert sample.ids[at : at + accepted] == drafted[:accepted]
        assert len(report.beta) == (0 if rule == COUPLED else min(accepted + 1, len(drafted)))
        corrected = sample.origins[at + accepted] == draft_service_pb2.TOKEN_ORIGIN_CORRECTION
        assert corrected == (accepted < len(drafted))
        at += accepted + 1
    assert at == len(sample.ids) == len(sample.token_texts)
    assert write(draft, gamma=4, **fields).ids == sample.ids, "reporting changes nothing"


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


def test_the_models_own_end_ends_the_text_unless_ignored(draft: grpc.Channel) -> None:
    forced = sampling(0.0, seed=1, logit_bias=[sampling_pb2.LogitBias(token_id=0, bias=100.0)])
    assert write(draft, sampling=forced, max_new_tokens=5).ids == [0]
    sample = write(draft, sampling=forced, max_new_tokens=5, ignore_eos=True)
    assert (sample.ids, sample.text, sample.reason) == ([0] * 5, "", "LENGTH")
    assert write(draft, sampling=forced, max_new_tokens=5, ignore_eos=True, keep_special_tokens=True).text == (
        "<|endoftext|>" * 5
    )


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


def test_a_time_limit_ends_the_text_with_what_there_is(draft: grpc.Channel) -> None:
    message = request(temperature=1.0, max_new_tokens=900, ignore_eos=True)
    for milliseconds in (400, 800, 1600, 3200):
        message.time_limit.FromMilliseconds(milliseconds)
        (sample,) = generate(draft, message).samples
        assert sample.reason == "TIME_LIMIT"
        if sample.ids:  # in less, a machine that has much else to do may not come to the first token
            break
    assert 0 < len(sample.ids) < 900
    assert sample.text == oracle.decode(IDS + sample.ids)[len(PROMPT) :]
    assert sample.end.timings.total_us >= 0.97 * 1000 * milliseconds


def test_a_seed_repeats_itself_and_another_does_not(draft: grpc.Channel) -> None:
    """With a γ that stays: under the rules that draw the lengths of proposals belong to what a seed repeats."""
    given: dict[str, Any] = {"gamma": 5, "max_new_tokens": 16, "ignore_eos": True}

    def ids(seed: int | None, rule: sampling_pb2.AcceptanceRule) -> list[int]:
        return write(draft, sampling=sampling(1.0, seed=seed, rule=rule), **given).ids

    for rule in (TOKENWISE, COUPLED):
        assert (text := ids(5, rule)) == ids(5, rule)
        assert text != ids(6, rule)
    chosen = generate(draft, request(sampling=sampling(1.0), **given))
    assert ids(chosen.started.seed, chosen.started.rule) == chosen.samples[0].ids


def test_samples_run_side_by_side_and_each_by_itself(draft: grpc.Channel) -> None:
    fields: dict[str, Any] = {"sampling": sampling(1.0, seed=8), "max_new_tokens": 12, "ignore_eos": True}
    several = generate(draft, request(n=4, **fields)).samples
    assert [sample.end.index for sample in several] == [0, 1, 2, 3]
    assert len({tuple(sample.ids) for sample in several}) == 4
    for index, sample in enumerate(several):
        fields["sampling"].seed = derive_seed(8, index)
        assert sample.ids == write(draft, **fields).ids


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
def test_after_any_chunk_it_goes_on_with_the_same_tokens(draft: grpc.Channel, name: str, end: str) -> None:
    """Also where the text of tokens is held, for it may become a stop string, and where the end alone is lost.

    Under `tokenwise` and `block` too: at a draft service of the same kind, and with a fixed γ, a round whose tokens
    were not sent is drawn again with the same numbers (invariant 2).
    """
    options: dict[str, Any] = {"gamma": 3, "max_new_tokens": 14, "ignore_eos": True, **SAMPLINGS[name]}
    free = write(draft, IDS, **options)
    middle = len(free.text) // 2
    options["stop"] = [free.text[2:middle] + "\0", free.text[middle:] + "\0"]
    if end == "stop string":
        options["stop"].append(free.text[middle : middle + 9])
    elif end == "stop token":
        last = max(free.ids, key=free.ids.index)  # the one that comes first latest
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
            assert not chunk.text or end == "stop string", "a part of a token's text, at the end alone"
        shown = sent[: len(sent) - held]
        if end == "stop token" and shown[-1:] == [last]:
            shown.pop()  # it has no text
        assert text == oracle.decode(IDS + shown)[len(PROMPT) :]
        if len(sent) == len(free.ids) and not held:
            break  # nothing is missing, and to ask for it would be refused
        rest = write(draft, IDS, committed_token_ids=sent, held_tokens=held, **options)
        assert text + rest.text == whole.text
        assert sent[: len(whole.ids)] + rest.ids == whole.ids
        ends = [(each.reason, each.end.stop, each.end.stop_token_id) for each in (rest, whole)]
        assert ends[0] == ends[1]
        assert rest.end.usage.completion_tokens == max(0, len(whole.ids) - len(sent))
    assert sent[: len(whole.ids)] == whole.ids


def test_half_a_character_is_told_and_goes_on(draft: grpc.Channel) -> None:
    first, second = (oracle.byte_token(byte) for byte in "é".encode())
    params = sampling(0.0, seed=1, logit_bias=[{"token_id": first, "bias": 100.0}])
    (chunk,) = chunks_of(draft, request(IDS, gamma=0, sampling=params, max_new_tokens=1))[:1]
    assert (list(chunk.token_ids), chunk.text, chunk.held_tokens) == ([first], "", 1)
    params = sampling(0.0, seed=1, logit_bias=[{"token_id": second, "bias": 100.0}])
    rest = write(draft, IDS, sampling=params, committed_token_ids=[first], held_tokens=1, max_new_tokens=2)
    assert (rest.ids, rest.text) == ([second], "é")


def test_a_conversation_follows_the_models_template(draft: grpc.Channel) -> None:
    said = [("system", "Be brief."), ("user", "")]
    messages = [draft_service_pb2.ChatMessage(role=role, content=content) for role, content in said]
    result = generate(draft, request(chat=draft_service_pb2.ChatPrompt(messages=messages), max_new_tokens=4))
    expected = oracle.encode("system: Be brief.\nuser: \nassistant:")
    assert list(result.started.prompt_token_ids) == expected


def test_the_target_goes_on_where_the_drafts_context_ends(draft: grpc.Channel) -> None:
    prompt = (IDS * 40)[: DRAFT_CONTEXT - 20]
    sample = write(draft, prompt, gamma=5, max_new_tokens=40, ignore_eos=True)
    assert sample.ids == oracle.greedy(prompt, 40)
    counts = sample.end.statistics
    assert 0 < counts.num_drafts < counts.num_rounds
    beyond = (IDS * 40)[: DRAFT_CONTEXT + 10]
    sample = write(draft, beyond, gamma=5, max_new_tokens=8, ignore_eos=True)
    assert sample.ids == oracle.greedy(beyond, 8)
    assert sample.end.statistics.num_drafts == 0


def test_the_target_goes_on_where_the_drafter_fails(draft: grpc.Channel, pair_process: ServiceProcess) -> None:
    prompt = [*IDS, BREAKING_TOKEN, 7]
    sample = write(draft, prompt, request_id="breaks", gamma=5, max_new_tokens=12, ignore_eos=True)
    assert sample.ids == oracle.greedy(prompt, 12)
    assert sample.end.statistics.num_drafts == 0
    assert any("drafting failed" in line and "breaks" in line for line in pair_process.log_lines())


SIGMOID = sampling_pb2.ACCEPTANCE_RULE_SIGMOID


def by_sigmoid(temperature: float) -> dict[str, Any]:
    scales = sampling_pb2.SigmoidScales(alpha=-1e4, beta=1e4)
    return {"sampling": sampling(temperature, seed=5, rule=SIGMOID, sigmoid=scales), "ignore_eos": True}


def test_what_is_lossy_is_labelled(draft: grpc.Channel) -> None:
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
    """The limit of 65,536 bytes holds 15 tokens of 2,048 logits. With the paper's scales nearly all pass."""
    speculation = draft_service_pb2.SpeculationParams(gamma=15, report_rounds=True)
    sample = write(draft, speculation=speculation, max_new_tokens=48, **by_sigmoid(1.0))
    assert max(len(report.drafted_token_ids) for report in sample.rounds) == 15
    assert sample.end.statistics.draft_acceptance_rate > 0.98
    assert write(draft, max_new_tokens=8, **by_sigmoid(1.0)).end.statistics.num_drafts > 0
