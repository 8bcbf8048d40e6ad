"""`outrider info` against a real pair, and the error of a client that calls a verifier."""

import json
from contextlib import ExitStack

import grpc
import pytest
from click.testing import CliRunner, Result

from outrider.cli import main
from outrider.client import Client, OutriderError
from tests.cluster import Cluster, wait_healthy, wait_until
from tests.project.tree import ROOT
from tests.verifier_service.streams import Stream


def _info(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["info", *arguments], prog_name="outrider")


def test_a_verifier_shows_model_health_and_load(verifier_address: str) -> None:
    document = json.loads(_info(verifier_address, "--json").stdout)
    assert (document["address"], document["service"]) == (verifier_address, "verifier")
    assert document["model"]["limits"]["max_sequences"] == 64
    assert "coupled" in document["model"]["rules"]
    assert document["health"] == {"readiness": "SERVING", "liveness": "SERVING", "startup": "SERVING"}
    assert document["load"]["running"] >= 0
    assert 0 <= document["load"]["kv_usage"] <= 1
    shown = _info(verifier_address)
    assert (shown.exit_code, shown.stderr) == (0, "")
    assert shown.stdout.startswith(f"verifier at {verifier_address}: ready\n")
    for part in ("context_length", "max_sequence_tokens", "of the KV cache in use"):
        assert part in shown.stdout


def test_a_verifier_of_an_encoder_decoder_model_shows_its_load() -> None:
    with Cluster() as cluster:
        verifiers = [cluster.verifier(model=ROOT / "models" / name / "target") for name in ("translation", "speech")]
        wait_healthy(*verifiers)
        for verifier in verifiers:
            shown = _info(verifier.address, "--json")
            assert (shown.exit_code, shown.stderr) == (0, "")
            assert json.loads(shown.stdout)["load"]["one_token_ms"] > 0


def test_a_full_verifier_shows_all_but_its_load() -> None:
    with Cluster() as cluster, ExitStack() as held:
        verifier = cluster.verifier(flags="--max-sequences 1 --max-waiting 1")
        wait_healthy(verifier)
        channel = held.enter_context(grpc.insecure_channel(verifier.address))
        for error in ("no token within 3 s", "queue"):
            wait_until(lambda: verifier.count("outrider_num_requests_waiting") == 0)
            stream = held.enter_context(Stream(channel))
            stream.open()
            stream.take()
            shown = _info(verifier.address, "--timeout", "6", "--json")
            assert shown.exit_code == 0, shown.stderr
            document = json.loads(shown.stdout)
            assert document["health"]["readiness"] == "SERVING"
            assert document["load"] is None
            assert error in document["load_error"]
        assert "load: unknown: " in _info(verifier.address).stdout


def test_a_draft_service_shows_both_models_and_its_drafters(draft_address: str) -> None:
    document = json.loads(_info(draft_address, "--json").stdout)
    assert document["service"] == "draft service"
    assert document["model"]["vocabulary_fingerprint"] == document["target"]["vocabulary_fingerprint"]
    assert document["default_drafter"] in document["drafters"]
    shown = _info(draft_address).stdout
    assert shown.startswith(f"draft service at {draft_address}: ready\n")
    assert "drafters: " in shown


def test_a_narrow_terminal_shows_whole_names(draft_address: str) -> None:
    """max_stop_string_c… and max_stop_stri… were all that it showed of two."""
    shown = CliRunner().invoke(main, ["info", draft_address], env={"COLUMNS": "48"}).stdout
    assert "max_stop_" in shown
    assert "…" not in shown


@pytest.mark.parametrize(
    ("address", "message"), [("127.0.0.1:1", "outrider: UNAVAILABLE"), ("box:1", "not a loopback")]
)
def test_an_unreachable_service_is_an_error_without_traceback(address: str, message: str) -> None:
    refused = _info(address, "--timeout", "2")
    assert refused.exit_code != 0
    assert message in refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_verifier_is_no_draft_service(verifier_address: str) -> None:
    with (
        Client(verifier_address) as client,
        pytest.raises(OutriderError, match=f"{verifier_address} is a verifier, not a draft service"),
    ):
        client.complete("x")
