"""From a request to a `CheckedRequest`: defaults, seeds, rules, policies. `test_bad_input` has the errors over gRPC."""

from typing import Any

import grpc
import pytest

from draft_service.request import CheckedRequest, PolicyKind
from draft_service.sequence import Sequence
from draft_service.settings import DraftSettings
from draft_service.validation import check_generate
from outrider.rpc.errors import RequestError
from outrider.runtime.loader import ModelSource
from outrider.runtime.tokenizer import Tokenizer, load_tokenizer
from outrider.service.sampling import RULE_TO_WIRE
from protos.outrider.v1 import draft_service_pb2, model_pb2, sampling_pb2
from tests.draft_service.calls import BLOCK, COUPLED, TOKENWISE, request, sampling
from tests.draft_service.pairs import DEMO, unserved_pair

LIMITS = model_pb2.Limits(max_gamma=8, max_sequence_tokens=300, max_samples=4, max_stop_token_ids=3)
RULES: dict[str, Any] = {"rules": [TOKENWISE, BLOCK, COUPLED], "default_rule": TOKENWISE}
DRAFT = model_pb2.ModelInfo(limits=LIMITS, features=["chat"], **RULES)
TARGET: dict[str, Any] = {"vocab_size": 2048, "eos_token_ids": [0, 9], "weights_fingerprint": "f" * 64, **RULES}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(ModelSource(str(DEMO / "draft")))


def check(
    tokenizer: Tokenizer,
    message: draft_service_pb2.GenerateRequest,
    target: dict[str, Any] | None = None,
    **options: Any,
) -> CheckedRequest:
    """Check a request. `target` replaces fields of `TARGET`; `options` are settings."""
    pair = unserved_pair(tokenizer, DRAFT, model_pb2.ModelInfo(**TARGET | (target or {})))
    return check_generate(
        message, pair, DraftSettings(**{"model": "demo", "gamma": 5, "speculation": "fixed", **options})
    )


def test_defaults_of_an_empty_request(tokenizer: Tokenizer) -> None:
    checked = check(tokenizer, draft_service_pb2.GenerateRequest(text="x = 1"))
    assert (checked.max_new_tokens, checked.samples, checked.speculation.gamma) == (256, 1, 5)
    assert checked.sampling.params.temperature == 1.0
    assert (checked.top_logprobs, checked.time_limit) == (None, None)
    assert checked.prompt == tokenizer.encode("x = 1")
    assert 1 <= len(checked.request_id) <= 128
    again = check(tokenizer, draft_service_pb2.GenerateRequest(text="x = 1"))
    assert checked.draft_sequence.seed != again.draft_sequence.seed
    assert Sequence(checked).opening().sampling.rule == TOKENWISE, "named, because verifiers may have other defaults"
    assert check(tokenizer, request([1] * 100)).max_new_tokens == 200, "the rest of the context"
    assert check(tokenizer, request(), gamma=12).speculation.gamma == 8, "the verifier's limit"


def test_prompt_length_limit_of_the_settings(tokenizer: Tokenizer) -> None:
    assert len(check(tokenizer, request([1] * 64), max_prompt_tokens=64).prompt) == 64
    with pytest.raises(
        RequestError, match="prompt has 65 tokens; at most 64: shorten it, or raise --max-prompt-tokens"
    ) as caught:
        check(tokenizer, request([1] * 65), max_prompt_tokens=64)
    assert caught.value.metadata["field"] == "prompt"


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({}, BLOCK),
        ({"seed": 0}, COUPLED),
        ({"seed": 1, "lenience": 0.9}, TOKENWISE),
        ({"lenience": 0.9}, TOKENWISE),
        ({"seed": 1, "rule": TOKENWISE}, TOKENWISE),
    ],
)
def test_a_seed_without_a_rule_gets_coupled(
    tokenizer: Tokenizer, fields: dict[str, Any], rule: sampling_pb2.AcceptanceRule
) -> None:
    """Invariant 7. `BLOCK` is the target's default here."""
    message = request(sampling=sampling(1.0, **fields))
    assert RULE_TO_WIRE[check(tokenizer, message, {"default_rule": BLOCK}).sampling.rule] == rule


def test_a_seed_gets_the_default_rule_if_the_target_lacks_coupled(tokenizer: Tokenizer) -> None:
    message = request(sampling=sampling(1.0, seed=1))
    assert RULE_TO_WIRE[check(tokenizer, message, {"rules": [TOKENWISE]}).sampling.rule] == TOKENWISE
    message.sampling.rule = COUPLED
    with pytest.raises(RequestError, match=r"sampling\.rule is coupled; this service offers tokenwise"):
        check(tokenizer, message, {"rules": [TOKENWISE]})


SEEDED = sampling(1.0, seed=1, rule=BLOCK)


@pytest.mark.parametrize(
    ("params", "speculation", "policy"),
    [
        (sampling(1.0), {}, PolicyKind.ADAPTIVE),
        (sampling(1.0), {"gamma": 3}, PolicyKind.FIXED),
        (sampling(1.0), {"policy": "SPECULATION_POLICY_FIXED"}, PolicyKind.FIXED),
        (sampling(1.0), {"gamma": 3, "policy": "SPECULATION_POLICY_HEURISTIC"}, PolicyKind.HEURISTIC),
        (SEEDED, {}, PolicyKind.FIXED),
        (SEEDED, {"policy": "SPECULATION_POLICY_ADAPTIVE"}, PolicyKind.ADAPTIVE),
        (sampling(1.0, seed=1, rule=TOKENWISE), {}, PolicyKind.FIXED),
        (sampling(1.0, seed=1, rule=COUPLED), {}, PolicyKind.ADAPTIVE),
        (sampling(0.0, seed=1, rule=TOKENWISE), {}, PolicyKind.ADAPTIVE),
    ],
)
def test_gamma_is_fixed_if_it_is_named_or_decides_the_text_of_a_seed(
    tokenizer: Tokenizer, params: sampling_pb2.SamplingParams, speculation: dict[str, Any], policy: PolicyKind
) -> None:
    message = request(sampling=params, speculation=draft_service_pb2.SpeculationParams(**speculation))
    assert check(tokenizer, message, speculation="adaptive").speculation.policy is policy


@pytest.mark.parametrize(("fields", "is_fresh"), [({}, True), ({"seed": 0}, False), ({"seed": 3}, False)])
def test_only_a_seed_that_the_service_draws_is_fresh(
    tokenizer: Tokenizer, fields: dict[str, Any], is_fresh: bool
) -> None:
    """Another request may have a given one, and be behind: then neither learns from the other."""
    message = request(sampling=sampling(1.0, rule=BLOCK, **fields))
    assert check(tokenizer, message).draft_sequence.seed_is_fresh is is_fresh


def test_stop_ids_that_min_new_tokens_bans(tokenizer: Tokenizer) -> None:
    rules = check(tokenizer, request(stop_token_ids=[7, 5], min_new_tokens=4)).sampling.logit_rules
    assert (rules.stop_token_ids, rules.min_new_tokens) == ((0, 5, 7, 9), 4)
    ignoring = check(tokenizer, request(stop_token_ids=[7], ignore_eos=True)).sampling.logit_rules
    assert ignoring.stop_token_ids == (7,)


def test_a_chat_prompt_without_a_template_is_refused(tokenizer: Tokenizer) -> None:
    """The demo's own tokenizer has no template."""
    turn = draft_service_pb2.ChatMessage(role="user", content="hello")
    with pytest.raises(RequestError) as caught:
        check(tokenizer, request(chat=draft_service_pb2.ChatPrompt(messages=[turn])))
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "NO_CHAT_TEMPLATE")
