"""The lossy rule `sigmoid` over gRPC, against real processes: it is the rule that was asked for, and is labelled."""

from typing import Any

import grpc
import pytest

from kernels.sampling import SamplingParams
from kernels.sigmoid import Scores, draft_logits
from kernels.verify import Proposed, Rule, SigmoidScales
from outrider.rpc.errors import from_rpc_error
from protos.outrider.v1 import draft_service_pb2, sampling_pb2, verifier_service_pb2
from protos.outrider.v1.draft_service_pb2_grpc import DraftServiceStub
from tests.draft_service import oracle
from tests.draft_service.calls import PROMPT, ProposeStream, Sample, generate, request, sampling
from tests.kernels import reference
from tests.verifier_service.streams import Stream

RULE = sampling_pb2.ACCEPTANCE_RULE_SIGMOID
IDS = oracle.encode(PROMPT)
STEEP = SigmoidScales(8.0, 10.0)  # acceptance is then well off 0 and 1
STEEPER = SigmoidScales(20.0, 21.0)
PAPERS = SigmoidScales(-1e4, 1e4)
TOKENS, SEED = 48, 5


def _law(scales: SigmoidScales | None, temperature: float = 1.0, **fields: Any) -> sampling_pb2.SamplingParams:
    told = None if scales is None else sampling_pb2.SigmoidScales(alpha=scales.alpha, beta=scales.beta)
    return sampling(temperature, seed=SEED, rule=RULE, sigmoid=told, **fields)


def _write(draft: grpc.Channel, params: sampling_pb2.SamplingParams, gamma: int = 4) -> tuple[bool, Sample]:
    speculation = draft_service_pb2.SpeculationParams(gamma=gamma, report_rounds=True)
    message = request(sampling=params, speculation=speculation, max_new_tokens=TOKENS, ignore_eos=True)
    result = generate(draft, message)
    assert result.started.rule == params.rule
    return result.started.lossy, result.samples[0]


def _replayed(sample: Sample, law: SamplingParams, scales: SigmoidScales) -> list[tuple[int, int, list[float]]]:
    """What the oracle rules on each reported round: accepted, next token, and each judged draft's chance to pass."""
    tokens = IDS + sample.ids
    p, q = oracle.logits(tokens), oracle.logits(tokens, "draft")
    outcomes = []
    for report in sample.rounds:
        base, drafted = len(IDS) + report.output_length, list(report.drafted_token_ids)
        rows, drafts = p[base - 1 : base + len(drafted)], q[base - 1 : base + len(drafted) - 1]
        if report.accepted < len(drafted) - 1:  # the rows behind a rejected draft stand in no text
            whole = tokens[:base] + drafted
            rows = oracle.logits(whole)[base - 1 :]
            drafts = oracle.logits(whole, "draft")[base - 1 : -1]
        said = tuple(draft_logits(drafts, law))
        proposed = Proposed(tuple(drafted), said, law, SEED, base, rule=Rule.SIGMOID, sigmoid=scales)
        (result,) = reference.verify(rows, [proposed])
        scores = Scores(rows, law, said, scales)
        ratios = [p_x / q_x for p_x, q_x in (scores.at(i, x) for i, x in enumerate(drafted))]
        judged = [min(1.0, ratio) for ratio in ratios[: result.accepted + 1]]
        outcomes.append((result.accepted, result.next_token, judged))
    return outcomes


@pytest.mark.parametrize(
    ("scales", "temperature", "top_k"), [(STEEP, 1.0, 0), (STEEPER, 0.7, 20), (PAPERS, 1.0, 0)], ids=str
)
def test_each_verdict_is_the_oracles(
    draft: grpc.Channel, scales: SigmoidScales, temperature: float, top_k: int
) -> None:
    """Token for token. With steep scales the drafts that pass are as many as their chances sum to, give or take five
    standard errors.
    """
    lossy, sample = _write(draft, _law(scales, temperature, top_k=top_k))
    assert lossy
    law = SamplingParams(temperature=temperature, top_k=top_k)
    outcomes = _replayed(sample, law, scales)
    chances = [chance for _, _, judged in outcomes for chance in judged]
    accepted = 0
    for report, (kept, next_token, _) in zip(sample.rounds, outcomes, strict=True):
        assert report.accepted == kept
        assert list(report.beta) == []
        written = sample.ids[report.output_length :][: kept + 1]
        assert written == [*report.drafted_token_ids[:kept], next_token][: len(written)]
        accepted += kept
    spread = sum(chance * (1 - chance) for chance in chances) ** 0.5
    assert accepted == pytest.approx(sum(chances), abs=5 * spread + 0.5)
    assert sample.end.statistics.alpha == pytest.approx(accepted / len(chances))
    if scales is PAPERS:  # all pass: the text is the draft's, and the target's every fifth token
        assert sample.end.statistics.draft_acceptance_rate > 0.98
    else:
        assert 0.2 < accepted / len(chances) < 0.98


def test_the_label_says_what_the_law_is(draft: grpc.Channel) -> None:
    """Lossy are `sigmoid` above temperature 0, and lenience below 1; at temperature 0 the text is the target's own."""
    assert _write(draft, _law(STEEP))[0]
    lossy, greedy = _write(draft, _law(STEEP, 0.0))
    assert not lossy
    assert greedy.ids == oracle.greedy(IDS, TOKENS)
    assert greedy.end.statistics.num_draft_tokens > 0
    for params, expected in (
        (sampling(1.0, seed=1, lenience=0.5), True),
        (sampling(0.0, seed=1, lenience=0.5), True),
        (sampling(1.0, seed=1), False),
        (sampling(1.0, seed=1, rule=sampling_pb2.ACCEPTANCE_RULE_BLOCK), False),
    ):
        result = generate(draft, request(sampling=params, max_new_tokens=2))
        assert result.started.lossy is expected
    models = DraftServiceStub(draft).GetModel(draft_service_pb2.DraftServiceGetModelRequest())
    for model in (models.model, models.target):
        assert RULE in model.rules
        assert list(model.lossy_rules) == [RULE]


def test_the_service_chooses_no_more_than_a_message_holds(draft: grpc.Channel) -> None:
    """The message limit of 65,536 bytes holds 15 tokens of 2,048 logits; a proposal of 15 passes."""
    _, sample = _write(draft, _law(PAPERS), gamma=15)
    assert max(len(report.drafted_token_ids) for report in sample.rounds) == 15
    (unset,) = generate(draft, request(sampling=_law(PAPERS), max_new_tokens=8)).samples
    assert unset.end.statistics.num_drafts > 0


def test_proposals_with_logits_may_be_judged_wherever_the_client_likes(
    draft: grpc.Channel, verifier: grpc.Channel
) -> None:
    params = _law(STEEP)
    with ProposeStream(draft) as drafts, Stream(verifier) as verdicts:
        drafts.send(open=draft_service_pb2.OpenDraft(prompt_token_ids=IDS, sampling=params))
        drafts.take()
        verdicts.open(
            verifier_service_pb2.OpenSequence(prompt_token_ids=IDS, max_new_tokens=9, ignore_eos=True, sampling=params)
        )
        drafts.advance(1, len(IDS), [], gamma=3)
        proposal = drafts.take().proposal
        assert [each.WhichOneof("form") for each in proposal.distributions] == ["logits"] * 3
        verdicts.send(verifier_service_pb2.VerifyRequest(sequence_id=verdicts.sequence_id, proposal=proposal))
        assert verdicts.verdict().judged >= 1
        drafts.advance(2, len(IDS), [1], gamma=16)
        with pytest.raises(grpc.RpcError) as caught:
            drafts.take()
    error = from_rpc_error(caught.value)
    assert (error.code, error.metadata["field"]) == (grpc.StatusCode.INVALID_ARGUMENT, "advance.gamma")
    assert "65536" in error.message
