"""`outrider chat`: a conversation is sent whole each time, until it starts anew."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from outrider.cli import chat, main
from outrider.client import Chunk, Message
from outrider.client.errors import typed
from outrider.rpc.errors import invalid_field


class Echo:
    """A fake client: answers with the number of requests, and refuses the message "long"."""

    def __init__(self) -> None:
        self.sent: list[list[Message]] = []

    def __enter__(self) -> "Echo":
        return self

    def __exit__(self, *_: object) -> None: ...

    def get_model(self, timeout: float) -> Any:
        return SimpleNamespace(target=SimpleNamespace(name="a model", has_chat_template=True))

    def generate(self, messages: list[Message], **options: Any) -> Iterator[Chunk]:
        if messages[-1].content == "long":
            raise typed(invalid_field("prompt", "has 9 tokens, at most 8"))
        self.sent.append(messages)
        for part in ("answer ", str(len(self.sent))):
            yield Chunk(0, part, (), (), (), (), ())


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
    assert "has no chat template: use `outrider generate`" in done.stderr
