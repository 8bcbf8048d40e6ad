"""vLLM's gRPC contract over a real socket, with a client of its own stubs: the same tokens as by our own contract."""

import hashlib
import io
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated import common_pb2
from transformers import AutoTokenizer

from draft_service.app import vllm_engine
from draft_service.service import DraftService
from draft_service.settings import DraftSettings
from draft_service.vllm_service import tokenizer_bundle
from outrider.cli.processes import Pair
from outrider.rpc.errors import RequestError, from_rpc_error
from outrider.service.metrics import Metrics
from outrider.service.settings import SettingsError
from outrider.service.tracing import Tracing
from protos.outrider.v1 import sampling_pb2
from tests.cluster import Service, wait_until
from tests.draft_service import calls, oracle
from tests.draft_service.calls import PROMPT
from tests.draft_service.pairs import DEMO
from tests.draft_service.vllm_calls import (
    CLIENT_SEQUENCES,
    MESSAGE_BYTES,
    SECOND,
    channel_of,
    collect,
    generate,
    one,
    request,
    stub,
)
from tests.verifier_service.streams import TIMEOUT

IDS = oracle.encode(PROMPT)
TOKENS = 24
LIVELY: dict[str, Any] = {"temperature": 1.0, "seed": 5, "max_tokens": TOKENS, "ignore_eos": True}


@pytest.fixture(scope="module")
def draft(vllm_pair: Pair) -> Service:
    assert isinstance(vllm_pair.draft, Service)
    return vllm_pair.draft


@pytest.fixture(scope="module")
def channel(draft: Service) -> Iterator[grpc.Channel]:
    with channel_of(draft) as channel:
        yield channel


def ours(channel: grpc.Channel, *, n: int = 1, top: int | None = None, **params: Any) -> list[calls.Sample]:
    """The samples of the same request, by our own contract."""
    sampling = sampling_pb2.SamplingParams(**{"temperature": 1.0, "seed": 5} | params)
    logprobs = None if top is None else sampling_pb2.LogprobsParams(top_n=top)
    fields: dict[str, Any] = {"sampling": sampling, "logprobs": logprobs, "n": n}
    message = calls.request(IDS, max_new_tokens=TOKENS, ignore_eos=True, **fields)
    return calls.generate(channel, message).samples


# --------------------------------------------------------------------------------------------------------- generation


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_and_counts_of_a_greedy_text(channel: grpc.Channel, stream: bool) -> None:
    output = one(channel, IDS, stream=stream, temperature=0, max_tokens=TOKENS, ignore_eos=True)
    end = output.complete
    assert output.ids == oracle.greedy(IDS, TOKENS)
    assert output.streamed == (output.ids if stream else [])
    assert (end.finish_reason, end.prompt_tokens, end.completion_tokens) == ("length", len(IDS), TOKENS)
    assert end.WhichOneof("matched_stop") is None
    assert 0 < end.spec_accepted_tokens <= end.spec_draft_tokens
    assert sum(chunk.completion_tokens for chunk in output.chunks) == (TOKENS if stream else 0)
    assert {chunk.prompt_tokens for chunk in output.chunks} <= {len(IDS)}


@pytest.mark.parametrize("stream", [False, True])
def test_each_sample_is_that_of_our_own_contract(channel: grpc.Channel, stream: bool) -> None:
    outputs = generate(channel, IDS, stream=stream, n=3, **LIVELY)
    assert [output.ids for output in outputs] == [sample.ids for sample in ours(channel, n=3)]
    assert len({tuple(output.ids) for output in outputs}) == 3
    assert all(output.streamed == (output.ids if stream else []) for output in outputs)


def test_a_temperature_that_is_not_set_is_one_and_a_negative_seed_is_a_seed(channel: grpc.Channel) -> None:
    fields = LIVELY | {"seed": -7}
    expected = [sample.ids for sample in ours(channel, seed=2**64 - 7)]
    assert [one(channel, IDS, **fields).ids] == expected
    del fields["temperature"]
    assert [one(channel, IDS, **fields).ids] == expected


SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.5},
    {"top_p": 0.3},
    {"top_k": 2},
    {"min_p": 0.5},
    {"frequency_penalty": 2.0},
    {"presence_penalty": 2.0},
    {"repetition_penalty": 2.0},
)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: next(iter(setting)))
def test_sampling_parameters_reach_the_target(channel: grpc.Channel, setting: dict[str, Any]) -> None:
    output = one(channel, IDS, **LIVELY | setting)
    assert [output.ids] == [sample.ids for sample in ours(channel, **setting)]
    assert output.ids != one(channel, IDS, **LIVELY).ids, "it changes this text"


def test_zeros_of_top_p_n_and_repetition_penalty_are_unset(channel: grpc.Channel) -> None:
    explicit = one(channel, IDS, top_p=1.0, n=1, repetition_penalty=1.0, **LIVELY)
    assert one(channel, IDS, top_p=0.0, n=0, repetition_penalty=0.0, **LIVELY).ids == explicit.ids


def test_logit_bias(channel: grpc.Channel) -> None:
    first = one(channel, IDS, **LIVELY).ids[0]
    assert one(channel, IDS, logit_bias={first: -100.0, 7: 0.0}, **LIVELY).ids[0] != first
    assert one(channel, IDS, logit_bias={9: 100.0}, **LIVELY).ids == [9] * TOKENS


def test_end_of_sequence_ends_a_text_from_min_tokens_on(channel: grpc.Channel) -> None:
    """A stop token is named only if the request had named it, as by vLLM itself."""
    eos = stub(channel).GetModelInfo(vllm.GetModelInfoRequest()).eos_token_ids[0]
    fields = {"temperature": 0, "max_tokens": TOKENS, "logit_bias": {eos: 100.0}}
    output = one(channel, IDS, **fields)
    assert (output.ids, output.complete.finish_reason) == ([eos], "stop")
    assert output.complete.WhichOneof("matched_stop") is None
    later = one(channel, IDS, min_tokens=4, **fields)
    assert later.ids[4:] == [eos]
    assert eos not in later.ids[:4]


def test_a_stop_token_is_the_last_token_and_is_named(channel: grpc.Channel) -> None:
    whole = oracle.greedy(IDS, TOKENS)
    output = one(channel, IDS, temperature=0, max_tokens=TOKENS, stop_token_ids=[whole[6]])
    assert output.ids == whole[: whole.index(whole[6]) + 1]
    assert (output.complete.finish_reason, output.complete.matched_token_id) == ("stop", whole[6])


@pytest.mark.parametrize("stream", [False, True])
def test_the_tokens_of_a_stop_string_are_there_and_no_others(channel: grpc.Channel, stream: bool) -> None:
    """The client has to cut the text, so it needs the token in which the stop string ends."""
    whole = oracle.greedy(IDS, TOKENS)
    text = oracle.decode(IDS + whole)[len(PROMPT) :]
    stop = text[len(text) // 2 - 2 : len(text) // 2 + 2]
    output = one(channel, IDS, stream=stream, temperature=0, max_tokens=TOKENS, stop=["\x00", stop])
    end = output.complete
    assert (end.finish_reason, end.matched_stop_str, end.completion_tokens) == ("stop", stop, len(output.ids))
    assert output.ids == whole[: len(output.ids)]
    assert output.streamed == (output.ids if stream else [])
    written = [
        oracle.decode(IDS + output.ids[:count])[len(PROMPT) :] for count in (len(output.ids) - 1, len(output.ids))
    ]
    assert [stop in each for each in written] == [False, True]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("top", [0, 3])
def test_log_probabilities_are_the_targets_own(channel: grpc.Channel, top: int, stream: bool) -> None:
    colder: dict[str, Any] = {"temperature": 0.5}  # at 1 the adjusted ones are the same
    output = one(channel, IDS, stream=stream, logprobs=top, **LIVELY | colder)
    found = output.streamed_logprobs() if stream else output.complete.output_logprobs
    assert output.complete.HasField("output_logprobs") != stream
    (sample,) = ours(channel, top=top, **colder)
    assert list(found.token_ids) == output.ids == sample.ids
    assert list(found.token_logprobs) == pytest.approx([each.token.raw for each in sample.logprobs], abs=1e-5)
    assert [list(each.token_ids) for each in found.top_logprobs] == [
        [token.token_id for token in each.top] for each in sample.logprobs
    ]
    ranked = [pytest.approx([token.raw for token in each.top], abs=1e-5) for each in sample.logprobs]
    assert [list(each.values) for each in found.top_logprobs] == ranked
    assert {len(each.values) for each in found.top_logprobs} == {top}
    assert not one(channel, IDS, **LIVELY).complete.HasField("output_logprobs")


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_the_prompt(channel: grpc.Channel, stream: bool) -> None:
    """The first token has none. A stream has them in the first chunk of each sample."""
    outputs = generate(channel, IDS, stream=stream, prompt_logprobs=2, n=2, **LIVELY)
    expected = oracle.logits(IDS)[:-1].log_softmax(-1)
    for output in outputs:
        found = (output.chunks[0] if stream else output.complete).input_logprobs
        first, *later = found.token_logprobs
        assert not first.HasField("value")
        assert list(found.token_ids) == IDS
        own = expected.gather(1, torch.tensor(IDS[1:])[:, None])[:, 0]
        assert [each.value for each in later] == pytest.approx(own.tolist(), abs=1e-4)
        assert [list(each.token_ids) for each in found.top_logprobs] == [[], *expected.topk(2).indices.tolist()]
        others = [*output.chunks[1:], *([output.complete] if stream else [])]
        assert not any(part.HasField("input_logprobs") for part in others)


def test_log_probabilities_that_no_message_can_hold_are_refused(channel: grpc.Channel) -> None:
    prompt = (IDS * 100)[:900]
    with pytest.raises(grpc.RpcError) as caught:
        one(channel, prompt, prompt_logprobs=20, max_tokens=1)
    error = from_rpc_error(caught.value)
    assert (error.code, error.metadata["field"]) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "sampling_params.prompt_logprobs",
    )
    assert int(error.metadata["given"]) > int(error.metadata["maximum"]) == MESSAGE_BYTES


@pytest.mark.parametrize(("left", "max_tokens"), [(258, {}), (3, {"max_tokens": 4000})], ids=["unset", "beyond"])
def test_a_text_ends_with_the_context(channel: grpc.Channel, left: int, max_tokens: dict[str, int]) -> None:
    longest = stub(channel).GetModelInfo(vllm.GetModelInfoRequest()).max_context_length
    prompt = (IDS * longest)[: longest - left]
    output = one(channel, prompt, temperature=0, ignore_eos=True, **max_tokens)
    assert (len(output.ids), output.complete.finish_reason) == (left, "length")


def test_a_prompt_may_be_text(channel: grpc.Channel) -> None:
    params = vllm.SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    message = vllm.GenerateRequest(text=PROMPT, sampling_params=params)
    (output,) = collect(stub(channel).Generate(message, timeout=TIMEOUT))
    assert output.ids == oracle.greedy(IDS, TOKENS)


def test_a_prompt_is_cached_and_counted(channel: grpc.Channel) -> None:
    prompt = IDS * 8
    for _ in range(2):
        end = one(channel, prompt, temperature=0, max_tokens=1).complete
    assert 0 < end.cached_tokens < end.prompt_tokens == len(prompt)


# ----------------------------------------------------------------------------------------------------------- refusals


def _params(**params: Any) -> Any:
    return request(IDS, **params)


def _with(**fields: Any) -> Any:
    message = request(IDS)
    message.MergeFrom(vllm.GenerateRequest(**fields))
    return message


REFUSED: tuple[tuple[str, Any], ...] = (
    ("sampling_params.json_schema", _params(json_schema="{}")),
    ("sampling_params.regex", _params(regex="a*")),
    ("sampling_params.choice", _params(choice=vllm.ChoiceConstraint(choices=["a"]))),
    ("sampling_params.truncate_prompt_tokens", _params(truncate_prompt_tokens=3)),
    ("sampling_params.logprobs", _params(logprobs=-1)),
    ("sampling_params.logprobs", _params(logprobs=21)),
    ("sampling_params.prompt_logprobs", _params(prompt_logprobs=-1)),
    ("sampling_params.temperature", _params(temperature=-1)),
    ("sampling_params.top_p", _params(top_p=1.5)),
    ("sampling_params.top_k", _params(top_k=2**31)),
    ("sampling_params.repetition_penalty", _params(repetition_penalty=1000)),
    ("sampling_params.logit_bias", _params(logit_bias={-1: 1.0})),
    ("sampling_params.logit_bias", _params(logit_bias={1: 101.0})),
    ("sampling_params.max_tokens", _params(max_tokens=0)),
    ("sampling_params.min_tokens", _params(max_tokens=2, min_tokens=3)),
    ("sampling_params.stop", _params(stop=list("abcd"))),
    ("sampling_params.stop[1]", _params(stop=["a", ""])),
    ("sampling_params.stop_token_ids", _params(stop_token_ids=[9999])),
    ("sampling_params.n", _params(n=99)),
    ("sampling_params.n", _params(n=CLIENT_SEQUENCES + 1)),
    ("tokenized", vllm.GenerateRequest()),
    ("tokenized.input_ids", request([5, 9999])),
    ("tokenized.input_ids", request([])),
    ("tokenized.input_ids", request(IDS * 1000)),
    ("request_id", request(IDS, request_id="x" * 200)),
    ("kv_transfer_params_json", _with(kv_transfer_params_json="{}")),
    ("mm_inputs", _with(mm_inputs=vllm.MultimodalInputs())),
    ("data_parallel_rank", _with(data_parallel_rank=1)),
)


@pytest.mark.parametrize(("name", "message"), REFUSED, ids=[name for name, _ in REFUSED])
def test_what_cannot_be_carried_is_refused_by_name(channel: grpc.Channel, name: str, message: Any) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        collect(stub(channel).Generate(message, timeout=TIMEOUT))
    error = from_rpc_error(caught.value)
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert error.metadata["field"] == name
    assert name.partition("[")[0] in error.message or "the prompt has" in error.message
    for own in ("sampling.", "token_ids.ids", "new_tokens", "top_n"):
        assert own not in error.message.replace("stop_token_ids", "")


def test_a_field_of_a_later_contract_is_refused_by_number(channel: grpc.Channel) -> None:
    newer = b"\xba\x3e\x01a"  # field 999 of the request
    message = vllm.GenerateRequest.FromString(request(IDS).SerializeToString() + newer)
    with pytest.raises(grpc.RpcError, match="999"):
        collect(stub(channel).Generate(message, timeout=TIMEOUT))


def test_the_first_rank_is_the_only_one(channel: grpc.Channel) -> None:
    message = _with(data_parallel_rank=0)
    message.sampling_params.max_tokens = 1
    assert len(collect(stub(channel).Generate(message, timeout=TIMEOUT))) == 1


# -------------------------------------------------------------------------------------------------------------- abort

LONG: dict[str, Any] = {"temperature": 1.0, "max_tokens": 900, "ignore_eos": True}


@pytest.mark.parametrize("stream", [False, True])
def test_abort_ends_the_callers_own_request_with_what_it_has(
    draft: Service, channel: grpc.Channel, stream: bool
) -> None:
    call = stub(channel).Generate(request(IDS, stream=stream, request_id="long", n=2, **LONG), timeout=TIMEOUT)
    wait_until(lambda: stub(channel).GetServerInfo(vllm.GetServerInfoRequest()).active_requests == 2)
    first = next(call) if stream else None
    with channel_of(draft, SECOND) as other:
        stub(other).Abort(vllm.AbortRequest(request_ids=["long"]))
    assert stub(channel).GetServerInfo(vllm.GetServerInfoRequest()).active_requests == 2, "of another caller"
    stub(channel).Abort(vllm.AbortRequest(request_ids=["no such request", "", "long"]))
    outputs = collect(call)
    assert [output.complete.finish_reason for output in outputs] == ["abort"] * 2
    assert all(output.complete.completion_tokens == len(output.ids) < 900 for output in outputs)
    if first is not None:
        outputs[first.chunk.index].chunks.insert(0, first.chunk)
        assert all(output.streamed == output.ids for output in outputs)
    wait_until(lambda: not stub(channel).GetServerInfo(vllm.GetServerInfoRequest()).active_requests)


def test_a_client_that_leaves_ends_its_request(draft: Service, channel: grpc.Channel) -> None:
    call = stub(channel).Generate(request(IDS, stream=True, request_id="left", **LONG), timeout=TIMEOUT)
    next(call)
    call.cancel()
    wait_until(lambda: not stub(channel).GetServerInfo(vllm.GetServerInfoRequest()).active_requests)
    lines = wait_until(lambda: [line for line in draft.logged("generate") if line["request_id"] == "left"])
    assert [line["status"] for line in lines] == ["CANCELLED"]
    assert not draft.plain_lines()


# -------------------------------------------------------------------------------------------------------- information


def test_health_by_both_contracts(draft: Service, channel: grpc.Channel) -> None:
    assert stub(channel).HealthCheck(vllm.HealthCheckRequest()).healthy
    with grpc.insecure_channel(draft.address) as plain:  # probes have no token
        standard = health_pb2_grpc.HealthStub(plain)
        answer = standard.Check(health_pb2.HealthCheckRequest(service="vllm.grpc.engine.VllmEngine"))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as caught:
            stub(plain).HealthCheck(vllm.HealthCheckRequest())
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_model_and_server_information(channel: grpc.Channel) -> None:
    model = stub(channel).GetModelInfo(vllm.GetModelInfoRequest())
    assert (model.served_model_name, model.is_generation) == ("target", True)
    assert (model.model_path, model.tokenizer_path) == (str(DEMO / "target"), str(DEMO / "draft"))
    assert (model.vocab_size, list(model.eos_token_ids)) == (2048, [0])
    assert model.max_req_input_len == model.max_context_length - 1
    server = stub(channel).GetServerInfo(vllm.GetServerInfoRequest())
    assert (server.server_type, server.data_parallel_size, server.is_paused) == ("outrider", 1, False)
    assert server.uptime_seconds > 0
    assert server.last_receive_timestamp > 1.7e9


def test_the_tokenizer_comes_as_an_archive(channel: grpc.Channel, tmp_path: Path) -> None:
    parts = list(stub(channel).GetTokenizer(common_pb2.GetTokenizerRequest(), timeout=TIMEOUT))
    data = b"".join(part.data for part in parts)
    assert [part.sha256 for part in parts] == [""] * (len(parts) - 1) + [hashlib.sha256(data).hexdigest()]
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path)
    assert {"tokenizer.json", "tokenizer_config.json"} <= set(names)
    assert not any("/" in name or name.endswith(".safetensors") for name in names)
    assert AutoTokenizer.from_pretrained(tmp_path).encode(PROMPT) == IDS


def test_a_gguf_file_has_no_tokenizer_files(tmp_path: Path) -> None:
    given: dict[str, Any] = {"model": str(tmp_path / "model.gguf")}
    Path(given["model"]).touch()
    with pytest.raises(RequestError, match=r"model\.gguf is a GGUF file; give the client") as caught:
        tokenizer_bundle(DraftSettings(**given))
    assert caught.value.code is grpc.StatusCode.FAILED_PRECONDITION


def test_the_tokenizer_is_no_sequence_of_its_client(channel: grpc.Channel) -> None:
    """Gateways ask for it when they start, or for each request."""
    call = stub(channel).Generate(request(IDS, stream=True, n=CLIENT_SEQUENCES, **LONG), timeout=TIMEOUT)
    try:
        next(call)
        assert list(stub(channel).GetTokenizer(common_pb2.GetTokenizerRequest(), timeout=TIMEOUT))
        with pytest.raises(grpc.RpcError) as caught:
            generate(channel, IDS, max_tokens=1)
        assert from_rpc_error(caught.value).metadata["limit"] == "max-client-sequences"
    finally:
        call.cancel()


def test_other_calls_are_not_offered(channel: grpc.Channel) -> None:
    engine = stub(channel)
    for name, call in (
        ("Embed", lambda: engine.Embed(vllm.EmbedRequest())),
        ("SubscribeKvEvents", lambda: list(engine.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest()))),
    ):
        with pytest.raises(grpc.RpcError, match=name) as caught:
            call()
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_without_the_stubs_the_flag_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "smg_grpc_proto", None)
    monkeypatch.delitem(sys.modules, "draft_service.vllm_service", raising=False)
    settings = DraftSettings.from_command_line(["--model", str(DEMO / "draft"), "--vllm-grpc"], program="draft")
    with pytest.raises(
        SettingsError, match=r"^--vllm-grpc needs the package smg-grpc-proto \(pip install .*\): [^\n]+$"
    ):
        vllm_engine(settings, DraftService(settings, Metrics(), Tracing()))


def test_without_the_flag_there_is_no_such_service(demo_pair: Pair) -> None:
    with grpc.insecure_channel(demo_pair.address) as plain, pytest.raises(grpc.RpcError) as caught:
        stub(plain).HealthCheck(vllm.HealthCheckRequest())
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
