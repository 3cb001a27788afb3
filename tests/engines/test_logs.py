import io
from collections.abc import Iterator

import pytest
import structlog

from controller import logs


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    yield
    structlog.reset_defaults()


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
    said = stream.getvalue()
    assert said.count("fail_over") >= 2
    assert said.count("cannot serve 1 prompts") >= 2
    assert secret not in said
