"""The path of verification that was asked for is the one that judges; one that cannot is refused at the start."""

import queue
from typing import Any

import pytest

from kernels.paths import VerifyPath
from kernels.sampling import SamplingParams
from kernels.verify import Rule, implementations, verify
from outrider.runtime.device import find_device
from outrider.service.settings import SettingsError
from tests.cluster import Cluster
from tests.project.tree import ROOT
from tests.verifier_service.streams import PROMPT
from tests.verifier_service.test_sequence import a_round, make
from verifier_service import target_runner
from verifier_service.app import build_engine, find_path
from verifier_service.engine import Open, Submit
from verifier_service.sequence import Reply
from verifier_service.settings import VerifierSettings

TARGET = str(ROOT / "models" / "demo" / "target")


class Tally:
    """An observer."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.rounds: list[tuple[Rule, int, int]] = []

    def verified(self, seconds: float) -> None:
        self.seconds.append(seconds)

    def passed(self, tokens: int, sequences: int, seconds: float) -> None:
        assert sequences == 1

    def waited(self, seconds: float) -> None:
        assert seconds >= 0

    def begun(self, tokens: int, cached: int) -> None:
        assert cached == 0

    def preempted(self) -> None:
        raise AssertionError("one sequence gives way to nobody")

    def checked(self, intact: bool) -> None:
        assert intact

    def capped(self, gamma: int) -> None: ...

    def judged(self, rule: Rule, drafted: int, accepted: int) -> None:
        self.rounds.append((rule, drafted, accepted))


def test_a_path_that_cannot_run_is_one_line_and_exit_code_2() -> None:
    with Cluster() as cluster:
        service = cluster.verifier(flags="--verify-path triton", env={"TRITON_INTERPRET": ""})
        assert service.process.wait(60) == 2
    lines = service.log_lines()
    assert not any('"listening"' in line for line in lines)
    assert [line for line in lines if not line.startswith("{")] == [
        "verifier_service: --verify-path triton: triton cannot judge on cpu: it needs a CUDA device, "
        "or TRITON_INTERPRET=1 in the environment to interpret it, slowly"
    ]


def test_a_name_that_is_no_path_is_refused_with_those_that_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        VerifierSettings.from_command_line(["--model", "m", "--verify-path", "fast"], program="verifier_service")
    assert caught.value.code == 2
    told = capsys.readouterr().err
    assert "--verify-path" in told
    assert all(name in told for name in ("auto", "torch", "triton"))


def test_auto_is_the_fastest_on_the_device() -> None:
    settings = VerifierSettings.from_command_line(["--model", "m", "--device", "cpu"], program="verifier_service")
    assert find_device(settings.device).type == "cpu"
    assert find_path(settings).name == "torch"


def test_a_path_that_fails_its_rehearsal_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> Any:
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC environment variable.")

    monkeypatch.setattr("kernels.paths.verify", broken)
    settings = VerifierSettings.from_command_line(["--model", "m", "--device", "cpu"], program="verifier_service")
    with pytest.raises(SettingsError) as caught:
        find_path(settings)
    assert str(caught.value) == (
        "--verify-path auto: torch cannot judge on cpu: RuntimeError: Failed to find C compiler."
    )


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_the_engine_judges_by_the_path_it_was_given(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str | None] = []

    def noted(logits: Any, proposals: Any, implementation: str | None = None) -> Any:
        asked.append(implementation)
        return verify(logits, proposals, implementation)

    monkeypatch.setattr(target_runner, "verify", noted)
    settings = VerifierSettings.from_command_line(
        ["--model", TARGET, "--device", "cpu", "--max-sequences", "1", "--max-sequence-tokens", "32"],
        program="verifier_service",
    )
    tally = Tally()
    engine, _ = build_engine(settings, VerifyPath(name, "a test"), tally)
    replies: queue.SimpleQueue[Reply] = queue.SimpleQueue()
    sequence = make([])
    sequence.deliver = replies.put
    assert sequence.opening.sampling.law == SamplingParams()
    engine.start()
    try:
        engine.post(Open(sequence))
        engine.post(Submit(sequence, a_round(1, sequence.tokens, PROMPT)))
        reply = replies.get(timeout=30)
    finally:
        engine.stop()
    assert reply is not None
    assert asked == [name]
    assert name in implementations()
    assert len(tally.seconds) == 1
    assert tally.rounds == [(Rule.TOKENWISE, len(PROMPT), reply.verdict.accepted)]  # type: ignore[union-attr]
