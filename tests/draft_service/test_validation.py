"""What a request becomes: defaults, seeds, and what the model's files decide. Errors over gRPC: `test_bad_input`."""

from dataclasses import replace
from typing import Any

import grpc
import pytest

from draft_service import validation
from draft_service.drafters.base import Kind
from draft_service.request import Generation
from draft_service.sequence import Sequence
from draft_service.validation import check_generate
from kernels.verify import Rule
from outrider.rpc.errors import RequestError
from outrider.runtime.loader import ModelSource
from outrider.runtime.tokenizer import Tokenizer, load_tokenizer
from outrider.service.sampling import RULE_TO_WIRE
from outrider.service.wire import bytes_with_logits
from protos.outrider.v1 import draft_service_pb2, model_pb2, sampling_pb2
from tests.draft_service.calls import BLOCK, COUPLED, TOKENWISE, request, sampling
from tests.draft_service.pairs import DEMO

LIMITS = model_pb2.Limits(
    max_gamma=8,
    max_sequence_tokens=300,
    max_samples=4,
    max_stop_strings=2,
    max_stop_string_chars=9,
    max_stop_token_ids=3,
)
DRAFTERS: dict[str, Any] = {
    "drafters": (Kind.MODEL, Kind.LOOKUP, Kind.NONE),
    "default_drafter": Kind.MODEL,
}
RULES: dict[str, Any] = {
    "rules": [TOKENWISE, BLOCK, COUPLED],
    "default_rule": TOKENWISE,
}
DRAFT = model_pb2.ModelInfo(limits=LIMITS, features=["chat"], **RULES)
TARGET = model_pb2.ModelInfo(vocab_size=2048, eos_token_ids=[0, 9], weights_fingerprint="f" * 64, **RULES)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(ModelSource(str(DEMO / "draft")))


def check(
    tokenizer: Tokenizer, message: draft_service_pb2.GenerateRequest, gamma: int = 5, **of_target: Any
) -> Generation:
    target = model_pb2.ModelInfo()
    target.CopyFrom(TARGET)
    for name in of_target:
        target.ClearField(name)
    target.MergeFrom(model_pb2.ModelInfo(**of_target))
    return check_generate(
        message,
        tokenizer=tokenizer,
        draft=DRAFT,
        target=target,
        default_gamma=gamma,
        **DRAFTERS,
    )


def test_an_empty_request_takes_the_defaults(tokenizer: Tokenizer) -> None:
    checked = check(tokenizer, draft_service_pb2.GenerateRequest(text="x = 1"))
    assert (checked.max_new_tokens, checked.samples, checked.gamma) == (256, 1, 5)
    assert checked.sampling.law.temperature == 1.0
    assert (checked.top_logprobs, checked.time_limit) == (None, None)
    assert checked.prompt == tokenizer.encode("x = 1")
    assert 1 <= len(checked.request_id) <= 128


def test_the_default_length_is_what_the_context_leaves(tokenizer: Tokenizer) -> None:
    assert check(tokenizer, request([1] * 100)).max_new_tokens == 200
    assert check(tokenizer, request([1] * 299)).max_new_tokens == 1


def test_the_default_gamma_stays_within_the_verifiers_limit(tokenizer: Tokenizer) -> None:
    assert check(tokenizer, request(), gamma=12).gamma == 8
    assert check(tokenizer, request(gamma=0), gamma=12).gamma == 0


def test_the_rule_is_named_to_the_verifier_whatever_its_default(tokenizer: Tokenizer) -> None:
    checked = check(tokenizer, draft_service_pb2.GenerateRequest(text="x"))
    assert Sequence(checked).opening().sampling.rule == sampling_pb2.ACCEPTANCE_RULE_TOKENWISE


def _by_sigmoid(max_bytes: int, **fields: Any) -> tuple[draft_service_pb2.GenerateRequest, dict[str, Any]]:
    """A request by the rule `sigmoid`, and a pair of which the target takes messages of this size."""
    scales = sampling_pb2.SigmoidScales(alpha=-1, beta=1)
    params = sampling(1.0, rule=sampling_pb2.ACCEPTANCE_RULE_SIGMOID, sigmoid=scales)
    draft, target = model_pb2.ModelInfo(), model_pb2.ModelInfo()
    draft.CopyFrom(DRAFT)
    target.CopyFrom(TARGET)
    draft.limits.max_message_bytes = 1 << 20
    target.limits.max_message_bytes = max_bytes
    target.rules.append(sampling_pb2.ACCEPTANCE_RULE_SIGMOID)
    return request(sampling=params, **fields), {"draft": draft, "target": target}


def test_under_sigmoid_gamma_stays_within_what_a_message_holds(tokenizer: Tokenizer) -> None:
    room = bytes_with_logits(3, TARGET.vocab_size)
    for size, given, expected in ((room, None, 3), (room + 5000, None, 4), (room, 3, 3), (room, 0, 0), (500, 0, 0)):
        message, pair = _by_sigmoid(size, gamma=given)
        assert check_generate(message, tokenizer=tokenizer, default_gamma=5, **pair, **DRAFTERS).gamma == expected
    for size, given, numbers in ((room, 4, ("is 4: ", str(room), "for 3")), (500, None, ("is 1: ", "500", "for 0"))):
        message, pair = _by_sigmoid(size, gamma=given)
        with pytest.raises(RequestError) as caught:
            check_generate(message, tokenizer=tokenizer, default_gamma=5, **pair, **DRAFTERS)
        assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
        assert caught.value.metadata["field"] == "speculation.gamma"
        assert not [number for number in numbers if number not in caught.value.message], caught.value.message


def test_a_seed_is_chosen_afresh_where_none_is_given(tokenizer: Tokenizer) -> None:
    message = draft_service_pb2.GenerateRequest(text="x")
    seeds = {check(tokenizer, message).seed for _ in range(20)}
    assert len(seeds) == 20
    assert max(seeds) >= 2**32, "all 64 bits are used"


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({}, BLOCK),
        ({"seed": 0}, COUPLED),
        ({"seed": 1, "lenience": 1.0}, COUPLED),
        ({"seed": 1, "lenience": 0.9}, TOKENWISE),
        ({"lenience": 0.9}, TOKENWISE),
        ({"seed": 1, "rule": TOKENWISE}, TOKENWISE),
        ({"seed": 1, "rule": BLOCK}, BLOCK),
        ({"rule": COUPLED}, COUPLED),
    ],
)
def test_a_seed_without_a_rule_is_judged_by_coupled(
    tokenizer: Tokenizer, fields: dict[str, Any], rule: sampling_pb2.AcceptanceRule
) -> None:
    """Invariant 7. `BLOCK` stands for whatever the verifier's default is."""
    message = request(sampling=sampling(1.0, **fields))
    assert RULE_TO_WIRE[check(tokenizer, message, default_rule=BLOCK).sampling.rule] == rule


def test_a_seed_takes_the_default_where_the_target_does_not_judge_by_coupled(tokenizer: Tokenizer) -> None:
    message = request(sampling=sampling(1.0, seed=1))
    assert RULE_TO_WIRE[check(tokenizer, message, rules=[TOKENWISE]).sampling.rule] == TOKENWISE
    message.sampling.rule = COUPLED
    with pytest.raises(RequestError, match="rule coupled is not offered"):
        check(tokenizer, message, rules=[TOKENWISE])


def test_a_rule_of_the_target_that_this_service_does_not_draft_for_is_refused(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validation, "OFFERED_RULES", frozenset({Rule.TOKENWISE}))
    with pytest.raises(RequestError, match="rule block is not offered by this server; it offers tokenwise"):
        check(tokenizer, request(sampling=sampling(1.0, rule=BLOCK)))
    assert RULE_TO_WIRE[check(tokenizer, request(sampling=sampling(1.0, seed=1))).sampling.rule] == TOKENWISE


def test_samples_have_seeds_of_their_own_that_repeat(tokenizer: Tokenizer) -> None:
    checked = check(tokenizer, request(n=4))
    seeds = [checked.seed_of(sample) for sample in range(4)]
    assert seeds[0] == checked.seed == 1
    assert len(set(seeds)) == 4
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert [replace(checked, seed=1).seed_of(sample) for sample in range(4)] == seeds
    neighbours = [replace(checked, seed=2).seed_of(sample) for sample in range(4)]
    assert not set(neighbours) & set(seeds)


def test_stop_ids_kept_back_are_the_requests_and_the_targets(tokenizer: Tokenizer) -> None:
    rules = check(tokenizer, request(stop_token_ids=[7, 5], min_new_tokens=4)).sampling.logit_rules
    assert (rules.stop_token_ids, rules.min_new_tokens) == ((0, 5, 7, 9), 4)
    ignoring = check(tokenizer, request(stop_token_ids=[7], ignore_eos=True)).sampling.logit_rules
    assert ignoring.stop_token_ids == (7,)


def test_limits_are_the_services_own(tokenizer: Tokenizer) -> None:
    cases: list[tuple[str, dict[str, Any]]] = [
        ("9; at most 8", {"gamma": 9}),
        ("5; 1 to 4", {"n": 5}),
        ("3 strings; at most 2", {"stop": ["a", "b", "c"]}),
        ("10 characters; 1 to 9", {"stop": ["x" * 10]}),
        ("4 ids; at most 3", {"stop_token_ids": [1, 2, 3, 4]}),
        ("prompt of 100 tokens at most 200", {"prompt": [1] * 100, "max_new_tokens": 201}),
    ]
    for text, fields in cases:
        with pytest.raises(RequestError, match=text):
            check(tokenizer, request(**fields))


def test_what_is_too_long_by_its_bytes_is_not_tokenised(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    most = (LIMITS.max_sequence_tokens - 1) * tokenizer.longest_token_bytes
    assert check(tokenizer, request(" " * most, max_new_tokens=1)).prompt
    monkeypatch.setattr(tokenizer, "encode", lambda _: pytest.fail("it was tokenised"))
    with pytest.raises(RequestError) as caught:
        check(tokenizer, request(" " * (most + 1)))
    assert caught.value.metadata == {
        "field": "text",
        "given": str(most + 1),
        "maximum": str(most),
        "tokens": "299",
        "token_bytes": str(tokenizer.longest_token_bytes),
    }


def test_a_conversation_needs_a_template(tokenizer: Tokenizer) -> None:
    """The demo's own tokenizer has none."""
    said = draft_service_pb2.ChatMessage(role="user", content="hello")
    with pytest.raises(RequestError) as caught:
        check(tokenizer, request(chat=draft_service_pb2.ChatPrompt(messages=[said])))
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "NO_CHAT_TEMPLATE")


def test_a_fingerprint_must_be_the_targets(tokenizer: Tokenizer) -> None:
    assert check(tokenizer, request(weights_fingerprint="f" * 64)).weights_fingerprint == "f" * 64
    with pytest.raises(RequestError, match="PAIR_MISMATCH"):
        check(tokenizer, request(weights_fingerprint="e" * 64))
