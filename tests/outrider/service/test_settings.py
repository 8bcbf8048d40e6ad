"""Settings that leave a service open without saying so are refused, in one line that names the flag."""

from pathlib import Path
from typing import Any

import pytest

from draft_service.app import verifier_tls
from draft_service.settings import DraftSettings
from outrider.client import TLS, AsyncClient
from outrider.service.settings import Listening, ServiceSettings, SettingsError, listening
from tests.certificates import Authority
from verifier_service.settings import VerifierSettings


class Files:
    """What flags name."""

    def __init__(self, folder: Path) -> None:
        authority = Authority(folder / "pki")
        server = authority.issue("server", file="server")
        self.ca, self.cert, self.key = (str(path) for path in (authority.pem, server.cert, server.key))
        self.tokens = str(folder / "tokens")
        Path(self.tokens).write_text("a-token-of-some-length\n")


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def made(kind: type[ServiceSettings], *flags: str) -> Any:
    return kind.from_command_line(["--model", "m", *flags], program="test")


def listens(*flags: str, kind: type[ServiceSettings] = DraftSettings) -> Listening:
    return listening(made(kind, *flags))


def refusal(*flags: str, kind: type[ServiceSettings] = DraftSettings) -> str:
    with pytest.raises(SettingsError) as caught:
        listens(*flags, kind=kind)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("kind", [DraftSettings, VerifierSettings])
@pytest.mark.parametrize("address", ["0.0.0.0:1", "[::]:1", "box:1"])
def test_plaintext_leaves_the_machine_only_where_it_was_asked_for(
    files: Files, kind: type[ServiceSettings], address: str
) -> None:
    says = f"--listen {address} is not a loopback address"
    assert says in refusal("--listen", address, kind=kind)
    assert "--plaintext" in refusal("--listen", address, kind=kind)
    assert listens("--listen", address, "--plaintext", kind=kind).tls is None
    assert listens("--listen", address, "--tls-cert", files.cert, "--tls-key", files.key, kind=kind).tls is not None
    for local in ("127.0.0.1:0", "unix:/run/outrider.sock"):
        assert listens("--listen", local, kind=kind) == Listening(None, [])


def test_flags_that_need_each_other_say_so(files: Files) -> None:
    tls = ("--tls-cert", files.cert, "--tls-key", files.key)
    assert refusal("--tls-cert", files.cert) == "--tls-cert needs --tls-key"
    assert "--tls-client-ca needs --tls-cert" in refusal("--tls-client-ca", files.ca)
    assert "--allow-client-san needs --tls-client-ca" in refusal(*tls, "--allow-client-san", "a")
    assert refusal("--client-burst", "3") == "--client-burst needs --client-rate"
    for flags in (("--tls-cert", "/no", "--tls-key", files.key), (*tls, "--tls-client-ca", "/no")):
        assert "/no: No such file" in refusal(*flags)
    assert "--auth-token-file: /no: No such file" in refusal("--auth-token-file", "/no")


def test_a_verifier_admits_no_client_by_its_ca_alone(files: Files) -> None:
    flags = ("--tls-cert", files.cert, "--tls-key", files.key, "--tls-client-ca", files.ca)
    assert "--tls-client-ca needs --allow-client-san" in refusal(*flags, kind=VerifierSettings)
    found = listens(*flags, "--allow-client-san", "a", kind=VerifierSettings)
    assert found.tls is not None
    assert found.tls.asks_clients
    assert len(found.first) == 1
    assert listens(*flags).first == []  # a draft service may be open to all that its CA vouches for


def test_names_come_from_flags_and_from_the_environment(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    assert made(DraftSettings, "--allow-client-san", "a,b", "--allow-client-san", "c").allow_client_san == (
        "a",
        "b",
        "c",
    )
    for name, value in {"TLS_CERT": files.cert, "TLS_KEY": files.key, "ALLOW_CLIENT_SAN": "a, spiffe://b"}.items():
        monkeypatch.setenv(f"OUTRIDER_{name}", value)
    settings = made(VerifierSettings)
    assert settings.allow_client_san == ("a", "spiffe://b")
    assert str(settings.tls_cert) == files.cert


def test_the_way_to_verifiers_is_tls_or_local_or_meant(files: Files) -> None:
    def way(*flags: str) -> Any:
        return verifier_tls(made(DraftSettings, *flags))

    def refused(*flags: str) -> str:
        with pytest.raises(SettingsError) as caught:
            way(*flags)
        return str(caught.value)

    assert way() is None
    assert way("--verifier", "unix:/run/a.sock,127.0.0.1:1") is None
    assert "--verifier box:1 is not a loopback address" in refused("--verifier", "127.0.0.1:1,box:1")
    assert way("--verifier", "box:1", "--plaintext") is None
    whole = ("--verifier-tls-ca", files.ca, "--verifier-tls-cert", files.cert, "--verifier-tls-key", files.key)
    assert way("--verifier", "box:1", *whole, "--verifier-tls-name", "v").name == "v"
    assert way("--verifier", "box:1", "--plaintext", *whole) is not None
    assert refused(*whole[:4]) == "--verifier-tls-cert needs --verifier-tls-key"
    assert refused("--verifier-tls-name", "v") == "--verifier-tls-name needs --verifier-tls-ca"
    assert "has no PEM certificate" in refused("--verifier-tls-ca", files.tokens)


async def test_a_client_speaks_plaintext_to_other_machines_only_where_it_is_told_to(files: Files) -> None:
    with pytest.raises(ValueError, match=r"box:1 is not a loopback address.*plaintext=True"):
        AsyncClient(["127.0.0.1:1", "box:1"])
    with pytest.raises(ValueError, match="No such file"):
        AsyncClient("box:1", tls=TLS("/no"))
    for client in (
        AsyncClient("box:1", tls=TLS()),
        AsyncClient("box:1", plaintext=True),
        AsyncClient("127.0.0.1:1", token_file=files.tokens),
    ):
        await client.close()
