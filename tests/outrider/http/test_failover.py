"""A draft service is killed, or refuses, while the front answers."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from outrider.client import AsyncClient, Client, Event
from outrider.client.events import read
from outrider.http import pair as pair_module
from outrider.http.app import create_app
from outrider.http.metrics import FrontMetrics
from outrider.http.pair import Pair
from outrider.http.settings import ServerSettings
from protos.outrider.v1 import draft_service_pb2 as pb
from tests.cluster import Cluster, Service, wait_healthy, wait_until
from tests.outrider.http.conftest import events, plain, running_front, stream
from tests.proxy import Proxy, Way
from tests.slow_steps import STEP_SECONDS

FIELDS = {"prompt": "def area(radius):\n", "seed": 11, "max_tokens": 80, "ignore_eos": True}
LONG = FIELDS | {"max_tokens": 200}
# Then `LONG` has 40 rounds at the least.
FLAGS = "--speculation fixed --gamma 4"


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of a verifier whose steps take so long that a service is killed within `LONG`."""
    file = tmp_path_factory.mktemp("slow") / "step-seconds"
    file.write_text("0.05")
    return {"fault": "slow_steps", "env": {STEP_SECONDS: str(file)}}


@pytest.fixture(scope="module")
def verifier(slow: dict[str, Any]) -> Iterator[Service]:
    with Cluster() as cluster:
        verifier = cluster.verifier(**slow)
        wait_healthy(verifier)
        yield verifier


@pytest.fixture(scope="module")
def wanted(ours: Client) -> str:
    """The text of `LONG`."""
    return ours.complete("def area(radius):\n", seed=11, max_new_tokens=200, ignore_eos=True).text


def test_a_killed_draft_service_is_not_seen(verifier: Service, chat_folder: Path, wanted: str) -> None:
    with Cluster(FLAGS) as cluster:
        drafts = [cluster.draft(verifier, model=chat_folder) for _ in range(2)]
        wait_healthy(*drafts)
        addresses = ",".join(draft.address for draft in drafts)
        with running_front(addresses, retry_timeout=0.5) as url, httpx.Client(base_url=url) as http:
            with http.stream("POST", "/v1/completions", json=LONG | {"stream": True}, timeout=60) as response:
                assert response.status_code == 200
                texts, killed = [], None
                for event in events(response):
                    texts.append(event["choices"][0]["text"])
                    if killed is None and len(texts) == 5:
                        killed = next(d for d in drafts if d.count("outrider_num_requests_running") == 1)
                        killed.kill()
            assert "".join(texts) == wanted
            assert killed is not None
            assert http.get("/health").status_code == 200
            (left,) = [draft for draft in drafts if draft is not killed]
            with http.stream("POST", "/v1/completions", json=LONG | {"stream": True}, timeout=60) as response:
                lines = []
                for line in response.iter_lines():
                    lines.append(line)
                    if len(lines) == 3:
                        left.kill()
            shown = [line for line in lines if line]
            assert shown[-1].startswith('data: {"error"'), "a text that cannot continue"
            assert "data: [DONE]" not in shown
            assert left.address not in shown[-1]
            counted = 'outrider_http_requests_total{path="/v1/completions",status="%s"} 1.0'
            assert counted % 503 in http.get("/metrics").text
            assert http.get("/health").status_code == 503
            assert http.get("/v1/models").status_code == 200  # known still


def test_a_killed_verifier_is_not_seen(slow: dict[str, Any], chat_folder: Path, wanted: str) -> None:
    with Cluster() as cluster:
        verifiers = [cluster.verifier(**slow) for _ in range(2)]
        draft = cluster.draft(*verifiers, model=chat_folder, flags=FLAGS)
        wait_healthy(*verifiers, draft)
        body = LONG | {"stream": True}
        with (
            running_front(draft.address) as url,
            httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response,
        ):
            texts = []
            for event in events(response):
                texts.append(event["choices"][0]["text"])
                if len(texts) == 5:
                    next(each for each in verifiers if each.count("outrider_num_requests_running")).kill()
        assert draft.count("outrider_verifier_switches_total") == 1
    assert "".join(texts) == wanted


def test_a_text_waits_for_its_only_draft_service_to_come_back(
    verifier: Service, chat_folder: Path, wanted: str
) -> None:
    with Cluster(FLAGS) as cluster:
        draft = cluster.draft(verifier, model=chat_folder)
        wait_healthy(draft)
        with (
            running_front(draft.address, retry_timeout=60.0) as url,
            httpx.stream("POST", f"{url}/v1/completions", json=LONG | {"stream": True}, timeout=90) as response,
        ):
            texts = []
            for event in events(response):
                texts.append(event["choices"][0]["text"])
                if len(texts) == 5:
                    draft.kill()
                    draft.start_again()
    assert "".join(texts) == wanted


def test_a_full_service_is_429_and_a_slow_one_504(verifier: Service, chat_folder: Path) -> None:
    with Cluster(FLAGS) as cluster:
        draft = cluster.draft(verifier, model=chat_folder, flags="--max-sequences 1 --max-waiting 0")
        wait_healthy(draft)
        with (
            running_front(draft.address, retry_timeout=0.0, timeout=0.5) as url,
            httpx.Client(base_url=url, timeout=60) as http,
        ):
            with http.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as held:
                assert held.status_code == 200
                answer = http.post("/v1/completions", json=FIELDS)
                assert (answer.status_code, answer.json()["error"]["type"]) == (429, "rate_limit_error")
                assert int(answer.headers["retry-after"]) >= 1
                assert draft.address not in answer.text
                held.read()
                assert b'"error"' in held.content
            wait_until(lambda: draft.count("outrider_num_requests_running") == 0, 10.0, "the late text is cancelled")
            answer = http.post("/v1/completions", json=LONG)
            assert answer.status_code == 504
            assert answer.headers["x-request-id"].startswith("cmpl-")
            assert answer.json()["error"]["type"] == "server_error"
            wait_until(lambda: draft.count("outrider_num_requests_running") == 0, 10.0, "the late text is cancelled")
            assert stream(http, "/v1/completions", prompt="x", max_tokens=1)


@pytest.mark.parametrize("path", ["/v1/models", "/v1/completions", "/health"])
def test_without_a_service_the_front_says_so(path: str) -> None:
    with running_front("127.0.0.1:1", retry_timeout=0.1) as url:
        answer = plain.get(url + path) if path != "/v1/completions" else httpx.post(url + path, json={"prompt": "x"})
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert "127.0.0.1" not in answer.text


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
def test_several_choices_continue_too(chat_draft: Service, ours: Client, *, streamed: bool) -> None:
    """The connections are cut in the middle."""
    wanted = ours.complete("def area(radius):\n", seed=11, max_new_tokens=80, ignore_eos=True, n=2)
    with Proxy(chat_draft.address) as one, Proxy(chat_draft.address) as other:
        for proxy in (one, other):
            proxy.cut_after(1800, Way.DOWN)
        with running_front(f"{one.address},{other.address}") as url, httpx.Client(base_url=url, timeout=60) as http:
            texts = ["", ""]
            if streamed:
                for event in stream(http, "/v1/completions", **FIELDS, n=2):
                    texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
            else:
                answer = http.post("/v1/completions", json=FIELDS | {"n": 2}).json()
                texts = [choice["text"] for choice in answer["choices"]]
                assert answer["usage"]["completion_tokens"] == 160
    assert texts == [sample.text for sample in wanted.samples]


def test_requests_do_not_wait_for_each_other_while_no_service_answers() -> None:
    began = time.monotonic()
    with running_front("127.0.0.1:1", retry_timeout=1.0) as url, ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: plain.get(f"{url}/v1/models"), range(8)))
    assert {answer.status_code for answer in answers} == {503}
    assert time.monotonic() - began < 6.0, "one after the other they would take eight seconds"


async def test_a_text_waits_for_a_service_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not, before that, for the description of a pair that is known."""
    monkeypatch.setattr(pair_module, "KNOWN_FOR_S", 0.0)
    monkeypatch.setattr(pair_module, "ANSWERS_WITHIN_S", 0.01)
    answers, silent = [pb.DraftServiceGetModelResponse()], asyncio.Event()

    class SilentAfterwards:
        async def get_model(self) -> pb.DraftServiceGetModelResponse:
            if not answers:
                await silent.wait()
            return answers.pop()

    pair = Pair(cast(AsyncClient, SilentAfterwards()), FrontMetrics([], shows_vllm=False), framing={})
    for _ in range(2):
        async with asyncio.timeout(1.0):
            await pair.describe()


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
async def test_an_answer_that_outlasts_the_grace_of_a_stop_ends_with_an_error(*, streamed: bool) -> None:
    """Then uvicorn cancels the request."""
    begun, sent = asyncio.Event(), list[dict[str, Any]]()

    class Slow:
        async def get_model(self) -> pb.DraftServiceGetModelResponse:
            return pb.DraftServiceGetModelResponse()

        async def generate(self, *_: Any, **__: Any) -> AsyncGenerator[Event, None]:
            for event in read(pb.GenerateResponse(chunk=pb.GenerateChunk(text="a", token_ids=[1]))):
                yield event
            begun.set()
            await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    body = asyncio.Queue[dict[str, Any]]()
    body.put_nowait({"type": "http.request", "body": json.dumps({"prompt": "x", "stream": streamed}).encode()})
    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b""}
    app = create_app(cast(AsyncClient, Slow()), ServerSettings("127.0.0.1:0"), None, None)
    call = asyncio.ensure_future(app(scope | {"headers": [(b"host", b"localhost")]}, body.get, send))
    await begun.wait()
    call.cancel()
    await call
    last = sent[-1]["body"].removeprefix(b"data: ")
    assert json.loads(last)["error"]["message"] == "the server stops; try again later"
    assert sent[0]["status"] == (200 if streamed else 503)
    assert not sent[-1].get("more_body")
