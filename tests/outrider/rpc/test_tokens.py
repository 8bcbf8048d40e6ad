"""A token is taken whole or not at all, follows its file, and is nowhere to be read."""

import logging
from pathlib import Path

import grpc
import pytest

from outrider.rpc.auth import LEAST_CHARS, OwnToken, Tokens
from outrider.rpc.errors import RequestError
from outrider.rpc.tls import FileProblem
from tests.certificates import write

FIRST, SECOND = "first-token-0123456789", "second.token~0123456789=="


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(f"# of the clients\n{FIRST}\n\n  {SECOND}\n")
    return path


def bearing(*values: str) -> list[tuple[str, str | bytes]]:
    return [("user-agent", "test"), *(("authorization", value) for value in values)]


def refusal(tokens: Tokens, *values: str) -> str:
    with pytest.raises(RequestError) as caught:
        tokens.check(bearing(*values))
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED")
    assert not any(value[7:] in str(caught.value) for value in values if len(value) > 8)
    return caught.value.message


def test_each_token_of_the_file_is_taken_and_tells_its_clients_apart(file: Path) -> None:
    tokens = Tokens(file)
    names = [tokens.check(bearing(f"{scheme} {token}")) for token in (FIRST, SECOND) for scheme in ("Bearer", "bearer")]
    assert names[0] == names[1] != names[2] == names[3]
    assert not any(token in name for token in (FIRST, SECOND) for name in names)


@pytest.mark.parametrize(
    "token",
    [
        FIRST[:-1],
        FIRST[:-1] + "x",
        "x" + FIRST[1:],
        FIRST + "0",
        FIRST[1:],
        FIRST.upper(),
        "",
        f" {FIRST}",
        f"{FIRST} ",
        "# of the clients",
        "é" * 20,
    ],
)
def test_what_is_nearly_a_token_is_none(file: Path, token: str) -> None:
    assert "none of those" in refusal(Tokens(file), f"Bearer {token}")


def test_a_call_bears_one_token_by_its_scheme(file: Path) -> None:
    tokens = Tokens(file)
    assert "bears no token" in refusal(tokens)
    assert "is not 'Bearer TOKEN'" in refusal(tokens, FIRST)
    assert "is not 'Bearer TOKEN'" in refusal(tokens, f"Basic {FIRST}")
    assert "is not 'Bearer TOKEN'" in refusal(tokens, f"Bearer {FIRST}", f"Bearer {SECOND}")


def test_a_changed_file_holds_from_the_next_call_on(file: Path) -> None:
    tokens, own = Tokens(file), OwnToken(file)
    assert own.metadata() == (("authorization", f"Bearer {FIRST}"),)
    write(file, f"{SECOND}\n{'n' * LEAST_CHARS}\n".encode())
    refusal(tokens, f"Bearer {FIRST}")
    assert tokens.check(bearing(f"Bearer {'n' * LEAST_CHARS}"))
    assert own.metadata() == (("authorization", f"Bearer {SECOND}"),)


def test_a_file_that_makes_no_sense_changes_nothing_and_shows_nothing(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = Tokens(file)
    with caplog.at_level(logging.DEBUG):
        for content in (b"", b"# all of them are gone\n", b"too-short\n", b"not a token, but some words\n"):
            write(file, content)
            assert tokens.check(bearing(f"Bearer {FIRST}"))
        file.unlink()
        assert tokens.check(bearing(f"Bearer {FIRST}"))
        assert tokens.check(bearing(f"Bearer {FIRST}"))
    assert len(caplog.records) == 5, "a line for each change, and not for each call"
    assert "too-short" not in caplog.text
    assert "some words" not in caplog.text
    write(file, f"{SECOND}\n".encode())
    refusal(tokens, f"Bearer {FIRST}")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "holds no token"),
        (b"\n# nothing\n", "holds no token"),
        (b"fifteen-letters\n", "line 1 has 15 characters; a token has at least 16"),
        (f"{FIRST}\n\nsome words that are no token\n".encode(), "line 3 is no token"),
        ("ünïcödé-tokens-are-none".encode(), "no text in ASCII"),
    ],
)
def test_a_file_without_tokens_is_refused_at_the_start(file: Path, content: bytes, says: str) -> None:
    write(file, content)
    for make in (Tokens, OwnToken):
        with pytest.raises(FileProblem, match=says):
            make(file)
