"""The demo pair with a chat template, and a front of it: uvicorn on a real socket, in a thread of this process."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from outrider.cli.processes import Pair
from outrider.client import AsyncClient, Client
from outrider.http.server import BackgroundServer, HttpServer
from outrider.http.settings import ServerSettings
from tests.cluster import MODELS, Cluster, Service, wait_healthy

TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}{{ raise_exception('tools are not allowed') }}{% endif %}"
    "# {{ message.role }}{% if message.name %} {{ message.name }}{% endif %}: {{ message.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}# assistant{% if mood %} ({{ mood + 'ly' }}){% endif %}:{% endif %}"
)


def write_chat_draft(folder: Path) -> Path:
    """Write the demo draft with a chat template; return its folder."""
    shutil.copytree(MODELS / "draft", folder)
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": TEMPLATE}))
    return folder


plain = httpx.Client(verify=False, timeout=60.0, limits=httpx.Limits(max_keepalive_connections=0))
"""For single requests: each has a connection of its own, and no certificates are loaded for it."""


@contextmanager
def running_front(address: str, *, timeout: float = 60.0, retry_timeout: float = 5.0, **settings: Any) -> Iterator[str]:
    """A front of these draft services; yield its URL. `settings` are those of the server."""

    def connect() -> AsyncClient:
        return AsyncClient(address, timeout=60.0, retry_timeout=retry_timeout, silence=5.0)

    server = HttpServer(ServerSettings("127.0.0.1:0", timeout=timeout, grace=1.0, **settings), connect)
    with BackgroundServer(server):
        yield server.url


@pytest.fixture(scope="package")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_draft(tmp_path_factory.mktemp("chat") / "draft")


@pytest.fixture(scope="package")
def chat_draft(demo_pair: Pair, chat_folder: Path) -> Iterator[Service]:
    with Cluster() as cluster:
        # On a busy machine the adaptive policy may draft nothing.
        draft = cluster.draft(demo_pair.verifier, model=chat_folder, flags="--speculation fixed --gamma 4")
        wait_healthy(draft)
        yield draft


@pytest.fixture(scope="package")
def url(chat_draft: Service) -> Iterator[str]:
    """The front that all tests share which change nothing about it."""
    with running_front(chat_draft.address, max_samples=8) as url:
        yield url


@pytest.fixture(scope="package")
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=60.0) as client:
        yield client


@pytest.fixture(scope="package")
def ours(chat_draft: Service) -> Iterator[Client]:
    """Our own client of the same draft service."""
    with Client(chat_draft.address) as client:
        yield client


Post = Callable[..., dict[str, Any]]


@pytest.fixture(scope="package")
def complete(http: httpx.Client) -> Post:
    """POST /v1/completions; return the body of the answer, whose status is 200."""

    def post(prompt: Any, **fields: Any) -> dict[str, Any]:
        return _ok(http.post("/v1/completions", json={"prompt": prompt, **fields}))

    return post


@pytest.fixture(scope="package")
def chat(http: httpx.Client) -> Post:
    """POST /v1/chat/completions, with one message of a user."""

    def post(content: Any, **fields: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": content}]
        return _ok(http.post("/v1/chat/completions", json={"messages": messages, **fields}))

    return post


def _ok(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def near(logprobs: Any) -> Any:
    """Log-probabilities up to rounding: a pass of another width, as after a prefix cache hit, rounds otherwise."""
    return pytest.approx(logprobs, abs=1e-4)


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The events of a stream, which ends with [DONE]."""
    assert response.headers["content-type"].startswith("text/event-stream")
    is_done = False
    for line in response.iter_lines():
        if not line:
            continue
        assert line.startswith("data: ")
        assert not is_done
        is_done = line == "data: [DONE]"
        if not is_done:
            yield json.loads(line.removeprefix("data: "))
    assert is_done


def stream(http: httpx.Client, path: str, **fields: Any) -> list[dict[str, Any]]:
    """POST a request for a stream; return its events."""
    with http.stream("POST", path, json={"stream": True, **fields}) as response:
        assert response.status_code == 200, response.read()
        return list(events(response))
