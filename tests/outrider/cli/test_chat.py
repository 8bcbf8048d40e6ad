"""`outrider chat`: a conversation is sent whole each time, until it starts anew."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from outrider.cli import chat, main
from outrider.client import Chunk, Finished, Message
from outrider.client.errors import typed
from outrider.rpc.errors import draining, invalid_field
from protos.outrider.v1 import draft_service_pb2, sampling_pb2


class Echo:
    """A fake client: answers with the number of requests, and refuses the message "long"."""

    def __init__(self) -> None:
        self.sent: list[list[Message]] = []

    def __enter__(self) -> "Echo":
        return self

    def __exit__(self, *_: object) -> None: ...

    def get_model(self, timeout: float) -> Any:
        model = SimpleNamespace(name="a model", has_chat_template=True)
        return SimpleNamespace(model=model, target=model)

    def generate(self, messages: list[Message], **options: Any) -> Iterator[Chunk | Finished]:
        if messages[-1].content == "long":
            raise typed(invalid_field("prompt", "has 9 tokens, at most 8"))
        if messages[-1].content == "gone":
            raise typed(draining())
        self.sent.append(messages)
        for part in ("answer ", str(len(self.sent))):
            yield Chunk(0, part, (), (), (), (), ())
        reason = (
            sampling_pb2.FINISH_REASON_LENGTH
            if messages[-1].content == "cut"
            else sampling_pb2.FINISH_REASON_STOP_TOKEN
        )
        yield Finished.of(draft_service_pb2.GenerateFinished(finish_reason=reason))


def test_a_conversation_is_sent_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Echo()
    monkeypatch.setattr(chat, "connected", lambda *_: client)
    done = CliRunner().invoke(main, ["chat", "--system", "s"], input="one\n\nlong\ntwo\n/new\nthree\n")
    assert (done.exit_code, done.stdout) == (0, "answer 1\nanswer 2\nanswer 3\n")
    assert "at most 8; /new starts a new conversation" in done.stderr
    first = [Message("system", "s"), Message("user", "one")]
    second = [*first, Message("assistant", "answer 1"), Message("user", "two")]
    assert client.sent == [first, second, [Message("system", "s"), Message("user", "three")]]


def test_a_model_without_a_chat_template_is_refused(draft_address: str) -> None:
    done = CliRunner().invoke(main, ["chat", "--draft", draft_address], input="")
    assert done.exit_code == 1
    assert "has no chat template; use `outrider generate`" in done.stderr


def test_a_command_is_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Echo()
    monkeypatch.setattr(chat, "connected", lambda *_: client)
    done = CliRunner().invoke(main, ["chat"], input="/help\n/usr/bin is a path\ncut\n/quit\nnever sent\n")
    assert (done.exit_code, done.stdout) == (0, "answer 1\nanswer 2\n")
    assert "there is no command /help. /new starts a new conversation; " in done.stderr
    assert done.stderr.count("the answer is cut off at --max-new-tokens") == 1


def test_a_failed_call_ends_the_chat_only_in_a_script(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Echo()
    monkeypatch.setattr(chat, "connected", lambda *_: client)
    done = CliRunner().invoke(main, ["chat"], input="gone\ntwo\n")
    assert (done.exit_code, done.stdout) == (1, "")
    monkeypatch.setattr(chat, "_is_interactive", lambda: True)
    typed_lines: list[str | type[BaseException]] = ["one", "gone", KeyboardInterrupt, "two", EOFError]

    def type_line(_: str) -> str:
        line = typed_lines.pop(0)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", type_line)
    done = CliRunner().invoke(main, ["chat"])
    assert (done.exit_code, done.stdout) == (0, "answer 1\nanswer 2\n")
    assert "shutting down" in done.stderr
    assert "Ctrl-D ends the chat" in done.stderr
    assert client.sent[-1] == [Message("user", "one"), Message("assistant", "answer 1"), Message("user", "two")]
