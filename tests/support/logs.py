"""What a process that runs within a test logs."""

import contextlib
import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import structlog

from engines import logs
from engines.observability import LogLevel


class Said(io.StringIO):
    """Lines of JSON, as machines get them."""

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.getvalue().splitlines()]

    @property
    def events(self) -> list[str]:
        return [line["event"] for line in self.lines]


@contextlib.contextmanager
def listening(level: LogLevel = "info") -> Iterator[Said]:
    """All that is logged within the block; afterwards logging is as it was."""
    stream = Said()
    logs.configure(level, stream)
    try:
        yield stream
    finally:
        structlog.reset_defaults()
        root = logging.getLogger()
        for handler in [each for each in root.handlers if isinstance(each, logs.LibraryHandler)]:
            root.removeHandler(handler)
