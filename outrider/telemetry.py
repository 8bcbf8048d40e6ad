"""Logs of the services: one JSON object a line, on standard output.

It knows nothing of what is logged.
"""

import logging
import sys

import structlog


def configure_logging(service: str, level: str = "info") -> None:
    """Sets structlog up for the process. Every line carries the service's name, a level and an ISO time in UTC."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.StackInfoRenderer(),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stdout),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service)
