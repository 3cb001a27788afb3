"""Structured logs: one line an event, as JSON when nobody watches and as coloured text on a terminal."""

import logging
import sys
from collections.abc import Sequence
from typing import TextIO

import structlog
from structlog.typing import Processor

# Local variables stay out of tracebacks: in this program they are prompts, keys and bodies of clients.
FOR_MACHINES: Sequence[Processor] = (
    structlog.processors.ExceptionRenderer(structlog.tracebacks.ExceptionDictTransformer(show_locals=False)),
    structlog.processors.JSONRenderer(),
)
FOR_PEOPLE: Sequence[Processor] = (
    structlog.dev.set_exc_info,
    structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback),
)


def configure(level: int = logging.INFO, stream: TextIO | None = None) -> None:
    """Set up logging for this process, to `stream` or standard error. Prompts, tokens and secrets are never passed
    to it."""
    stream = stream or sys.stderr
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            *(FOR_PEOPLE if stream.isatty() else FOR_MACHINES),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(file=stream),
    )
