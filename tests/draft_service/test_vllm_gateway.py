"""The gateway smg in front of vLLM's contract: OpenAI's API with the demo pair behind it, over real sockets."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import pytest

from outrider.cli.processes import Pair
from outrider.client import Client, Completion
from tests.cluster import Cluster, free_address, wait_healthy, wait_until
from tests.draft_service.pairs import DEMO, TEMPLATE
from tests.machine import absent

PROMPT = "def area(radius):"
MESSAGES = [{"role": "user", "content": PROMPT}]
TOKENS = 24
ASKED: dict[str, Any] = {"model": "target", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}


@dataclass(frozen=True)
class Gateway:
    """smg, and the address of the draft service behind it."""

    url: str
    draft: str

    def open(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        return urlopen(Request(f"{self.url}{path}", data, {"Content-Type": "application/json"}), timeout=60)

    def ask(self, path: str, **body: Any) -> Any:
        with self.open(path, body or None) as answer:
            return json.load(answer)

    def stream(self, path: str, **body: Any) -> list[Any]:
        """The events of a stream, which ends with `[DONE]`."""
        with self.open(path, {"stream": True, "stream_options": {"include_usage": True}} | body) as answer:
            lines = [line.decode().strip() for line in answer]
        events = [line.removeprefix("data: ") for line in lines if line]
        assert events.pop() == "[DONE]"
        return [json.loads(event) for event in events]

    def expected(self, prompt: Any, **options: Any) -> Completion:
        """The same text, by our own contract."""
        with Client(self.draft, timeout=60) as client:
            return client.complete(prompt, **{"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True} | options)


@contextmanager
def _running(worker: str, folder: Path) -> Iterator[str]:
    """smg, started in `folder`; its URL once it has a model."""
    program = shutil.which("smg", path=str(Path(sys.executable).parent)) or shutil.which("smg")
    if program is None:
        absent("smg is not installed; there are wheels for few platforms")
    address, _, port = free_address().rpartition(":")
    options = {
        "--host": address,
        "--port": port,
        "--prometheus-port": free_address().rpartition(":")[2],
        "--worker-urls": f"grpc://{worker}",
        "--health-check-interval-secs": "1",
        "--health-success-threshold": "1",
        "--worker-startup-check-interval": "1",
    }
    command = [program, "launch", *(word for option in options.items() for word in option)]
    log = folder / "log"
    with log.open("wb") as output:
        # A group of its own, and no cache of the hub: there is no network in tests.
        environment = {**os.environ, "HF_HOME": str(folder / "hub")}
        process = subprocess.Popen(
            command, cwd=folder, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    try:
        gateway = Gateway(f"http://{address}:{port}", worker)

        def answers() -> bool:
            assert process.poll() is None, log.read_text(encoding="utf-8", errors="replace")[-4000:]
            try:
                return bool(gateway.ask("/v1/completions", prompt=PROMPT, **ASKED | {"max_tokens": 1}))
            except (URLError, ConnectionError):
                return False

        wait_until(answers, what="a first completion by smg")
        yield gateway.url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="module")
def gateway(demo_pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """The draft has a chat template, and a path that leads nowhere from where smg runs: smg asks it for its files."""
    model = tmp_path_factory.mktemp("model") / "draft"
    shutil.copytree(DEMO / "draft", model)
    settings = model / "tokenizer_config.json"
    template = json.loads(settings.read_text(encoding="utf-8")) | {"chat_template": TEMPLATE}
    settings.write_text(json.dumps(template), encoding="utf-8")
    with Cluster() as cluster:
        flags = "--vllm-grpc --speculation fixed"
        draft = cluster.draft(demo_pair.verifier, model=Path(os.path.relpath(model)), flags=flags)
        wait_healthy(draft)
        folder = tmp_path_factory.mktemp("smg")
        with _running(draft.address, folder) as url:
            assert "Tokenizer extracted" in (folder / "log").read_text(encoding="utf-8", errors="replace")
            yield Gateway(url, draft.address)
        assert not draft.plain_lines()


def test_models(gateway: Gateway) -> None:
    assert [model["id"] for model in gateway.ask("/v1/models")["data"]] == ["target"]


def test_a_completion_is_that_of_our_own_contract(gateway: Gateway) -> None:
    answer = gateway.ask("/v1/completions", prompt=PROMPT, **ASKED)
    expected = gateway.expected(PROMPT)
    (choice,), usage = answer["choices"], answer["usage"]
    assert (choice["text"], choice["finish_reason"]) == (expected.text, "length")
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (expected.usage.prompt_tokens, TOKENS)
    speculation = usage["completion_tokens_details"]
    assert speculation["accepted_prediction_tokens"] > 0
    assert speculation["rejected_prediction_tokens"] >= 0


def test_a_seed_gives_the_same_samples(gateway: Gateway) -> None:
    sampled = {"temperature": 1.0, "seed": 11, "n": 2}
    answer = gateway.ask("/v1/completions", prompt=PROMPT, **ASKED | sampled)
    expected = gateway.expected(PROMPT, **sampled)
    assert [choice["text"] for choice in answer["choices"]] == [sample.text for sample in expected.samples]


def test_a_streamed_completion(gateway: Gateway) -> None:
    *events, last = gateway.stream("/v1/completions", prompt=PROMPT, **ASKED)
    pieces = [choice["text"] for event in events for choice in event["choices"]]
    assert "".join(pieces) == gateway.expected(PROMPT).text
    assert len(list(filter(None, pieces))) > 1
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], TOKENS)
    assert last["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 0


@pytest.mark.parametrize("streams", [False, True])
def test_a_stop_string_ends_a_text_before_it(gateway: Gateway, streams: bool) -> None:
    whole = gateway.expected(PROMPT).text
    stop = whole[len(whole) // 2 - 1 : len(whole) // 2 + 2]
    asked = ASKED | {"prompt": PROMPT, "stop": [stop]}
    events = gateway.stream("/v1/completions", **asked) if streams else [gateway.ask("/v1/completions", **asked)]
    choices = [choice for event in events for choice in event["choices"]]
    assert "".join(choice["text"] for choice in choices) == whole[: whole.index(stop)]
    assert choices[-1]["finish_reason"] == "stop"
    assert events[-1]["usage"]["completion_tokens"] < TOKENS, "the service has stopped, too"


def test_chat(gateway: Gateway) -> None:
    answer = gateway.ask("/v1/chat/completions", messages=MESSAGES, **ASKED)
    expected = gateway.expected(MESSAGES)
    (choice,) = answer["choices"]
    assert (choice["message"]["role"], choice["message"]["content"]) == ("assistant", expected.text)
    assert answer["usage"]["prompt_tokens"] == expected.usage.prompt_tokens


@pytest.mark.parametrize("streams", [False, True])
def test_log_probabilities_of_a_chat(gateway: Gateway, streams: bool) -> None:
    asked = ASKED | {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2}
    expected = gateway.expected(MESSAGES, logprobs=2)
    if streams:
        choices = [choice for event in gateway.stream("/v1/chat/completions", **asked) for choice in event["choices"]]
        text = "".join(choice["delta"].get("content") or "" for choice in choices)
    else:
        choices = gateway.ask("/v1/chat/completions", **asked)["choices"]
        text = choices[0]["message"]["content"]
    assert text == expected.text
    found = [position for choice in choices if choice.get("logprobs") for position in choice["logprobs"]["content"]]
    assert [each["logprob"] for each in found] == pytest.approx(
        [each.token.raw for each in expected.logprobs], abs=1e-4
    )
    assert {len(each["top_logprobs"]) for each in found} == {2}


def test_what_our_service_refuses_names_the_field(gateway: Gateway) -> None:
    with pytest.raises(HTTPError) as caught:
        gateway.ask("/v1/chat/completions", messages=MESSAGES, response_format={"type": "json_object"}, **ASKED)
    assert caught.value.code == 400
    assert "sampling_params.json_schema is set" in json.load(caught.value)["error"]["message"]
