"""What a request becomes: defaults, seeds, and what the model's files decide. Errors over gRPC: `test_bad_input`."""

from typing import Any

import grpc
import pytest

from draft_service.drafters.base import Kind
from draft_service.request import Generation
from draft_service.sequence import Sequence
from draft_service.settings import DraftSettings
from draft_service.validation import check_generate
from outrider.rpc.errors import RequestError
from outrider.runtime.loader import ModelSource
from outrider.runtime.tokenizer import Tokenizer, load_tokenizer
from outrider.service.sampling import RULE_TO_WIRE
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
DRAFTERS: dict[str, Any] = {"drafters": (Kind.MODEL, Kind.LOOKUP, Kind.NONE), "default_drafter": Kind.MODEL}
RULES: dict[str, Any] = {"rules": [TOKENWISE, BLOCK, COUPLED], "default_rule": TOKENWISE}
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
    return check_generate(message, tokenizer=tokenizer, draft=DRAFT, target=target, default_gamma=gamma, **DRAFTERS)


def test_an_empty_request_takes_the_defaults(tokenizer: Tokenizer) -> None:
    checked = check(tokenizer, draft_service_pb2.GenerateRequest(text="x = 1"))
    assert (checked.max_new_tokens, checked.samples, checked.gamma) == (256, 1, 5)
    assert checked.sampling.params.temperature == 1.0
    assert (checked.top_logprobs, checked.time_limit) == (None, None)
    assert checked.prompt == tokenizer.encode("x = 1")
    assert 1 <= len(checked.request_id) <= 128
    assert checked.seed != check(tokenizer, draft_service_pb2.GenerateRequest(text="x = 1")).seed
    assert Sequence(checked).opening().sampling.rule == TOKENWISE, "the rule is named, whatever the default there"
    assert check(tokenizer, request([1] * 100)).max_new_tokens == 200, "what the context leaves"
    assert check(tokenizer, request(), gamma=12).gamma == 8, "the verifier's limit"


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


def test_stop_ids_kept_back_are_the_requests_and_the_targets(tokenizer: Tokenizer) -> None:
    rules = check(tokenizer, request(stop_token_ids=[7, 5], min_new_tokens=4)).sampling.logit_rules
    assert (rules.stop_token_ids, rules.min_new_tokens) == ((0, 5, 7, 9), 4)
    ignoring = check(tokenizer, request(stop_token_ids=[7], ignore_eos=True)).sampling.logit_rules
    assert ignoring.stop_token_ids == (7,)


def test_a_conversation_needs_a_template(tokenizer: Tokenizer) -> None:
    """The demo's own tokenizer has none."""
    said = draft_service_pb2.ChatMessage(role="user", content="hello")
    with pytest.raises(RequestError) as caught:
        check(tokenizer, request(chat=draft_service_pb2.ChatPrompt(messages=[said])))
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "NO_CHAT_TEMPLATE")


def verifiers(*flags: str) -> tuple[str, ...]:
    settings = DraftSettings.from_command_line(["--model", "m", *flags], program="draft_service")
    found: tuple[str, ...] = settings.verifier
    return found


def test_verifiers_are_named_by_flags_or_the_environment_and_each_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verifiers("--verifier", "a:1, b:2", "--verifier", "c:3,a:1") == ("a:1", "b:2", "c:3")
    monkeypatch.setenv("OUTRIDER_VERIFIER", "a:1,[::1]:2")
    assert verifiers() == ("a:1", "[::1]:2")
    assert verifiers("--verifier", "c:3") == ("c:3",)
    with pytest.raises(SystemExit):
        verifiers("--verifier", "a:1,b")
    assert "'b' is not HOST:PORT" in capsys.readouterr().err
