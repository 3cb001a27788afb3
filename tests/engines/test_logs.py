import io
import json
import logging
import sys
from collections.abc import Iterator

import pytest
import structlog

from engines import logs
from tests.support.logs import Said, listening


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def said() -> Iterator[Said]:
    with listening() as said:
        yield said


def fail_over(prompt: str) -> None:
    held = {"prompt": prompt}
    raise ValueError(f"cannot serve {len(held)} prompts")


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()], ids=["for machines", "for people"])
def test_a_traceback_shows_where_it_failed_and_never_what_was_in_hand(stream: io.StringIO) -> None:
    logs.configure(stream=stream)
    secret = "-".join(["my", "secret", "prompt"])
    log = structlog.get_logger()
    try:
        fail_over(secret)
    except ValueError as error:
        log.exception("request_failed")
        log.error("background_task_failed", exc_info=error)
        logging.getLogger("somebody.elses").error("it failed", exc_info=True)
    said = stream.getvalue()
    assert said.count("fail_over") >= 3
    assert said.count("cannot serve 1 prompts") >= 3
    assert secret not in said


def test_what_libraries_warn_of_is_a_line_like_any_other(said: Said) -> None:
    logging.getLogger("somebody.elses").warning("two\nlines of %s", "text")
    logging.getLogger("somebody.elses").info("chatter")
    (line,) = said.lines
    assert line | {"event": "two\nlines of text", "level": "warning", "logger": "somebody.elses"} == line
    assert "timestamp" in line


def test_a_line_of_a_task_that_serves_a_request_names_it(said: Said) -> None:
    with structlog.contextvars.bound_contextvars(request_id="r1", trace_id="t1"):
        structlog.get_logger().info("context_copied")
        logging.getLogger("somebody.elses").warning("slow")
    structlog.get_logger().info("engine_joined")
    assert [line.get("request_id") for line in said.lines] == ["r1", "r1", None]
    assert [line.get("trace_id") for line in said.lines] == ["t1", "t1", None]


@pytest.mark.parametrize(("level", "expected"), [("debug", 4), ("info", 3), ("warning", 2), ("error", 1)])
def test_what_is_less_severe_than_the_level_is_not_logged(level: logs.LogLevel, expected: int) -> None:
    stream = io.StringIO()
    logs.configure(level, stream)
    log = structlog.get_logger()
    log.debug("one")
    log.info("two")
    log.warning("three")
    log.error("four")
    assert len(stream.getvalue().splitlines()) == expected


def test_setting_logging_up_again_says_nothing_twice(said: Said) -> None:
    logs.configure(stream=said)
    logging.getLogger("somebody.elses").warning("once")
    assert len(said.lines) == 1


def test_a_process_that_somebody_else_has_set_up_keeps_its_handlers() -> None:
    before = list(logging.getLogger().handlers)
    logs.configure(stream=sys.stderr, libraries=False)
    assert logging.getLogger().handlers == before


def test_a_line_is_json_whatever_is_in_it(said: Said) -> None:
    structlog.get_logger().info("odd", value=b"\xff\n", other={"a": object()})
    assert json.loads(said.getvalue())["event"] == "odd"
    assert said.getvalue().count("\n") == 1
