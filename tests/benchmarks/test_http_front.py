"""The servers of the benchmark of the HTTP front."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from benchmarks import http_front


def test_a_server_that_never_answers_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: str) -> Any:
        raise httpx.ConnectError("refused")

    monkeypatch.setattr(httpx, "get", refuse)
    monkeypatch.setattr("time.sleep", lambda _: None)
    with pytest.raises(TimeoutError, match=r"calendar does not answer at 127\.0\.0\.1"), http_front.server("calendar"):
        pass
