"""Structured logs: one line an event, as JSON when nobody watches and as coloured text on a terminal.

Prompts, tokens and secrets are never passed to a logger; `request_id` and `trace_id` are, by whoever knows them. In an
engine both are bound to the task that serves a request (`structlog.contextvars`), so that each of its lines has them.
"""

import logging
import sys
from collections.abc import Sequence
from typing import TextIO

import structlog
from structlog.typing import Processor

from engines.observability import LogLevel

# Local variables stay out of tracebacks: in this program they are prompts, keys and bodies of clients.
FOR_MACHINES: Sequence[Processor] = (
    structlog.processors.ExceptionRenderer(structlog.tracebacks.ExceptionDictTransformer(show_locals=False)),
    structlog.processors.JSONRenderer(),
)
FOR_PEOPLE: Sequence[Processor] = (
    structlog.dev.set_exc_info,
    structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback),
)
ON_EACH_LINE: Sequence[Processor] = (
    structlog.contextvars.merge_contextvars,
    structlog.processors.add_log_level,
    structlog.processors.TimeStamper(fmt="iso"),
)


class LibraryHandler(logging.StreamHandler[TextIO]):
    """Lines of libraries, which know only Python's own logging, in the form of all others."""


def configure(level: LogLevel = "info", stream: TextIO | None = None, *, libraries: bool = True) -> None:
    """Set up logging for this process, to `stream` or standard error.

    With `libraries`, what they warn of goes there too; a process that somebody else has set up keeps its own.
    """
    stream = stream or sys.stderr
    threshold = logging.getLevelNamesMapping()[level.upper()]
    renderers = FOR_PEOPLE if stream.isatty() else FOR_MACHINES
    structlog.configure(
        processors=[*ON_EACH_LINE, *renderers],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.PrintLoggerFactory(file=stream),
    )
    if libraries:
        _take_libraries_in(stream, max(threshold, logging.WARNING), renderers)


def _take_libraries_in(stream: TextIO, threshold: int, renderers: Sequence[Processor]) -> None:
    handler = LibraryHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *ON_EACH_LINE],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderers],
        )
    )
    handler.setLevel(threshold)
    root = logging.getLogger()
    for former in [each for each in root.handlers if isinstance(each, LibraryHandler)]:
        root.removeHandler(former)
    root.addHandler(handler)
