"""How real ranks meet, and what they do where the other one is a stranger, or gone before anything is loaded."""

import json
import socket
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from outrider.cli.pair import fixed
from outrider.cli.processes import ServiceProcess
from outrider.parallel.line import receive
from outrider.parallel.messages import TOKEN_BYTES, Greeting
from outrider.parallel.team import LEAD_KEY
from tests.outrider.parallel.started import FLAGS, TWO, ended_within, launch_rank, reason
from tests.outrider.runtime import tiny

SOON_S = 20.0
WAITING = timedelta(seconds=60)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer of as many tokens as it has."""
    folder = tiny.save(tiny.FAMILIES["llama"](), tmp_path_factory.mktemp("llama"))
    words = {f"w{i}": i for i in range(tiny.VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


def store(address: str, *, is_master: bool) -> dist.TCPStore:
    host, _, port = address.rpartition(":")
    return dist.TCPStore(host, int(port), 2, is_master, timeout=WAITING, wait_for_workers=not is_master)


def test_rank_0_turns_strangers_away_and_ends_where_a_rank_is_gone_before_the_load(
    model: Path,
) -> None:
    address = fixed("127.0.0.1:0")
    with launch_rank(0, address, model, "--listen", "127.0.0.1:0") as lead:
        lead.wait_listening()
        known = json.loads(store(address, is_master=False).get(LEAD_KEY))
        meeting = ("127.0.0.1", known["port"])
        token = bytes.fromhex(known["token"])
        # Not the token; no such rank; and rank 0 itself.
        for greeting in (Greeting(1, bytes(TOKEN_BYTES)), Greeting(2, token), Greeting(0, token)):
            with socket.create_connection(meeting, SOON_S) as stranger:
                stranger.sendall(greeting.pack())
                assert stranger.recv(1) == b""
        with socket.create_connection(meeting, SOON_S) as follower:
            follower.sendall(Greeting(1, token).pack())
            assert receive(follower, 5) == bytes(5), "a beat: it is taken in"
        assert ended_within(SOON_S, [lead]) == [1]
        assert reason(lead) == "verifier_service: rank 1 has gone: it closed its connection"


def test_a_follower_ends_where_rank_0_is_gone_before_the_load(model: Path) -> None:
    address = fixed("127.0.0.1:0")
    meeting, token = store(address, is_master=True), bytes(range(TOKEN_BYTES))
    with socket.create_server(("127.0.0.1", 0)) as listener, launch_rank(1, address, model) as follower:
        listener.settimeout(WAITING.total_seconds())
        meeting.set(LEAD_KEY, json.dumps({"port": listener.getsockname()[1], "token": token.hex()}))
        connection, _ = listener.accept()
        with connection:
            assert Greeting.unpack(receive(connection, Greeting.SIZE)) == Greeting(1, token)
        assert ended_within(SOON_S, [follower]) == [1]
        assert reason(follower) == "verifier_service: rank 0 has gone: it closed its connection"


def test_rank_0_says_what_another_one_died_of(model: Path) -> None:
    """Rank 0 is in the midst of its load by then, and waits for the other one's part in it."""
    address = fixed("127.0.0.1:0")
    with (
        launch_rank(0, address, model, "--listen", "127.0.0.1:0") as lead,
        launch_rank(1, address, model / "nowhere") as follower,
    ):
        assert ended_within(SOON_S, [lead, follower]) == [1, 1]
        why = reason(follower).removeprefix("verifier_service: ")
        assert str(model / "nowhere") in why
        assert reason(lead) == f"verifier_service: rank 1 has gone: {why}"


@pytest.mark.slow
def test_torchrun_starts_the_ranks_and_its_signal_ends_them_in_order(model: Path) -> None:
    """In all other tests of ranks the services are forked, with the variables that torchrun sets."""
    flags = ["--model", str(model), *FLAGS, *TWO, "--listen", "127.0.0.1:0"]
    arguments = ["torch.distributed.run", "--nproc-per-node", "2", "-m", "verifier_service", *flags]
    with ServiceProcess.launch(arguments) as ranks:
        ranks.wait_healthy()
        ranks.stop()
        events = [json.loads(line) for line in ranks.log_lines() if line.startswith("{")]
    (leading,) = (each for each in events if each["event"] == "leading")
    assert (leading["ranks"], leading["backend"]) == (2, "gloo")
    assert (leading["heads_per_rank"], leading["kv_heads_per_rank"]) == (2, 1)
    assert [each["rank"] for each in events if each["event"] == "stopped" and "rank" in each] == [1]
    assert len([each for each in events if each["event"] == "stopped"]) == 2
    assert [each for each in events if each["level"] == "error"] == []
