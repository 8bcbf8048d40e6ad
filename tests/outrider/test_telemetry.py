"""Logs are one JSON object a line, whoever writes them."""

import json
import subprocess
import sys

PROGRAM = """
import logging, structlog
from outrider.service.logs import configure_logging
configure_logging("some_service")
structlog.get_logger().info("request", tokens=3)
structlog.get_logger().debug("too fine")
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("outrider.rpc.errors").exception("it broke")
"""


def test_every_line_is_json_with_service_level_and_time() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(line["event"], line["level"]) for line in lines] == [("request", "info"), ("it broke", "error")]
    assert lines[0]["tokens"] == 3
    assert "ZeroDivisionError" in lines[1]["exception"]
    assert all(line["service"] == "some_service" and line["timestamp"].endswith("Z") for line in lines)
    assert done.stderr == ""
