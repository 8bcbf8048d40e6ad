"""Every field of an opening, a proposal and a decode is checked before it reaches a tensor."""

import math
from collections.abc import Callable

import grpc
import numpy as np
import pytest

from kernels.sigmoid import EXCLUDED, DraftLogits, SigmoidScales
from kernels.verify import Rule
from outrider.rpc.errors import RequestError
from outrider.service.wire import HASH_BYTES, bytes_with_logits, encode_proposal, most_logits
from protos.outrider.v1 import model_pb2, sampling_pb2, speculation_pb2, verifier_service_pb2
from verifier_service.request import check_open, check_proposal

V = 100
MODEL = model_pb2.ModelInfo(
    vocab_size=V,
    weights_fingerprint="f" * 64,
    eos_token_ids=[0],
    features=["decode", "resume"],
    limits=model_pb2.Limits(max_gamma=4, max_support=8, max_sequence_tokens=50, max_stop_token_ids=2),
)
AT_HALF = sampling_pb2.SamplingParams(rule=sampling_pb2.ACCEPTANCE_RULE_COUPLED, lenience=0.5)


def _by_sigmoid(alpha: float, beta: float) -> sampling_pb2.SamplingParams:
    return sampling_pb2.SamplingParams(
        rule=sampling_pb2.ACCEPTANCE_RULE_SIGMOID, sigmoid=sampling_pb2.SigmoidScales(alpha=alpha, beta=beta)
    )


def opening() -> verifier_service_pb2.OpenSequence:
    return verifier_service_pb2.OpenSequence(
        prompt_token_ids=[1, 2, 3], max_new_tokens=10, sampling=sampling_pb2.SamplingParams(seed=7)
    )


def sparse(ids: list[int], weights: list[int]) -> speculation_pb2.TokenDistribution:
    return speculation_pb2.TokenDistribution(
        sparse=speculation_pb2.SparseDistribution(
            token_ids=np.array(ids, "<u4").tobytes(), weights=np.array(weights, "<u2").tobytes()
        )
    )


def proposal() -> speculation_pb2.Proposal:
    return speculation_pb2.Proposal(
        round=1,
        base_length=3,
        prefix_hash=b"\0" * HASH_BYTES,
        token_ids=[5, 6],
        distributions=[
            sparse([4, 5, 9], [1, 2, 3]),
            speculation_pb2.TokenDistribution(point_mass=speculation_pb2.PointMass()),
        ],
    )


def assert_names(error: RequestError, field: str, numbers: list[str]) -> None:
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert error.metadata["field"] == field
    assert not [number for number in numbers if number not in error.message], error.message


Change = Callable[[verifier_service_pb2.OpenSequence], object]


@pytest.mark.parametrize(
    ("change", "field", "numbers"),
    [
        (lambda m: m.ClearField("prompt_token_ids"), "prompt_token_ids", ["empty"]),
        (lambda m: m.prompt_token_ids.extend([V] * 100), "prompt_token_ids", ["103 tokens", "50"]),
        (lambda m: m.committed_token_ids.extend([V] * 100), "committed_token_ids", ["100 tokens", "50"]),
        (lambda m: m.prompt_token_ids.append(V), "prompt_token_ids", [f"[3] is {V}", str(V)]),
        (lambda m: m.prompt_token_ids.append(2**32 - 1), "prompt_token_ids", [str(2**32 - 1)]),  # -1 on the wire
        (lambda m: m.committed_token_ids.append(V + 1), "committed_token_ids", [str(V + 1)]),
        (lambda m: m.committed_token_ids.append(0), "committed_token_ids", ["stop token 0"]),
        (lambda m: m.committed_token_ids.extend([1] * 10), "max_new_tokens", ["10", "committed_token_ids, 10"]),
        (lambda m: setattr(m, "max_new_tokens", 0), "max_new_tokens", ["0"]),
        (lambda m: setattr(m, "max_new_tokens", 48), "max_new_tokens", ["3", "48", "51", "50"]),
        (lambda m: setattr(m, "min_new_tokens", 11), "min_new_tokens", ["11", "10"]),
        (lambda m: m.stop_token_ids.extend([1, 2, 3]), "stop_token_ids", ["3", "2"]),
        (lambda m: m.stop_token_ids.append(V), "stop_token_ids", [str(V)]),
        (lambda m: m.sampling.ClearField("seed"), "sampling.seed", ["not set"]),
        (lambda m: setattr(m.sampling, "temperature", math.nan), "sampling.temperature", ["nan", "[1e-06, 100]"]),
        (lambda m: setattr(m.sampling, "rule", 99), "sampling.rule", ["99"]),
        (lambda m: m.sampling.MergeFrom(AT_HALF), "sampling.lenience", ["0.5", "coupled"]),
        (lambda m: m.sampling.sigmoid.SetInParent(), "sampling.sigmoid", ["block"]),
        (lambda m: setattr(m.sampling, "rule", 4), "sampling.sigmoid", ["not set", "alpha and beta"]),
        (lambda m: m.sampling.MergeFrom(_by_sigmoid(5, 5)), "sampling.sigmoid.alpha", ["5", "below beta"]),
        (lambda m: m.sampling.MergeFrom(_by_sigmoid(0, math.inf)), "sampling.sigmoid.beta", ["inf"]),
        (lambda m: m.sampling.logit_bias.add(token_id=V), "sampling.logit_bias", [str(V)]),
        (lambda m: m.sampling.banned_token_ids.extend(range(V)), "sampling.banned_token_ids", [str(V)]),
        (lambda m: setattr(m.logprobs, "top_n", 21), "logprobs.top_n", ["21", "20"]),
        (lambda m: setattr(m.prompt_logprobs, "top_n", 21), "prompt_logprobs.top_n", ["21", "20"]),
        (lambda m: setattr(m, "request_id", "x" * 129), "request_id", ["129", "128"]),
        (lambda m: setattr(m, "response_bytes", 255), "response_bytes", ["255", "256", "1048576"]),
        (lambda m: setattr(m, "join_ms", 1001), "join_ms", ["1001", "1000"]),
    ],
)
def test_an_invalid_opening_is_refused_with_field_and_numbers(change: Change, field: str, numbers: list[str]) -> None:
    message = opening()
    change(message)
    with pytest.raises(RequestError) as caught:
        check_open(message, MODEL)
    assert_names(caught.value, field, numbers)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m.required_features.append("trees"), "UNKNOWN_FEATURE"),
        (lambda m: setattr(m, "weights_fingerprint", "0" * 64), "PAIR_MISMATCH"),
    ],
)
def test_unknown_features_and_other_weights_are_a_failed_precondition(change: Change, reason: str) -> None:
    message = opening()
    change(message)
    with pytest.raises(RequestError) as caught:
        check_open(message, MODEL)
    assert caught.value.code is grpc.StatusCode.FAILED_PRECONDITION
    assert caught.value.reason == reason


def _set_q(message: speculation_pb2.Proposal, distribution: speculation_pb2.TokenDistribution) -> None:
    message.distributions[0].CopyFrom(distribution)


LOGITS = speculation_pb2.TokenDistribution(logits=speculation_pb2.DenseLogits(values=b"\0" * 2 * V))


@pytest.mark.parametrize(
    ("change", "field", "numbers"),
    [
        (lambda m: setattr(m, "round", 0), "proposal.round", ["0"]),
        (lambda m: setattr(m, "base_length", 0), "proposal.base_length", ["0"]),
        (lambda m: setattr(m, "prefix_hash", b"123"), "proposal.prefix_hash", ["3", "8"]),
        (lambda m: m.token_ids.extend([1, 1, 1]), "proposal.token_ids", ["5", "4"]),
        (lambda m: m.token_ids.__setitem__(1, V), "proposal.token_ids", [f"[1] is {V}"]),
        (lambda m: m.distributions.pop(), "proposal.distributions", ["1", "2"]),
        (lambda m: m.distributions[0].Clear(), "proposal.distributions[0].form", ["not set"]),
        (lambda m: _set_q(m, LOGITS), "proposal.distributions[0].form", ["sigmoid"]),
        (lambda m: _set_q(m, sparse([4, 5], [0, 0])), "proposal.distributions[0].sparse", ["0"]),
        (lambda m: _set_q(m, sparse([5, 4], [1, 1])), "proposal.distributions[0].sparse", ["4", "5"]),
        (lambda m: _set_q(m, sparse([5, V], [1, 1])), "proposal.distributions[0].sparse", [str(V)]),
        (lambda m: _set_q(m, sparse([4, 6], [1, 1])), "proposal.distributions[0].sparse", ["token 5", "2"]),
        (lambda m: _set_q(m, sparse([4, 5], [1])), "proposal.distributions[0].sparse", ["2", "1"]),
        (lambda m: _set_q(m, sparse(list(range(9)), [1] * 9)), "proposal.distributions[0].sparse", ["9", "8"]),
    ],
)
def test_an_invalid_proposal_is_refused_with_field_and_numbers(
    change: Callable[[speculation_pb2.Proposal], object], field: str, numbers: list[str]
) -> None:
    message = proposal()
    change(message)
    with pytest.raises(RequestError) as caught:
        check_proposal(message, MODEL)
    assert_names(caught.value, field, numbers)


def _with_logits(values: np.ndarray) -> speculation_pb2.Proposal:
    raw = values.astype("<f2").tobytes()
    distribution = speculation_pb2.TokenDistribution(logits=speculation_pb2.DenseLogits(values=raw))
    message = proposal()
    message.ClearField("distributions")
    message.distributions.extend([distribution] * 2)
    return message


def _changed(at: int, value: float) -> np.ndarray:
    logits = np.linspace(-9, 9, V)
    logits[at] = value
    return logits


def test_scales_and_logits_keep_their_values() -> None:
    message = opening()
    message.sampling.MergeFrom(_by_sigmoid(-10, 1e3))
    assert check_open(message, MODEL).sampling.sigmoid == SigmoidScales(-10, 1e3)
    sent = _changed(3, EXCLUDED)
    for logits in check_proposal(_with_logits(sent), MODEL, rule=Rule.SIGMOID).distributions:
        assert isinstance(logits, DraftLogits)
        assert logits.values.tolist() == sent.astype(np.float16).tolist()
        again = speculation_pb2.Proposal()
        encode_proposal(again, [0], [logits])
        assert again.distributions[0].logits.values == sent.astype("<f2").tobytes()


@pytest.mark.parametrize(
    ("message", "field", "numbers"),
    [
        (_with_logits(np.zeros(V - 1)), "logits", [str(2 * V - 2), str(2 * V), str(V)]),
        (_with_logits(_changed(17, math.nan)), "logits", ["token 17", "nan"]),
        (_with_logits(_changed(0, -math.inf)), "logits", ["token 0", "-inf"]),
        (_with_logits(_changed(5, EXCLUDED)), "logits", ["token 5", "-65504"]),
        (proposal(), "form", ["sparse", "sigmoid"]),
    ],
    ids=str,
)
def test_invalid_logits_are_refused_with_field_and_numbers(
    message: speculation_pb2.Proposal, field: str, numbers: list[str]
) -> None:
    with pytest.raises(RequestError) as caught:
        check_proposal(message, MODEL, rule=Rule.SIGMOID)
    assert_names(caught.value, f"proposal.distributions[0].{field}", numbers)


def test_sigmoid_takes_point_masses_at_temperature_zero_only() -> None:
    message = proposal()
    message.distributions[0].CopyFrom(message.distributions[1])
    assert check_proposal(message, MODEL, rule=Rule.SIGMOID, is_greedy=True).distributions == (None, None)
    with pytest.raises(RequestError, match="is point_mass; the rule sigmoid requires logits"):
        check_proposal(message, MODEL, rule=Rule.SIGMOID)


@pytest.mark.parametrize(("gamma", "size"), [(4, 3), (1, 2048), (4, 152_064)])
def test_the_size_bound_of_a_message_with_logits(gamma: int, size: int) -> None:
    distribution = speculation_pb2.TokenDistribution(logits=speculation_pb2.DenseLogits(values=bytes(2 * size)))
    message = proposal()
    message.ClearField("distributions")
    message.distributions.extend([distribution] * gamma)
    message.token_ids[:] = [2**32 - 1] * gamma
    request = verifier_service_pb2.VerifyRequest(sequence_id="γ" * 128, proposal=message)
    bound = bytes_with_logits(gamma, size)
    assert request.ByteSize() <= bound <= request.ByteSize() + 1100
    assert (most_logits(bound, size), most_logits(bound - 1, size), most_logits(5, size)) == (gamma, gamma - 1, 0)


def test_the_first_token_waits_only_for_the_time_that_the_opening_names() -> None:
    checked = check_open(opening(), MODEL)
    assert (checked.joins_first, checked.seconds_joined) == (False, 0.1)
    message = opening()
    message.join_ms = 500
    checked = check_open(message, MODEL)
    assert (checked.joins_first, checked.seconds_joined) == (True, 0.5)
