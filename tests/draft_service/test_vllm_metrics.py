"""Metrics under vLLM's names, scraped from both services over HTTP, against the statistics of requests."""

import asyncio
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from prometheus_client import Counter, Gauge, Histogram, generate_latest
from smg_grpc_proto import vllm_engine_pb2 as vllm

from draft_service.metrics import cache_config
from draft_service.replicas import Replica
from outrider.cli.processes import Pair
from outrider.service.metrics import Metrics, VllmMetrics
from protos.outrider.v1 import model_pb2
from tests.cluster import Service, wait_until
from tests.draft_service import calls
from tests.draft_service.verifiers import connect
from tests.draft_service.vllm_calls import VERIFIER_SEQUENCES, channel_of, request, stub
from tests.metrics import parse
from tests.verifier_service.streams import TIMEOUT

MODEL = {"model_name": "target"}
LOAD = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
COUNTERS = tuple(f"spec_decode_num_{name}_total" for name in ("drafts", "draft_tokens", "accepted_tokens"))
BY_POSITION = "spec_decode_num_accepted_tokens_per_pos_total"
HISTOGRAMS = ("time_to_first_token_seconds", "inter_token_latency_seconds")
GAMMA = 3


@pytest.fixture(scope="module")
def services(vllm_pair: Pair) -> tuple[Service, Service]:
    """The draft service and the verifier."""
    assert isinstance(vllm_pair.draft, Service)
    assert isinstance(vllm_pair.verifier, Service)
    return vllm_pair.draft, vllm_pair.verifier


@pytest.fixture(scope="module")
def channel(services: tuple[Service, Service]) -> Iterator[grpc.Channel]:
    with channel_of(services[0]) as channel:
        yield channel


def value(service: Service, name: str, **labels: str) -> float:
    return service.count(f"vllm:{name}", **MODEL, **labels)


def test_names_are_there(services: tuple[Service, Service]) -> None:
    draft, verifier = (service.samples() for service in services)
    key = tuple(MODEL.items())
    for samples in (draft, verifier):
        assert all(list(samples[f"vllm:{name}"]) == [key] for name in (*LOAD, *COUNTERS))
    assert all(list(draft[f"vllm:{name}_count"]) == [key] for name in HISTOGRAMS)
    blocks = int(services[1].count("outrider_kv_blocks"))
    sizes = {**MODEL, "block_size": "32", "num_gpu_blocks": str(blocks)}
    for samples in (draft, verifier):  # the draft service shows those of its verifiers
        assert samples["vllm:cache_config_info"] == {tuple(sorted(sizes.items())): 1}


def test_kv_caches_of_ready_verifiers_add_up() -> None:
    async def sizes() -> list[dict[str, str]]:
        verifiers = [Replica(f"127.0.0.1:{port}", connect(f"127.0.0.1:{port}"), timeout=1.0) for port in range(1, 5)]
        assert [each.samples for each in cache_config(verifiers)] == [[]], "none has answered"
        for replica, blocks in zip(verifiers, (100, 20, 3, 0), strict=True):  # the last one is older
            replica.model = model_pb2.ModelInfo(limits=model_pb2.Limits(kv_blocks=blocks, kv_block_tokens=32))
        verifiers[2].mismatch = "another vocabulary"
        (family,) = cache_config(verifiers)
        return [sample.labels for sample in family.samples]

    assert asyncio.run(sizes()) == [{"block_size": "32", "num_gpu_blocks": "120"}]


def test_counters_of_both_grow_by_the_statistics_of_a_request(
    services: tuple[Service, Service], channel: grpc.Channel
) -> None:
    def totals(service: Service) -> list[float]:
        positions = [value(service, BY_POSITION, position=str(index)) for index in range(GAMMA)]
        return [*(value(service, name) for name in COUNTERS), *positions]

    def observed() -> list[float]:
        return [value(services[0], f"{name}_count") for name in HISTOGRAMS]

    before, observed_before = [totals(service) for service in services], observed()
    expected = [0.0] * (len(COUNTERS) + GAMMA)
    for rule in ("TOKENWISE", "COUPLED"):
        params = calls.sampling(1.0, seed=3, rule=f"ACCEPTANCE_RULE_{rule}")
        sample = calls.write(channel, gamma=GAMMA, sampling=params, max_new_tokens=20, ignore_eos=True)
        counts = sample.end.statistics
        of_text = [counts.num_drafts, counts.num_draft_tokens, counts.num_accepted_tokens]
        of_text += counts.num_accepted_tokens_per_pos
        expected = [a + b for a, b in zip(expected, of_text, strict=True)]
    assert 0 < expected[2] < expected[1]
    # A verdict is sent a moment before the verifier counts it.
    for service, start in zip(services, before, strict=True):
        wait_until(lambda service=service, start=start: grown(start, totals(service)) == expected)  # type: ignore[misc]
    firsts, others = grown(observed_before, observed())
    assert firsts == 2
    assert 20 < others < 40, "tokens that come with the first one have no time between them"
    for name in HISTOGRAMS:
        for suffix in ("sum", "count"):
            assert value(services[0], f"{name}_{suffix}") == services[0].count(f"outrider_{name}_{suffix}") > 0


def grown(before: list[float], now: list[float]) -> list[float]:
    return [b - a for a, b in zip(before, now, strict=True)]


def test_a_draft_shows_the_load_of_its_verifiers(services: tuple[Service, Service], channel: grpc.Channel) -> None:
    """One sequence more than the verifier runs: it waits there, so the draft service's own queue is empty."""
    draft, verifier = services
    params: dict[str, Any] = {"temperature": 1.0, "max_tokens": 900, "ignore_eos": True}
    long = [
        stub(channel).Generate(request([7, 8, 9] * 20, stream=True, **params), timeout=TIMEOUT)
        for _ in range(VERIFIER_SEQUENCES + 1)
    ]
    try:
        expected = [VERIFIER_SEQUENCES + 1.0, 1.0]
        wait_until(lambda: [value(draft, name) for name in LOAD[:2]] == expected)
        assert value(verifier, "num_requests_waiting") == 1
        assert value(verifier, "num_requests_running") == VERIFIER_SEQUENCES
        assert draft.count("outrider_num_requests_queued") == 0
        loads = stub(channel).GetLoads(vllm.GetLoadsRequest())
        (load,) = loads.loads
        assert (load.num_running_reqs, load.num_waiting_reqs) == (VERIFIER_SEQUENCES + 1, 1)
        used, own = value(verifier, "kv_cache_usage_perc"), value(draft, "kv_cache_usage_perc")
        assert 0 < own <= 1
        assert own == pytest.approx(used, rel=0.5), "it grows with the texts"
        assert load.token_usage == pytest.approx(used, rel=0.5)
        assert not stub(channel).GetLoads(vllm.GetLoadsRequest(dp_rank=1)).loads
    finally:
        for call in long:
            call.cancel()
    wait_until(lambda: value(draft, "num_requests_running") == value(verifier, "num_requests_running") == 0)


def test_without_the_flag_there_are_none(demo_pair: Pair) -> None:
    for service in (demo_pair.draft, demo_pair.verifier):
        assert isinstance(service, Service)
        assert not [name for name in service.samples() if name.startswith("vllm:")]


def test_a_second_name_sums_over_labels_that_are_not_kept() -> None:
    metrics = Metrics()
    shown = VllmMetrics(metrics.registry, "a model")
    tokens = Counter("own_tokens", "Tokens.", ("rule", "position"), registry=metrics.registry)
    seconds = Histogram("own_seconds", "Seconds.", ("phase",), buckets=(1.0, 2.0), registry=metrics.registry)
    shown.add("tokens", tokens)
    shown.add("tokens_per_pos", tokens, "position")
    shown.add("seconds", seconds)
    shown.gauge("level", "A level.", lambda: 0.25)
    shown.add("info", Gauge("info", "Sizes.", registry=None))
    assert 'vllm:tokens_total{model_name="a model"} 0.0' in generate_latest(metrics.registry).decode()
    for rule, position, count in (("one", "0", 1), ("other", "0", 2), ("other", "1", 4)):
        tokens.labels(rule, position).inc(count)
    for phase, took in (("first", 0.5), ("second", 1.5), ("second", 3.0)):
        seconds.labels(phase).observe(took)
    found = parse(generate_latest(metrics.registry).decode())
    model = ("model_name", "a model")
    assert found["vllm:tokens_total"] == {(model,): 7}
    assert found["vllm:tokens_per_pos_total"] == {(model, ("position", "0")): 3, (model, ("position", "1")): 4}
    buckets = {dict(labels)["le"]: count for labels, count in found["vllm:seconds_bucket"].items()}
    assert buckets == {"1.0": 1, "2.0": 2, "+Inf": 3}
    assert (found["vllm:seconds_count"], found["vllm:seconds_sum"]) == ({(model,): 3}, {(model,): 5})
    assert found["vllm:level"] == {(model,): 0.25}
