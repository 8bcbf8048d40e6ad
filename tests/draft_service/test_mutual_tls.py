"""Both services as processes: mutual TLS between them, TLS and tokens for clients, and rotation of all files."""

import asyncio
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from outrider.client import TLS, AsyncClient, Client, Unauthenticated, Unavailable
from outrider.rpc.channel import wait_for_health
from protos.outrider.v1 import verifier_service_pb2
from protos.outrider.v1.verifier_service_pb2_grpc import VerifierServiceStub
from tests.certificates import Authority, write
from tests.cluster import Cluster, Service, wait_healthy

VERIFIER, DRAFT, FRONT = "verifier.models.svc", "spiffe://models/drafts", "draft.models.svc"
FIRST, SECOND = "first-token-0123456789", "second-token-0123456789"
# Seconds after which a connection to the verifier is renewed: a client with an invalid certificate then gets none.
CONNECTION_AGE = 0.5
PROMPT = "def area(radius):"


@dataclass(frozen=True)
class Pair:
    """Both services and their certificate files."""

    pki: Path
    ours: Authority
    others: Authority
    verifier: Service
    draft: Service

    @property
    def tokens(self) -> Path:
        return self.pki / "tokens"

    @property
    def tls(self) -> TLS:
        return TLS(ca=self.ours.pem, name=FRONT)

    def client(self, **kind: Any) -> Client:
        return Client(self.draft.address, **{"tls": self.tls, "token_file": self.tokens, "timeout": 60, **kind})


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pki = tmp_path_factory.mktemp("pki")
    ours, others = Authority(pki / "ours"), Authority(pki / "others", "others")
    verifier_files = ours.issue(VERIFIER, file="verifier")
    draft_files, front_files = ours.issue(DRAFT, file="draft"), ours.issue(FRONT, file="front")
    write(pki / "clients.crt", ours.pem.read_bytes())
    write(pki / "tokens", f"{FIRST}\n".encode())
    clients = f"--tls-client-ca {pki / 'clients.crt'} --allow-client-san other.models.svc,{DRAFT}"
    of_verifier = f"{clients} --tls-cert {verifier_files.cert} --tls-key {verifier_files.key}"
    to_verifier = f"--verifier-tls-ca {ours.pem} --verifier-tls-name {VERIFIER}"
    to_verifier += f" --verifier-tls-cert {draft_files.cert} --verifier-tls-key {draft_files.key}"
    of_draft = f"{to_verifier} --tls-cert {front_files.cert} --tls-key {front_files.key}"
    tokens = f" --auth-token-file {pki / 'tokens'}"
    with Cluster("--health-listen 127.0.0.1:0") as cluster:
        # Slow steps: texts are in progress all the while, and few of them.
        verifier = cluster.verifier(
            fault="crowded", flags=f"{of_verifier} --max-connection-age {CONNECTION_AGE}{tokens}"
        )
        draft = cluster.draft(verifier, flags=f"{of_draft}{tokens} --verifier-token-file {pki / 'tokens'}")
        wait_healthy(verifier, draft)
        yield Pair(pki, ours, others, verifier, draft)


def test_clients_need_a_token_and_the_draft_service_a_named_certificate(pair: Pair) -> None:
    """`tests/outrider/rpc` has every case; here are the services' settings."""
    with pair.client() as client:
        done = client.complete(PROMPT, max_new_tokens=16, temperature=0, ignore_eos=True)
        assert done.usage.completion_tokens == 16
    with pair.client(token_file=None) as client, pytest.raises(Unauthenticated, match="token"):
        client.complete(PROMPT)
    for tls in (None, TLS(ca=pair.others.pem, name=FRONT), TLS(ca=pair.ours.pem)):
        with pair.client(tls=tls, retry=False) as client, pytest.raises(Unavailable):
            client.get_model()
    stranger, options = pair.ours.issue("stranger.models.svc"), [("grpc.default_authority", VERIFIER)]
    ca, key, chain = (path.read_bytes() for path in (pair.ours.pem, stranger.key, stranger.cert))
    for credentials, code in (
        (grpc.ssl_channel_credentials(ca), grpc.StatusCode.UNAVAILABLE),
        (grpc.ssl_channel_credentials(ca, key, chain), grpc.StatusCode.PERMISSION_DENIED),
    ):
        with grpc.secure_channel(pair.verifier.address, credentials, options=options) as channel:
            assert error_of_get_model(channel) is code


def test_an_unfit_certificate_is_an_error_that_names_the_option(pair: Pair) -> None:
    for tls, advice in (
        (TLS(ca=pair.ours.pem, name="other.models.svc"), "give --tls-name (in Python, TLS(name=...))"),
        (TLS(ca=pair.others.pem, name=FRONT), "check --tls-ca (in Python, TLS(ca=...))"),
    ):
        with pair.client(tls=tls, retry=False) as client, pytest.raises(Unavailable) as caught:
            client.get_model()
        assert advice in str(caught.value)


def test_the_plaintext_port_serves_health_only(pair: Pair) -> None:
    health = str(pair.verifier.logged("health")[0]["address"])
    wait_for_health(health, "outrider.v1.VerifierService", 5)
    with pytest.raises(TimeoutError, match="UNAVAILABLE"):
        wait_for_health(pair.verifier.address, "", 1)
    with grpc.insecure_channel(health) as channel:
        assert error_of_get_model(channel) is grpc.StatusCode.UNIMPLEMENTED


def error_of_get_model(verifier: grpc.Channel) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as caught:
        VerifierServiceStub(verifier).GetModel(verifier_service_pb2.VerifierServiceGetModelRequest(), timeout=10)
    return caught.value.code()


def certificate_of(service: Service) -> str:
    host, _, port = service.address.rpartition(":")
    return ssl.get_server_certificate((host, int(port)))


async def test_no_request_fails_while_certificates_cas_and_tokens_change(pair: Pair) -> None:
    """Under load, with new connections all the time, these are replaced: the draft's client certificate and the CA that
    the verifier trusts; both servers' certificates; and the token.
    """
    how: Any = {"tls": pair.tls, "token_file": pair.tokens, "timeout": 60, "retry": False}
    async with AsyncClient(pair.draft.address, **how) as client:
        finished, is_over = [0] * 3, asyncio.Event()

        async def send_requests(index: int) -> None:
            while not is_over.is_set():
                done = await client.complete(PROMPT, max_new_tokens=24, temperature=0, ignore_eos=True)
                assert done.usage.completion_tokens == 24
                finished[index] += 1

        load = [asyncio.create_task(send_requests(index)) for index in range(len(finished))]

        async def wait_for_requests() -> None:
            """Until requests that began after now have ended, and the connection to the verifier is a new one."""
            until, wanted = time.monotonic() + 1.5 * CONNECTION_AGE, [count + 2 for count in finished]
            async with asyncio.timeout(60):
                while time.monotonic() < until or any(a < b for a, b in zip(finished, wanted, strict=True)):
                    await asyncio.sleep(0.05)
                    for task in load:
                        if task.done():
                            task.result()

        await wait_for_requests()
        clients = pair.pki / "clients.crt"
        write(clients, pair.ours.pem.read_bytes() + pair.others.pem.read_bytes())
        moved = pair.others.issue(DRAFT)
        write(pair.ours.pem.with_name("draft.key"), moved.key.read_bytes())
        write(pair.ours.pem.with_name("draft.crt"), moved.cert.read_bytes())
        await wait_for_requests()  # the draft service uses the new certificate by now
        write(clients, pair.others.pem.read_bytes())
        new = {name: pair.ours.issue(name, file=file) for name, file in ((VERIFIER, "verifier"), (FRONT, "front"))}
        write(pair.tokens, f"{SECOND}\n{FIRST}\n".encode())
        await wait_for_requests()
        write(pair.tokens, f"{SECOND}\n".encode())
        await wait_for_requests()
        is_over.set()
        await asyncio.gather(*load)
    assert certificate_of(pair.draft) == new[FRONT].cert.read_text()
    assert certificate_of(pair.verifier) == new[VERIFIER].cert.read_text()
    old = pair.pki / "old"
    write(old, f"{FIRST}\n".encode())
    with pair.client(token_file=old) as without, pytest.raises(Unauthenticated):
        without.get_model()
    lines = [line for service in (pair.verifier, pair.draft) for line in service.log_lines()]
    assert not any(secret in line for line in lines for secret in (FIRST, SECOND, "PRIVATE KEY"))
