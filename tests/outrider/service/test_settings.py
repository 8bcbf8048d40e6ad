"""Wrong flags and variables are named, and plaintext leaves the machine only on request."""

from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from draft_service.app import verifier_tls
from draft_service.settings import DraftSettings
from outrider.client import TLS, AsyncClient
from outrider.environment import SERVICE_SETTINGS
from outrider.rpc.auth import Authentication
from outrider.rpc.tls import ServerTLS
from outrider.service.settings import ServiceSettings, SettingsError, listening
from tests.certificates import Authority
from verifier_service.settings import VerifierSettings


class Files:
    """An authority, a certificate, its key, and tokens."""

    def __init__(self, folder: Path) -> None:
        authority = Authority(folder / "pki")
        server = authority.issue("server", file="server")
        self.ca, self.cert, self.key = (str(path) for path in (authority.pem, server.cert, server.key))
        self.tls = ("--tls-cert", self.cert, "--tls-key", self.key)
        self.tokens = str(folder / "tokens")
        Path(self.tokens).write_text("a-token-of-some-length\n")


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def parse(kind: type[ServiceSettings], *flags: str) -> Any:
    return kind.from_command_line(["--model", "m", *flags], program="test")


def listens(*flags: str, kind: type[ServiceSettings] = DraftSettings) -> tuple[ServerTLS | None, list[Authentication]]:
    return listening(parse(kind, *flags))


def refusal(*flags: str, kind: type[ServiceSettings] = DraftSettings) -> str:
    with pytest.raises(SettingsError) as caught:
        listens(*flags, kind=kind)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("kind", [DraftSettings, VerifierSettings])
@pytest.mark.parametrize("address", ["0.0.0.0:1", "[::]:1", "box:1"])
def test_plaintext_leaves_the_machine_only_on_request(files: Files, kind: type[ServiceSettings], address: str) -> None:
    refused = refusal("--listen", address, kind=kind)
    assert f"--listen {address} is not a loopback address" in refused
    assert "--plaintext" in refused
    assert listens("--listen", address, "--plaintext", kind=kind)[0] is None
    assert listens("--listen", address, *files.tls, kind=kind)[0] is not None
    for local in ("127.0.0.1:0", "unix:/run/outrider.sock"):
        assert listens("--listen", local, kind=kind) == (None, [])


def test_a_flag_without_the_flag_or_the_file_that_it_needs_is_refused(files: Files) -> None:
    assert refusal("--tls-cert", files.cert) == "--tls-cert needs --tls-key"
    assert "--tls-client-ca needs --tls-cert" in refusal("--tls-client-ca", files.ca)
    assert "--allow-client-san needs --tls-client-ca" in refusal(*files.tls, "--allow-client-san", "a")
    assert refusal("--client-burst", "3") == "--client-burst needs --client-rate"
    for flags in (("--tls-cert", "/no", "--tls-key", files.key), (*files.tls, "--tls-client-ca", "/no")):
        assert "/no: No such file" in refusal(*flags)
    assert "--auth-token-file: /no: No such file" in refusal("--auth-token-file", "/no")


def test_a_verifier_requires_allowed_names_beside_the_ca(files: Files) -> None:
    flags = (*files.tls, "--tls-client-ca", files.ca)
    assert "--tls-client-ca needs --allow-client-san" in refusal(*flags, kind=VerifierSettings)
    tls, first = listens(*flags, "--allow-client-san", "a", kind=VerifierSettings)
    assert tls is not None
    assert tls.requires_client_certificate
    assert len(first) == 1
    assert listens(*flags)[1] == []  # a draft service may admit every certificate of its CA


def test_values_come_from_flags_and_from_the_environment(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ("--allow-client-san", "a,b", "--allow-client-san", "c")
    assert parse(DraftSettings, *flags).allow_client_san == ("a", "b", "c")
    for name, value in {"TLS_CERT": files.cert, "TLS_KEY": files.key, "ALLOW_CLIENT_SAN": "a, spiffe://b"}.items():
        monkeypatch.setenv(f"OUTRIDER_{name}", value)
    settings = parse(VerifierSettings)
    assert settings.allow_client_san == ("a", "spiffe://b")
    assert str(settings.tls_cert) == files.cert


def test_a_verifier_elsewhere_needs_tls_or_plaintext_on_request(files: Files) -> None:
    def connection(*flags: str) -> Any:
        return verifier_tls(parse(DraftSettings, *flags))

    assert connection() is None
    assert connection("--verifier", "unix:/run/a.sock,127.0.0.1:1") is None
    assert connection("--verifier", "box:1", "--plaintext") is None
    whole = ("--verifier-tls-ca", files.ca, "--verifier-tls-cert", files.cert, "--verifier-tls-key", files.key)
    assert connection("--verifier", "box:1", *whole, "--verifier-tls-name", "v").name == "v"
    assert connection("--verifier", "box:1", "--plaintext", *whole) is not None
    for flags, message in (
        (("--verifier", "127.0.0.1:1,box:1"), "--verifier box:1 is not a loopback address"),
        (whole[:4], "^--verifier-tls-cert needs --verifier-tls-key$"),
        (("--verifier-tls-name", "v"), "^--verifier-tls-name needs --verifier-tls-ca, which"),
        (("--verifier-tls-ca", files.tokens), "has no PEM certificate"),
    ):
        with pytest.raises(SettingsError, match=message):
            connection(*flags)


async def test_a_client_of_another_machine_needs_tls_or_plaintext_on_request(files: Files) -> None:
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


@pytest.mark.parametrize(
    ("flags", "variables", "message"),
    [
        ([], {}, "test: --model is required, or OUTRIDER_MODEL in the environment"),
        (["--model", "m", "--max-gamma", "x"], {}, "test: --max-gamma is 'x'; it must be a whole number"),
        (["--model", "m"], {"MAX_GAMMA": "x"}, "test: OUTRIDER_MAX_GAMMA is 'x'; it must be a whole number"),
        (
            ["--model=m", "--max-message-bytes=4294967296"],
            {},
            "test: --max-message-bytes is '4294967296'; it must be at most 2147483647",
        ),
        (
            ["--model=m"],
            {"MAX_STOP_STRINGS": "4294967296"},
            "test: OUTRIDER_MAX_STOP_STRINGS is '4294967296'; it must be at most 2147483647",
        ),
        (["--model=m", "--threads=100000"], {}, "test: --threads is '100000'; it must be at most 4096"),
        (["--model=m", "--max-gama=4"], {}, "there is no flag --max-gama; did you mean --max-gamma?"),
        (["--model=m", "--verifier=box:0"], {}, "--verifier: the port of 'box:0' is 0; it must be 1 to 65535"),
        (["--model=m", "--listen=box"], {}, "test: --listen: 'box' is not HOST:PORT, for example 127.0.0.1:50051"),
    ],
)
def test_a_wrong_setting_is_named_as_it_was_given(
    flags: list[str],
    variables: dict[str, str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(f"OUTRIDER_{name}", value)
    with pytest.raises(SystemExit) as caught:
        DraftSettings.from_command_line(flags, program="test")
    assert caught.value.code == 2
    assert capsys.readouterr().err.endswith(message + "\n")


def test_a_variable_that_nothing_reads_is_logged_with_the_nearest_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one of the other service or of a command, which may share the environment, nor one of Kubernetes."""
    unknown = {"KV_CACH_MB": "OUTRIDER_KV_CACHE_MB", "GENERAT_DRAFT": None, "ZEBRA": None}
    of_others = [
        "GAMMA",
        "TENSOR_PARALLEL_SIZE",
        "SERVE_MAX_SEQUENCES",
        "VERIFIER_SERVICE_HOST",
        "VERIFIER_PORT_50052_TCP_ADDR",
    ]
    for name in (*unknown, *of_others):
        monkeypatch.setenv(f"OUTRIDER_{name}", "8")
    for kind in (DraftSettings, VerifierSettings):
        with capture_logs() as lines:
            parse(kind).warn_of_variables()
        found = {line["variable"].removeprefix("OUTRIDER_"): line.get("nearest") for line in lines}
        assert found == unknown


def test_the_list_of_settings_is_that_of_both_services() -> None:
    """A client's installation has no services, and warns of variables by this list."""
    assert {*DraftSettings.model_fields, *VerifierSettings.model_fields} == SERVICE_SETTINGS
