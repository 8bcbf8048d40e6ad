"""`traceparent` goes from metadata to metadata and into log lines as W3C Trace Context has it."""

from contextvars import copy_context
from typing import Any

import pytest

from outrider.service.tracing import Tracing, add_trace_ids, outgoing

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def passed_on(metadata: Any) -> Any:
    """The metadata and the log line of a call that came with these."""

    def call() -> Any:
        with Tracing().call("x", metadata) as trace:
            assert not trace.is_recorded
            return outgoing(), add_trace_ids(None, "info", {})

    return copy_context().run(call)


@pytest.mark.parametrize("flags", ["00", "01"])
def test_it_goes_from_metadata_to_metadata_and_into_log_lines(flags: str) -> None:
    text = f"00-{TRACE}-{SPAN}-{flags}"
    ids = {"trace_id": TRACE, "span_id": SPAN}
    assert passed_on([("user-agent", "x"), ("traceparent", text)]) == ((("traceparent", text),), ids)
    of_later_version = passed_on([("traceparent", f"01-{TRACE}-{SPAN}-{flags}-more")])
    assert of_later_version == ((("traceparent", text),), ids), "what is known of it is read"
    vendor = (("traceparent", text), ("tracestate", "a=b"))
    assert passed_on(vendor)[0] == vendor


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
def test_what_makes_no_sense_is_no_trace(text: str) -> None:
    assert passed_on([("traceparent", text)]) == (None, {})
