"""Metrics of the front: its texts, under its own names and under vLLM's, against the usage of the answers."""

import re
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from outrider.client import Queued
from outrider.http.metrics import FrontMetrics
from outrider.service.metrics import Times
from tests.cluster import Service, wait_until
from tests.metrics import Samples, parse
from tests.outrider.http.conftest import events, plain, running_front
from tests.project.tree import ROOT

MODEL = (("model_name", "target"),)
BODY: dict[str, Any] = {"prompt": "def area(radius):", "max_tokens": 20, "ignore_eos": True, "seed": 4}
TIMES = ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds")
SPECULATION = tuple(f"spec_decode_num_{name}_total" for name in ("drafts", "draft_tokens", "accepted_tokens"))
COUNTERS = ("prompt_tokens_total", "generation_tokens_total", *SPECULATION)


@pytest.fixture
def url(chat_draft: Service) -> Iterator[str]:
    with running_front(chat_draft.address, vllm_metrics=True) as url:
        yield url


def scraped(url: str) -> Samples:
    return parse(plain.get(f"{url}/metrics").text)


def value(url: str, name: str) -> float:
    return scraped(url)[f"vllm:{name}"][MODEL]


def test_names_are_there_before_the_first_request(url: str) -> None:
    found = scraped(url)
    names = [*COUNTERS, "num_requests_running", "num_requests_waiting", *(f"{name}_count" for name in TIMES)]
    assert {name: found[f"vllm:{name}"] for name in names} == {name: {MODEL: 0} for name in names}


def test_the_page_has_all_of_our_names(url: str) -> None:
    plain.get(f"{url}/health")
    kinds = re.findall(r"^# TYPE (outrider_\w+) ", plain.get(f"{url}/metrics").text, re.MULTILINE)
    page = (ROOT / "docs" / "how-to" / "openai.md").read_text(encoding="utf-8")
    table = page.partition("\n## Metrics\n")[2].partition("\n## ")[0]
    written = re.findall(r"`(outrider_\w+)", "".join(line for line in table.splitlines() if line.startswith("|")))
    assert sorted(kinds) == sorted(written)


def test_counts_are_those_of_the_answers(url: str, chat_draft: Service) -> None:
    latency = "outrider_inter_token_latency_seconds_sum"
    before = chat_draft.count(latency)
    answers = [plain.post(f"{url}/v1/completions", json=BODY | more).json() for more in ({}, {"n": 2}, {"stop": "\n"})]
    found = scraped(url)
    assert len(answers[1]["choices"]) == 2

    def total(*path: str) -> float:
        return sum(_at(answer, path) for answer in answers)

    speculation = ("metrics", "speculative_decoding")
    accepted = total(*speculation, "num_accepted_draft_tokens")
    drafted = (total(*speculation, "num_spec_steps"), total(*speculation, "num_draft_tokens"), accepted)
    expected = {"prompt_tokens_total": total("usage", "prompt_tokens"), **dict(zip(SPECULATION, drafted, strict=True))}
    assert {name: found[f"vllm:{name}"] for name in expected} == {name: {MODEL: n} for name, n in expected.items()}
    generated = found["vllm:generation_tokens_total"][MODEL]
    assert generated >= total("usage", "completion_tokens") > 40, "the tokens of a stop string were generated, too"
    at = found["vllm:spec_decode_num_accepted_tokens_per_pos_total"]
    assert sum(at.values()) == accepted > 0
    assert (*MODEL, ("position", "0")) in at
    firsts, others, wholes = (found[f"vllm:{name}_count"][MODEL] for name in TIMES)
    assert (firsts, wholes) == (4, 4), "a text is a choice"
    assert 0 < others < generated
    # Whole answers come to the front at once, and their tokens have times all the same.
    between = found["vllm:inter_token_latency_seconds_sum"][MODEL]
    assert between > chat_draft.count(latency) - before - 1e-3 > 0
    for name in TIMES:
        assert found[f"outrider_http_{name}_sum"] == {(): found[f"vllm:{name}_sum"][MODEL]}
    assert found["outrider_http_requests_total"][("path", "/v1/completions"), ("status", "200")] == 3


def _at(answer: Any, path: tuple[str, ...]) -> float:
    for name in path:
        answer = answer[name]
    return float(answer)


def test_texts_in_progress(url: str) -> None:
    with httpx.stream("POST", f"{url}/v1/completions", json=BODY | {"max_tokens": 900, "stream": True}) as response:
        arriving = events(response)  # kept: its end would close the connection
        next(arriving)
        assert (value(url, "num_requests_running"), value(url, "num_requests_waiting")) == (1, 0)
        assert value(url, "generation_tokens_total") == 0, "they count at the end"
    wait_until(lambda: value(url, "num_requests_running") == 0)
    assert value(url, "time_to_first_token_seconds_count") == 1
    assert value(url, "e2e_request_latency_seconds_count") == 0, "it was cancelled"
    assert 0 < value(url, "generation_tokens_total") < 900, "those that came count"
    prompt = plain.post(f"{url}/tokenize", json={"prompt": BODY["prompt"]}).json()["count"]
    assert value(url, "prompt_tokens_total") == prompt > 0
    ended = scraped(url)["outrider_http_requests_total"]
    assert {labels[1]: n for labels, n in ended.items() if labels[0] == ("path", "/v1/completions")} == {
        ("status", "499"): 1
    }


def test_a_text_in_a_queue_waits() -> None:
    metrics = FrontMetrics([], shows_vllm=True)

    def load() -> list[float]:
        found = parse(metrics.show("target"))
        return [found[f"vllm:num_requests_{state}"][MODEL] for state in ("running", "waiting")]

    for is_joined, expected in ((False, [0, 1]), (True, [1, 0])):
        with metrics.text(time.monotonic(), is_joined=is_joined) as watch:
            assert load() == expected, "the begin of a joined text comes with its tokens"
            watch.take(Queued(3))
            assert load() == [0, 1]
        assert load() == [0, 0]


def test_without_the_switch_the_model_is_not_named(chat_draft: Service) -> None:
    with running_front(chat_draft.address) as url:
        plain.post(f"{url}/v1/completions", json=BODY)
        text = plain.get(f"{url}/metrics").text
    assert "outrider_http_generation_tokens_total 20.0" in text
    assert "vllm:" not in text
    assert "target" not in text


def test_a_broken_metric_fails_no_text(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Times, "observe", broken)
    before = scraped(url)["outrider_internal_errors_total"].get((("component", "http_metrics"),), 0)
    answer = plain.post(f"{url}/v1/completions", json=BODY)
    assert answer.json()["usage"]["completion_tokens"] == 20
    assert scraped(url)["outrider_internal_errors_total"][("component", "http_metrics"),] > before
