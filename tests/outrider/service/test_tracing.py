"""`traceparent` is forwarded in metadata and added to log lines, as in W3C Trace Context."""

from contextvars import copy_context
from typing import Any

import pytest

from outrider.service.tracing import Tracing, add_trace_ids, outgoing

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def forwarded(metadata: Any) -> Any:
    """The outgoing metadata and the log line of a call with this metadata."""

    def call() -> Any:
        with Tracing().call("x", metadata) as trace:
            assert not trace.is_recorded
            return outgoing(), add_trace_ids(None, "info", {})

    return copy_context().run(call)


@pytest.mark.parametrize("flags", ["00", "01"])
def test_traceparent_is_forwarded_and_logged(flags: str) -> None:
    text = f"00-{TRACE}-{SPAN}-{flags}"
    ids = {"trace_id": TRACE, "span_id": SPAN}
    assert forwarded([("user-agent", "x"), ("traceparent", text)]) == ((("traceparent", text),), ids)
    later_version = forwarded([("traceparent", f"01-{TRACE}-{SPAN}-{flags}-more")])
    assert later_version == ((("traceparent", text),), ids), "its known part is read"
    vendor = (("traceparent", text), ("tracestate", "a=b"))
    assert forwarded(vendor)[0] == vendor


@pytest.mark.parametrize(
    "text",
    [
        "",
        f"00-{TRACE}-{SPAN}",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        "00-" + "é" * 32 + f"-{SPAN}-01",
    ],
)
def test_an_invalid_traceparent_is_ignored(text: str) -> None:
    assert forwarded([("traceparent", text)]) == ((), {})
