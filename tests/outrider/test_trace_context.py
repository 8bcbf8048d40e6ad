"""`traceparent` is read as W3C Trace Context has it, and what is none is left alone."""

import subprocess
import sys

import pytest

from outrider.service.tracing import TraceContext, add_trace_ids, current, incoming, outgoing

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize("is_sampled", [False, True])
def test_what_is_read_is_what_is_written(is_sampled: bool) -> None:
    text = f"00-{TRACE}-{SPAN}-0{int(is_sampled)}"
    context = TraceContext.parse(text)
    assert context == TraceContext(int(TRACE, 16), int(SPAN, 16), is_sampled)
    assert str(context) == text


def test_of_a_later_version_what_is_known_is_read() -> None:
    assert TraceContext.parse(f"01-{TRACE}-{SPAN}-03-more") == TraceContext(int(TRACE, 16), int(SPAN, 16), True)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "00",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01-more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[1:]}-{SPAN}-01",
        "00-" + "é" * 32 + f"-{SPAN}-01",
    ],
)
def test_what_makes_no_sense_is_no_trace(text: str) -> None:
    assert TraceContext.parse(text) is None
    assert incoming([("traceparent", text)]) is None


def test_it_goes_from_metadata_to_metadata_and_into_log_lines() -> None:
    text = f"00-{TRACE}-{SPAN}-01"
    context = incoming([("user-agent", "x"), ("traceparent", text)])
    assert incoming(None) is None
    assert incoming([("traceparent-bin", text)]) is None
    assert outgoing() is None
    assert add_trace_ids(None, "info", {"event": "x"}) == {"event": "x"}
    token = current.set(context)
    try:
        assert outgoing() == (("traceparent", text),)
        assert add_trace_ids(None, "info", {}) == {"trace_id": TRACE, "span_id": SPAN}
    finally:
        current.reset(token)


def test_nobody_imports_opentelemetry_who_does_not_ask_for_it() -> None:
    program = (
        "import sys; from outrider.service.tracing import Tracing\n"
        "with Tracing().call('x', ()) as trace: assert not trace.is_recorded\n"
        "assert 'opentelemetry' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
