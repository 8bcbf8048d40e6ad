"""How the draft service is told of its verifiers: by flags and by the environment."""

from __future__ import annotations

import pytest

from draft_service.settings import DraftSettings


def verifiers(*flags: str) -> tuple[str, ...]:
    settings = DraftSettings.from_command_line(["--model", "m", *flags], program="draft_service")
    found: tuple[str, ...] = settings.verifier
    return found


def test_verifiers_are_named_by_one_flag_or_several_and_each_once() -> None:
    assert verifiers() == ("127.0.0.1:50052",)
    assert verifiers("--verifier", "a:1") == ("a:1",)
    assert verifiers("--verifier", "a:1, b:2", "--verifier", "c:3,a:1") == ("a:1", "b:2", "c:3")


def test_the_environment_takes_commas_too_and_flags_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_VERIFIER", "a:1,[::1]:2")
    assert verifiers() == ("a:1", "[::1]:2")
    assert verifiers("--verifier", "c:3") == ("c:3",)


@pytest.mark.parametrize(("given", "says"), [("a:1,b", "'b' is not HOST:PORT"), (",", "at least 1")])
def test_what_is_no_address_is_refused_by_name(given: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        verifiers("--verifier", given)
    error = capsys.readouterr().err
    assert "--verifier" in error
    assert says in error
