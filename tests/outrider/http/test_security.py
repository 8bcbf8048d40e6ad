"""Keys, hosts, limits, and clients that are slow or gone, against a real server."""

import asyncio
import json
import math
import select
import socket
import ssl
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from uvicorn.server import ServerState

from outrider.client import AsyncClient
from outrider.http import app
from outrider.http.playground import GENERATE
from outrider.http.server import HttpServer, _Connection
from outrider.http.settings import ServerSettings
from tests.certificates import Authority
from tests.cluster import Service, wait_until
from tests.outrider.http.conftest import plain, running_front

KEYS = ("a-key-of-some-length", "another-key-of-some-length")
BODY: dict[str, Any] = {"prompt": "x", "max_tokens": 2}
LONG: dict[str, Any] = {"prompt": "x", "max_tokens": 900, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text("# clients\n" + "\n".join(KEYS) + "\n")
    return path


@pytest.fixture(scope="module")
def guarded(chat_draft: Service, key_file: Path) -> Iterator[str]:
    """A front with keys and small limits."""
    limits: dict[str, Any] = {
        "allowed_hosts": ["api.example.org", "*.inside"],
        "body_timeout": 1.0,
        "client_burst": 4,
        "client_rate": 50.0,
        "idle_timeout": 1.0,
        "max_body_bytes": 20_000,
        "max_client_sequences": 4,
    }
    with running_front(chat_draft.address, key_file=key_file, **limits) as url:
        yield url


def key(number: int = 0) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[number]}"}


def running(draft: Service) -> float:
    return draft.count("outrider_num_requests_running")


# -------------------------------------------------------------------------------------------------------------- keys


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer a-key-of-some-lengti"},
        {"authorization": "Bearer"},
        {"authorization": KEYS[0]},
        {"authorization": "Basic " + KEYS[0]},
        {"x-api-key": KEYS[0]},
    ],
)
@pytest.mark.parametrize("path", ["/v1/models", "/v1/completions", "/version", "/nothing", "/tokenizer_info"])
def test_without_a_right_key_nothing_is_answered(guarded: str, path: str, headers: dict[str, str]) -> None:
    answer = plain.get(guarded + path, headers=headers)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert KEYS[0] not in answer.text


def test_each_key_opens_and_probes_need_none(guarded: str) -> None:
    for number in range(len(KEYS)):
        assert plain.post(f"{guarded}/v1/completions", json=BODY, headers=key(number)).status_code == 200
    assert plain.get(f"{guarded}/health").status_code == 200
    assert "target" not in plain.get(f"{guarded}/metrics").text


def test_keys_are_read_again(chat_draft: Service, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("the-first-key-of-all\n")
    with running_front(chat_draft.address, key_file=path) as url:
        assert plain.get(f"{url}/version", headers={"authorization": "Bearer the-first-key-of-all"}).status_code == 200
        path.write_text("the-second-key-of-all\n")
        assert plain.get(f"{url}/version", headers={"authorization": "Bearer the-first-key-of-all"}).status_code == 401


def test_each_key_has_limits_of_its_own(guarded: str) -> None:
    time.sleep(0.1)  # the bucket fills
    with httpx.Client(base_url=guarded, headers=key(), timeout=60) as client:
        answer = client.post("/v1/completions", json=BODY | {"n": 5})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")
        with client.stream("POST", "/v1/completions", json=LONG | {"n": 4}) as held:
            assert held.status_code == 200
            answer = client.post("/v1/completions", json=BODY)
            assert (answer.status_code, answer.json()["error"]["type"]) == (429, "rate_limit_error")
            assert int(answer.headers["retry-after"]) >= 1
            assert "(--http-max-client-sequences)" in answer.json()["error"]["message"]
            assert client.get("/v1/models").status_code == 200
            assert plain.post(f"{guarded}/v1/completions", json=BODY, headers=key(1)).status_code == 200
    wait_until(lambda: plain.post(f"{guarded}/v1/completions", json=BODY, headers=key()).status_code == 200)


# ------------------------------------------------------------------------------------------------------------- hosts


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:99", 200),
        ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200),
        ("api.example.org", 200),
        ("api.example.org:443", 200),
        ("a.inside", 200),
        ("inside", 421),
        ("evil.example.org", 421),
        ("localhost.evil.org", 421),
        ("127.0.0.1.evil.org", 421),
        ("evil.org:127.0.0.1", 421),
        ("api.example.org.evil.org", 421),
        ("", 421),
    ],
)
def test_only_names_of_the_front_are_answered(guarded: str, host: str, status: int) -> None:
    """A page whose name points at this machine sends its own name."""
    for path in ("/version", "/health"):
        answer = plain.get(guarded + path, headers=key() | {"host": host})
        assert answer.status_code == status, answer.text


def test_a_probe_of_http_1_0_needs_no_host(guarded: str) -> None:
    """Load balancers send such probes; browsers always name a host."""
    url = httpx.URL(guarded)
    for version, status in (("1.0", b" 200 "), ("1.1", b" 421 ")):
        with socket.create_connection((url.host, url.port), timeout=10) as probe:
            probe.sendall(f"GET /health HTTP/{version}\r\nConnection: close\r\n\r\n".encode())
            assert status in probe.recv(100).partition(b"\r\n")[0]


def test_no_page_of_another_origin_is_let_in(chat_draft: Service, guarded: str) -> None:
    preflight = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    answer = plain.options(f"{guarded}/v1/completions", headers=preflight)
    assert not any(name.startswith("access-control") for name in answer.headers)
    with running_front(chat_draft.address, cors_origins=["https://good.example"]) as url:
        good = plain.options(f"{url}/v1/completions", headers=preflight | {"origin": "https://good.example"})
        evil = plain.options(f"{url}/v1/completions", headers=preflight)
    assert good.headers["access-control-allow-origin"] == "https://good.example"
    assert "access-control-allow-origin" not in evil.headers


def test_a_page_of_an_allowed_origin_may_use_openais_client(chat_draft: Service) -> None:
    origin = {"origin": "https://good.example"}
    asked = "authorization,content-type,x-stainless-lang"
    preflight = {"access-control-request-method": "POST", "access-control-request-headers": asked}
    with running_front(chat_draft.address, cors_origins=["https://good.example"]) as url:
        allowed = plain.options(f"{url}/v1/completions", headers=origin | preflight)
        answer = plain.post(f"{url}/v1/completions", json=BODY, headers=origin | {"sec-fetch-site": "cross-site"})
    assert allowed.status_code == 200, allowed.text
    assert set(asked.split(",")) <= set(allowed.headers["access-control-allow-headers"].replace(" ", "").split(","))
    assert answer.status_code == 200
    assert {"x-request-id", "retry-after"} <= set(answer.headers["access-control-expose-headers"].split(", "))


def test_a_page_of_an_allowed_origin_may_read_an_internal_error(
    chat_draft: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> str:
        raise ZeroDivisionError

    monkeypatch.setattr(app, "installed_version", broken)
    with running_front(chat_draft.address, cors_origins=["https://good.example"]) as url:
        answer = plain.get(f"{url}/version", headers={"origin": "https://good.example"})
    assert answer.status_code == 500
    assert answer.headers["access-control-allow-origin"] == "https://good.example"


@pytest.mark.parametrize(
    ("origins", "headers", "status"),
    [
        ([], {"origin": "https://evil.example", "sec-fetch-site": "cross-site"}, 403),
        ([], {"origin": "http://localhost:3000", "sec-fetch-site": "same-site"}, 403),
        ([], {"origin": "null", "sec-fetch-site": "cross-site"}, 403),
        ([], {"sec-fetch-site": "cross-site"}, 403),
        (["https://good.example"], {"origin": "https://evil.example", "sec-fetch-site": "cross-site"}, 403),
        (["https://good.example"], {"origin": "https://good.example", "sec-fetch-site": "cross-site"}, 200),
        (["*"], {"origin": "https://evil.example", "sec-fetch-site": "cross-site"}, 200),
        ([], {"origin": "http://127.0.0.1", "sec-fetch-site": "same-origin"}, 200),
        ([], {"sec-fetch-site": "none"}, 200),
        ([], {}, 200),
    ],
)
def test_no_page_of_another_origin_starts_a_text(
    chat_draft: Service, origins: list[str], headers: dict[str, str], status: int
) -> None:
    """For a POST of text/plain a browser sends no preflight request."""
    with running_front(chat_draft.address, cors_origins=origins) as url:
        content, headers = json.dumps(BODY), {"content-type": "text/plain;charset=UTF-8"} | headers
        answers = [plain.post(url + path, content=content, headers=headers) for path in ("/v1/completions", GENERATE)]
    assert [answer.status_code for answer in answers] == [status, status], answers[0].text
    if status == 403:
        error = answers[0].json()["error"]
        assert (error["type"], error["code"]) == ("permission_error", "origin")


# ------------------------------------------------------------------------------------------------------------ bodies


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_answer_in_http_1_0_has_no_chunks(chat_draft: Service, is_stream: bool) -> None:
    body = json.dumps(BODY | {"stream": is_stream}).encode()
    with running_front(chat_draft.address) as url, connected(url) as connection:
        request = f"POST /v1/completions HTTP/1.0\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(request.encode() + body)
        head, _, content = b"".join(iter(lambda: connection.recv(65536), b"")).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert (b"content-length" in head) is not is_stream
    assert content.startswith(b"data: {" if is_stream else b"{")
    assert content.endswith(b"data: [DONE]\n\n" if is_stream else b"}")


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_request_to_upgrade_is_answered_without_one(chat_draft: Service, is_chunked: bool) -> None:
    """Java's HttpClient asks for HTTP/2 so, with each request; its body was dropped."""
    body = json.dumps(BODY).encode()
    length = "Transfer-Encoding: chunked" if is_chunked else f"Content-Length: {len(body)}"
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{length}\r\n"
    upgrade = "Upgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\nConnection: Upgrade, HTTP2-Settings"
    content = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) if is_chunked else body
    one, last = (f"{head}{upgrade}{more}\r\n\r\n".encode() + content for more in ("", ", close"))
    with running_front(chat_draft.address) as url, connected(url) as connection:
        for piece in (one[:-3], one[-3:] + one, last):
            connection.sendall(piece)
            time.sleep(0.05)
        answers = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answers.count(b"HTTP/1.1 200 OK") == answers.count(b'"choices"') == 3, answers


def test_a_body_above_the_limit_is_refused_while_it_is_read(guarded: str) -> None:
    answer = plain.post(f"{guarded}/v1/completions", json=BODY | {"prompt": "x" * 30_000}, headers=key())
    assert answer.status_code == 413
    assert "20000" in answer.json()["error"]["message"]

    def endless() -> Iterator[bytes]:
        yield b'{"prompt":"'
        while True:
            yield b"x" * 4096

    with suppress(httpx.WriteError, httpx.ReadError):  # the server may close before the client has read the answer
        answer = plain.post(f"{guarded}/v1/completions", content=endless(), headers=key(), timeout=10)
        assert answer.status_code == 413


@contextmanager
def connected(url: str, buffer_bytes: int | None = None) -> Iterator[socket.socket]:
    host, port = url.removeprefix("http://").split(":")
    with socket.socket() as connection:
        if buffer_bytes is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        connection.settimeout(10)
        connection.connect((host, int(port)))
        yield connection


def ended(connection: socket.socket) -> bool:
    """Whether the other side closes, within the time of the socket."""
    try:
        while connection.recv(65536):
            pass
    except ConnectionError:
        pass
    return True


def is_closed_while(connection: socket.socket, pieces: Sequence[bytes], pause: float = 0.0) -> bool:
    """Whether the other side closes before all pieces are sent."""
    try:
        for piece in pieces:
            connection.sendall(piece)
            time.sleep(pause)
    except ConnectionError:
        return True
    return False


def test_a_body_that_comes_slowly_is_not_waited_for(guarded: str) -> None:
    """A byte from time to time is not enough."""
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEYS[0]}\r\n"
    with connected(guarded) as connection:
        connection.sendall(f"{head}Content-Length: 1000\r\n\r\n".encode())
        for _ in range(200):
            connection.sendall(b" ")
            if select.select([connection], [], [], 0.05)[0]:
                break
        else:
            pytest.fail("no answer while bytes come")
        answer = connection.recv(65536)
    assert answer.startswith(b"HTTP/1.1 408")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "timeout"


@pytest.mark.parametrize("sent", [b"", b"GET /version HTTP/1.1\r\nHost: localhost\r\n", b"GET /version HT"])
def test_a_head_that_does_not_come_is_not_waited_for(guarded: str, sent: bytes) -> None:
    with connected(guarded) as connection:
        connection.sendall(sent)
        began = time.monotonic()
        assert ended(connection)
        assert time.monotonic() - began < 5


def test_a_slow_head_is_not_waited_for_either(guarded: str) -> None:
    """A byte from time to time keeps no connection open, after an answer on it too."""
    with connected(guarded) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        assert is_closed_while(connection, [b"X"] * 100, pause=0.05)


def test_a_large_head_is_refused(guarded: str) -> None:
    with connected(guarded) as connection:
        connection.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n")
        assert is_closed_while(connection, [b"X-Header: " + b"x" * 8000 + b"\r\n"] * 1000)


# ----------------------------------------------------------------------------------------------- clients that are gone


@pytest.mark.parametrize("requests", [1, 3])
@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_goes_cancels_its_call(
    url: str, chat_draft: Service, caplog: pytest.LogCaptureFixture, *, streamed: bool, requests: int
) -> None:
    """It may have sent further requests on the connection, which begin one after the other."""
    wait_until(lambda: running(chat_draft) == 0)
    body = json.dumps(LONG | {"stream": streamed, "prompt": ["x", "y"]}).encode()
    with connected(url) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall((head.encode() + body) * requests)
        wait_until(lambda: running(chat_draft) == 2, 5.0)
    wait_until(lambda: running(chat_draft) == 0, 5.0)
    assert not caplog.records


def test_a_client_that_goes_does_not_wait_for_a_draft_service() -> None:
    with running_front("127.0.0.1:1", retry_timeout=20.0) as url:
        with connected(url) as connection:
            connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
            wait_until(lambda: "requests_running 2.0\n" in plain.get(f"{url}/metrics").text, 5.0)
        wait_until(lambda: "requests_running 1.0\n" in plain.get(f"{url}/metrics").text, 5.0)


def test_calls_that_write_no_text_do_not_count_in_the_rate(chat_draft: Service) -> None:
    with running_front(chat_draft.address, client_rate=0.001, client_burst=1) as url:
        statuses = [plain.post(f"{url}/tokenize", json={"prompt": "x"}).status_code for _ in range(3)]
        statuses += [plain.post(f"{url}/v1/completions", json=BODY).status_code for _ in range(2)]
    assert statuses == [200, 200, 200, 200, 429]


@pytest.mark.parametrize("path", ["completions", "chat/completions", "audio/transcriptions", GENERATE])
def test_every_call_that_writes_text_counts_in_the_rate(path: str, chat_draft: Service) -> None:
    """Also one that is refused later."""
    with running_front(chat_draft.address, client_rate=0.001, client_burst=1) as url:
        where = path if path.startswith("/") else f"/v1/{path}"
        statuses = [plain.post(f"{url}{where}", content=b"{}").status_code for _ in range(2)]
    assert (statuses[0] != 429, statuses[1]) == (True, 429)


def test_a_client_that_does_not_read_is_cut_off(chat_draft: Service) -> None:
    """It asks for more than the buffers of both sides hold, and reads nothing."""
    prompt = [100 + i for i in range(900)]
    fields = {"prompt": prompt, "n": 3, "logprobs": 20, "echo": True, "max_tokens": 4, "ignore_eos": True}
    body = json.dumps(fields | {"stream": True}).encode()

    with running_front(chat_draft.address, slow_client_timeout=1.0) as url, connected(url, 4096) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        wait_until(lambda: "requests_running 2.0\n" in plain.get(f"{url}/metrics").text, 5.0)
        wait_until(
            lambda: "requests_running 1.0\n" in plain.get(f"{url}/metrics").text, 20.0, "only that for the metrics"
        )
        received = b""
        with suppress(ConnectionError):
            while piece := connection.recv(1 << 20):
                received += piece
        assert received.startswith(b"HTTP/1.1 200")
        assert b"[DONE]" not in received


async def test_a_client_that_reads_slowly_is_not_cut_off() -> None:
    """Before it stops reading. The buffers of both sides never get empty."""
    answer = bytes(32 << 20)

    async def whole(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": answer})

    config = uvicorn.Config(whole, ws="none", lifespan="off", log_config=None)
    config.load()
    connection = _Connection(config, ServerState(), {})
    server = await asyncio.get_running_loop().create_server(lambda: connection, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    await reader.readline()
    now = asyncio.get_running_loop().time()
    for _ in range(20):
        connection.check(now := now + 1, idle_timeout=math.inf, slow_client_timeout=3.0)
        assert not connection.transport.is_closing()
        await reader.readexactly(256 << 10)
    connection.check(now, idle_timeout=math.inf, slow_client_timeout=3.0)
    connection.check(now + 4, idle_timeout=math.inf, slow_client_timeout=3.0)
    assert connection.transport.is_closing()
    writer.close()
    server.close()


# ---------------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"address": "0.0.0.0:0"}, "--http 0.0.0.0:0 is not a loopback address"),
        ({"address": "127.0.0.1:0", "tls_cert": Path("x")}, "--http-tls-cert needs --http-tls-key"),
        ({"address": "127.0.0.1:0", "key_file": Path("/missing/keys")}, "--http-key-file: /missing/keys"),
        ({"address": "127.0.0.1:0", "client_burst": 3}, "--http-client-burst needs --http-client-rate"),
    ],
)
def test_settings_that_would_not_be_safe_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match="^" + words.replace(".", r"\.")):
        HttpServer(ServerSettings(**settings), lambda: AsyncClient("127.0.0.1:1"))


def test_tls_elsewhere_needs_keys_as_well(tmp_path: Path) -> None:
    certificate = Authority(tmp_path / "pki").issue("front")
    settings = ServerSettings("0.0.0.0:0", tls_cert=certificate.cert, tls_key=certificate.key)
    with pytest.raises(ValueError, match="without keys anyone may call"):
        HttpServer(settings, lambda: AsyncClient("127.0.0.1:1"))


def test_tls_with_a_certificate_that_is_replaced(chat_draft: Service, tmp_path: Path) -> None:
    authority = Authority(tmp_path / "pki")
    certificate = authority.issue("127.0.0.1", file="front")
    files: dict[str, Any] = {"tls_cert": certificate.cert, "tls_key": certificate.key}
    with running_front(chat_draft.address, idle_timeout=1.0, **files) as url:
        assert url.startswith("https://")
        context = ssl.create_default_context(cafile=str(authority.pem))
        assert httpx.get(f"{url}/health", verify=context).status_code == 200
        other = Authority(tmp_path / "other", "other")
        issued = other.issue("127.0.0.1", file="new")
        certificate.cert.write_bytes(issued.cert.read_bytes())
        certificate.key.write_bytes(issued.key.read_bytes())
        renewed = ssl.create_default_context(cafile=str(other.pem))

        def is_renewed() -> bool:
            try:
                return httpx.get(f"{url}/health", verify=renewed).status_code == 200
            except httpx.ConnectError:
                return False

        wait_until(is_renewed, 10.0)
