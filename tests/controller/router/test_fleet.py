"""What a router makes of engines' heartbeats and of the answers to its polls."""

import asyncio
from collections.abc import Callable
from contextlib import asynccontextmanager

import pytest

from controller.router.fleet import Fleet, Lease
from engines.errors import EngineUnreachable
from engines.telemetry import Heartbeat
from engines.types import EngineInfo, EngineLoad
from tests.support.fleet import until
from tests.support.infos import engine_info

INFO = engine_info()


class Polled:
    """Stands in for an engine's client: answers a poll with what `load` makes."""

    url = INFO.url

    def __init__(self, load: Callable[[], EngineLoad]) -> None:
        self.load_now = load
        self.polls = 0
        self.closed = False

    async def info(self) -> EngineInfo:
        return INFO

    async def load(self) -> EngineLoad:
        self.polls += 1
        return self.load_now()

    async def aclose(self) -> None:
        self.closed = True


class Beats:
    def __init__(self) -> None:
        self.alive = {"e0": Heartbeat(info=INFO, load=EngineLoad())}

    async def engines(self) -> dict[str, Heartbeat]:
        return self.alive


@pytest.fixture
def beats() -> Beats:
    return Beats()


@asynccontextmanager
async def followed(client: Polled, beats: Beats):
    fleet = Fleet("m", [], lambda _: client, poll_s=0.01)
    task = asyncio.create_task(fleet.run(beats, every_s=0.02))
    try:
        await until(lambda: fleet.get("e0") is not None and fleet["e0"].answers, "the engine is known")
        yield fleet
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_an_engine_that_drains_is_left_its_streams_while_it_answers(beats):
    client = Polled(lambda: EngineLoad(draining=True))
    async with followed(client, beats) as fleet:
        beats.alive = {}
        polls = client.polls
        await until(lambda: client.polls > polls + 10, "it is polled on")
        assert fleet.available == 0
        assert not client.closed


async def test_an_engine_without_heartbeat_that_does_not_answer_leaves(beats):
    client = Polled(EngineLoad)

    def unreachable() -> EngineLoad:
        raise EngineUnreachable("gone")

    async with followed(client, beats) as fleet:
        beats.alive, client.load_now = {}, unreachable
        await until(lambda: fleet.get("e0") is None, "it left")
        assert client.closed


async def test_a_poll_that_breaks_as_nobody_foresaw_loses_the_engine_until_the_next(beats):
    client = Polled(EngineLoad)

    def broken() -> EngineLoad:
        raise ArithmeticError

    async with followed(client, beats) as fleet:
        client.load_now = broken
        await until(lambda: not fleet.available, "it is not used")
        client.load_now = EngineLoad
        await until(lambda: fleet.available, "it is used again")


async def test_a_prompt_of_a_plain_request_waits_only_until_the_engine_has_told_its_load(beats):
    client = Polled(EngineLoad)
    async with followed(client, beats) as fleet:
        lease = Lease(fleet["e0"], 1000)
        assert fleet["e0"].view.pending_prefill_tokens == 1000
        fleet["e0"].unreported.append(lease)
        await until(lambda: not fleet["e0"].unreported, "it told its load")
        assert (fleet["e0"].view.pending_prefill_tokens, fleet["e0"].view.inflight) == (0, 1)
        lease.release()
        assert fleet["e0"].own_pending_tokens == 0
