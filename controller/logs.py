"""Structured logs: one line an event, as JSON when nobody watches and as coloured text on a terminal."""

import logging
import sys

import structlog


def configure(level: int = logging.INFO) -> None:
    """Set up logging for this process. Prompts, tokens and secrets are never passed to it."""
    pretty = sys.stderr.isatty()
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.dict_tracebacks if not pretty else structlog.dev.set_exc_info,
            structlog.dev.ConsoleRenderer() if pretty else structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
    )
