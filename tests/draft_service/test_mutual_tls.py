"""Both services as processes, mutual TLS between them, TLS and tokens in front: who comes in, and what may change."""

import asyncio
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from outrider.client import TLS, AsyncClient, Client, InvalidRequest, Unauthenticated, Unavailable
from outrider.rpc.channel import channel_options, wait_for_health
from outrider.rpc.errors import RequestError, from_rpc_error
from protos.outrider.v1 import verifier_service_pb2
from protos.outrider.v1.verifier_service_pb2_grpc import VerifierServiceStub
from tests.certificates import Authority, write
from tests.cluster import Cluster, Service, wait_healthy

VERIFIER, DRAFT, FRONT = "verifier.models.svc", "spiffe://models/drafts", "draft.models.svc"
FIRST, SECOND = "first-token-0123456789", "second-token-0123456789"
LONGEST_PROMPT = 64
# Seconds between two connections to the verifier: a client whose certificate is no longer valid then gets none.
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
        """How clients speak to the draft service."""
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
    limits = f"--auth-token-file {pki / 'tokens'} --max-prompt-tokens {LONGEST_PROMPT}"
    with Cluster("--health-listen 127.0.0.1:0") as cluster:
        verifier = cluster.verifier(flags=f"{of_verifier} --max-connection-age {CONNECTION_AGE}")
        draft = cluster.draft(verifier, flags=f"{of_draft} {limits}")
        wait_healthy(verifier, draft)
        yield Pair(pki, ours, others, verifier, draft)


def test_text_comes_to_whoever_has_the_ca_and_a_token(pair: Pair) -> None:
    with pair.client() as client:
        done = client.complete(PROMPT, max_new_tokens=16, temperature=0, ignore_eos=True)
        assert done.usage.completion_tokens == 16
        assert client.get_model().target.vocab_size == 2048
    for token_file in (None, pair.pki / "wrong"):
        write(pair.pki / "wrong", f"{FIRST[:-1]}\n".encode())
        with pair.client(token_file=token_file) as client, pytest.raises(Unauthenticated, match="token"):
            client.complete(PROMPT)
    for tls in (None, TLS(ca=pair.others.pem, name=FRONT), TLS(ca=pair.ours.pem)):
        with pair.client(tls=tls, retry=False) as client, pytest.raises(Unavailable):
            client.get_model()


def verifier_says(pair: Pair, shown: tuple[Path, Path] | None) -> RequestError | None:
    """What the verifier tells a client that shows this certificate and key; None is an answer."""
    chain, key = (None, None) if shown is None else (shown[0].read_bytes(), shown[1].read_bytes())
    credentials = grpc.ssl_channel_credentials(pair.ours.pem.read_bytes(), key, chain)
    options = [("grpc.default_authority", VERIFIER), *channel_options(max_message_bytes=1 << 20)]
    with grpc.secure_channel(pair.verifier.address, credentials, options=options) as channel:
        try:
            VerifierServiceStub(channel).GetModel(verifier_service_pb2.VerifierServiceGetModelRequest(), timeout=10)
        except grpc.RpcError as error:
            return from_rpc_error(error)
    return None


def test_the_verifier_admits_the_draft_service_and_nobody_else(pair: Pair) -> None:
    named, unnamed = pair.ours.issue("other.models.svc"), pair.ours.issue("stranger.models.svc")
    foreign, late = pair.others.issue(DRAFT), pair.ours.issue(DRAFT, expired=True)
    assert verifier_says(pair, (named.cert, named.key)) is None
    for shown in (None, (foreign.cert, foreign.key), (late.cert, late.key)):
        refusal = verifier_says(pair, shown)
        assert refusal is not None
        assert refusal.code is grpc.StatusCode.UNAVAILABLE, "no connection"
    refusal = verifier_says(pair, (unnamed.cert, unnamed.key))
    assert refusal is not None
    assert refusal.code is grpc.StatusCode.PERMISSION_DENIED
    assert f"names stranger.models.svc; allowed are other.models.svc, {DRAFT}" in refusal.message


def test_health_is_in_plaintext_on_its_own_port_and_nothing_else_is(pair: Pair) -> None:
    health = str(pair.verifier.logged("health")[0]["address"])
    wait_for_health(health, "outrider.v1.VerifierService", 5)
    with pytest.raises(TimeoutError, match="UNAVAILABLE"):
        wait_for_health(pair.verifier.address, "", 1)
    with grpc.insecure_channel(health) as channel, pytest.raises(grpc.RpcError) as caught:
        VerifierServiceStub(channel).GetModel(verifier_service_pb2.VerifierServiceGetModelRequest(), timeout=5)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_what_is_too_long_is_refused_with_the_numbers(pair: Pair) -> None:
    with pair.client(retry=False) as client:
        assert client.complete([5] * LONGEST_PROMPT, max_new_tokens=1).usage.prompt_tokens == LONGEST_PROMPT
        with pytest.raises(InvalidRequest, match=f"prompt has {LONGEST_PROMPT + 1} tokens.* at most {LONGEST_PROMPT}"):
            client.complete([5] * (LONGEST_PROMPT + 1))


def shown_at(address: str) -> str:
    host, _, port = address.rpartition(":")
    return ssl.get_server_certificate((host, int(port)))


async def test_no_request_fails_while_certificates_cas_and_tokens_change(pair: Pair) -> None:
    """Under load, everything is replaced: the draft's certificate for verifiers by one of another CA, which alone the
    verifier trusts afterwards; both servers' certificates; and the token. Connections are made anew all along.
    """
    how: Any = {"tls": pair.tls, "token_file": pair.tokens, "timeout": 60, "retry": False}
    async with AsyncClient(pair.draft.address, **how) as client:
        finished, over = [0] * 3, asyncio.Event()

        async def ask(index: int) -> None:
            while not over.is_set():
                done = await client.complete(PROMPT, max_new_tokens=24, temperature=0, ignore_eos=True)
                assert done.usage.completion_tokens == 24
                finished[index] += 1

        askers = [asyncio.create_task(ask(index)) for index in range(len(finished))]

        async def goes_on() -> None:
            """Some requests that began after now have ended, and a connection to the verifier has been made anew."""
            until, wanted = time.monotonic() + 1.5 * CONNECTION_AGE, [count + 2 for count in finished]
            async with asyncio.timeout(60):
                while time.monotonic() < until or any(a < b for a, b in zip(finished, wanted, strict=True)):
                    await asyncio.sleep(0.05)
                    for asker in askers:
                        if asker.done():
                            asker.result()

        await goes_on()
        clients = pair.pki / "clients.crt"
        write(clients, pair.ours.pem.read_bytes() + pair.others.pem.read_bytes())
        moved = pair.others.issue(DRAFT)
        write(pair.ours.pem.with_name("draft.key"), moved.key.read_bytes())
        write(pair.ours.pem.with_name("draft.crt"), moved.cert.read_bytes())
        await goes_on()  # the draft service shows the new one by now
        write(clients, pair.others.pem.read_bytes())
        new = {name: pair.ours.issue(name, file=file) for name, file in ((VERIFIER, "verifier"), (FRONT, "front"))}
        write(pair.tokens, f"{SECOND}\n{FIRST}\n".encode())
        await goes_on()
        write(pair.tokens, f"{SECOND}\n".encode())
        await goes_on()
        over.set()
        await asyncio.gather(*askers)
    assert shown_at(pair.draft.address) == new[FRONT].cert.read_text()
    assert shown_at(pair.verifier.address) == new[VERIFIER].cert.read_text()
    old = pair.pki / "old"
    write(old, f"{FIRST}\n".encode())
    with pair.client(token_file=old) as without, pytest.raises(Unauthenticated):
        without.get_model()
    lines = [line for service in (pair.verifier, pair.draft) for line in service.log_lines()]
    assert not any(secret in line for line in lines for secret in (FIRST, SECOND, "PRIVATE KEY"))
