"""Logs of the services: one JSON object a line, on standard output.

Lines of Python's own logging (our gRPC frame writes those, and libraries do) and warnings come out in the same form.
Logging never waits for a reader: see `outrider.log_queue`.
"""

import json
import logging
import sys
from datetime import UTC, datetime

import structlog
from structlog.typing import Processor

from outrider.log_queue import take_over
from outrider.trace_context import add_trace_ids


def configure_logging(service: str, level: str = "info") -> None:
    """Sets logging up for the process. Every line carries the service's name, a level and an ISO time in UTC, and where
    it is of a call that stands in a trace, the ids of that.
    """

    def dropped(lines: int) -> str:
        now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        said = {"event": "log lines dropped", "lines": lines, "level": "warning", "service": service, "timestamp": now}
        return json.dumps(said)

    take_over(dropped, lambda lines: f"{service}: {lines} lines dropped here")
    threshold = logging.getLevelNamesMapping()[level.upper()]
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        add_trace_ids,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
        structlog.processors.format_exc_info,
    ]
    structlog.configure(
        processors=[*shared, structlog.processors.JSONRenderer()],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stdout),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.JSONRenderer(),
            ],
        )
    )
    # Libraries' warnings are worth a line; what else they say is not.
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("outrider").setLevel(threshold)
    logging.captureWarnings(True)
    structlog.contextvars.bind_contextvars(service=service)
