"""Copies of hot contexts, with engines that only say what they were asked."""

import asyncio
import json
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from controller.metrics import RouterMetrics
from controller.router.call import Call, Desk
from controller.router.fleet import Engine
from controller.router.openai import parse
from controller.router.patterns import data_parallel
from controller.router.replicate import MOST_AT_ONCE, PAUSE_S, Replicator
from controller.router.tokens import OwnTokens
from controller.router.waiting import RoomQueue
from controller.settings import Limits
from engines.errors import EngineUnreachable, NoKvRoom
from engines.protocol import PrepRecvAnswer, RemoteSendAnswer
from engines.tracing import UNTRACED
from tuner.placement import EngineView
from tuner.plan import BOOTSTRAP_PLAN, HotPrefix
from tuner.prefix import BLOCK_BYTES, PrefixIndex, block_hashes
from tuner.slo import Slo

TOKENS = 4096
BLOCKS = 4


class SayingClient:
    """Answers the verbs of a copy; `fault` is raised by `prep_recv`."""

    def __init__(self) -> None:
        self.asked: list[tuple[object, ...]] = []
        self.fault: Exception | None = None
        self.held_tokens = 0
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def prep_recv(self, request_id, prompt, end, ttl_s, trace=None):
        self.asked.append(("prep_recv", end))
        if self.fault is not None:
            raise self.fault
        return PrepRecvAnswer(kv_addr_info="there", prefix_matched_length=min(self.held_tokens, end))

    async def remote_send(self, request_id, prompt, kv_addr_info, begin, end, trace=None):
        self.asked.append(("remote_send", begin, end))
        await self.go_on.wait()
        return RemoteSendAnswer(cached_length=end, bytes=1000, prefill_s=0.0, transfer_s=0.1)

    async def abort(self, request_id, trace=None):
        self.asked.append(("abort",))


class World:
    """A router's desk with three engines, and a clock that is set by hand."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.engines = {name: engine(name) for name in ("e0", "e1", "e2")}
        self.registry = CollectorRegistry()
        self.tasks: list[asyncio.Task[None]] = []
        self.desk = Desk(
            fleet=Engines(self.engines),
            prefixes=PrefixIndex(),
            room=RoomQueue(8),
            tokens=OwnTokens(SimpleNamespace()),
            limits=Limits(),
            loop=asyncio.get_running_loop(),
            now_s=lambda: self.now_s,
        )
        self.replicator = Replicator(self.desk, RouterMetrics(self.registry), self.start, "r")

    def start(self, work):
        self.tasks.append(asyncio.get_running_loop().create_task(work))

    def want(self, *engines):
        """Apply a plan that names the context of salt 0 for these engines; with none, a plan that names nothing."""
        prefix = f"{self.call().hashes[BLOCKS - 1]:016x}"
        hot = (HotPrefix(prefix=prefix, blocks=BLOCKS, engines=engines),) if engines else ()
        self.replicator.apply(BOOTSTRAP_PLAN.model_copy(update={"replicas": hot}))

    def call(self, tail=0, salt=0) -> Call:
        """An answered request; those of one salt begin with the same context."""
        ids = [salt + 10_000] * (TOKENS - 1) + [tail]
        asked = parse(b"/v1/completions", json.dumps({"model": "m", "prompt": ids}).encode(), "m")
        slo = Slo(ttft_ms=1000, tpot_ms=100)
        return Call("id", asked, BOOTSTRAP_PLAN, data_parallel, "default", slo, UNTRACED, self.desk)

    async def passes(self, on="e0", tail=0, salt=0) -> None:
        self.start_passing(on, tail, salt)
        await asyncio.gather(*self.tasks)

    def start_passing(self, on="e0", tail=0, salt=0) -> None:
        call = self.call(tail, salt)
        call.decode_engine = on
        self.desk.prefixes.add(call.hashes, on)
        if self.replicator.wanted:
            self.replicator.passed(call)

    def asked(self, name):
        return self.engines[name].client.asked

    def counted(self, outcome):
        return self.registry.get_sample_value("trimtab_replications_total", {"outcome": outcome}) or 0


class Engines(dict):
    """As much of a `Fleet` as a copy needs."""

    def __iter__(self):
        return iter(self.values())


def engine(name, epoch="1"):
    info = SimpleNamespace(engine_id=name, epoch=epoch)
    return Engine(info, SayingClient(), EngineView(name))


@pytest.fixture
async def world():
    made = World()
    yield made
    for task in made.tasks:
        task.cancel()
    await asyncio.gather(*made.tasks, return_exceptions=True)


async def test_engines_that_lack_a_wanted_context_get_it_from_one_that_has_it(world):
    world.want("e0", "e1", "e2")
    await world.passes(on="e0")
    end = int(BLOCKS * BLOCK_BYTES * TOKENS / len(world.call().asked.content))
    assert world.asked("e0") == [("remote_send", 0, end)] * 2
    assert world.asked("e1") == world.asked("e2") == [("prep_recv", end), ("abort",)]
    assert world.desk.prefixes.match(world.call().hashes[:BLOCKS]) == {"e0": BLOCKS, "e1": BLOCKS, "e2": BLOCKS}
    assert world.counted("copied") == 2
    assert all(each.own_transfers == 0 for each in world.desk.fleet)


async def test_what_is_there_is_not_copied_again(world):
    world.want("e1")
    for tail in range(3):
        await world.passes(tail=tail)
    assert len(world.asked("e1")) == 2
    world.engines["e2"].client.held_tokens = TOKENS
    world.want("e2")
    await world.passes()
    assert world.counted("already_there") == 1
    assert world.asked("e2")[-1] == ("abort",)


async def test_other_requests_and_plans_without_replicas_copy_nothing(world):
    world.want("e1")
    await world.passes(salt=5)
    world.want()
    await world.passes()
    assert not world.tasks
    assert not world.replicator.wanted


async def test_the_last_token_is_never_copied(world):
    call = world.call()
    hot = HotPrefix(prefix=f"{call.hashes[-1]:016x}", blocks=len(call.hashes), engines=("e1",))
    call.asked.content = call.asked.content[: len(call.hashes) * BLOCK_BYTES]
    call.prompt_tokens = TOKENS
    world.replicator.apply(BOOTSTRAP_PLAN.model_copy(update={"replicas": (hot,)}))
    call.decode_engine = "e0"
    world.replicator.passed(call)
    await asyncio.gather(*world.tasks)
    ((_, end), _) = world.asked("e1")
    assert end < (await call.tokenize()).tokens


@pytest.mark.parametrize("fault", [EngineUnreachable("dead"), NoKvRoom("full")])
async def test_a_copy_that_failed_is_tried_again_after_a_pause(world, fault):
    world.want("e1")
    client = world.engines["e1"].client
    client.fault = fault
    await world.passes()
    await world.passes()
    world.now_s += PAUSE_S - 1
    await world.passes()
    assert world.asked("e1") == [("prep_recv", world.asked("e1")[0][1]), ("abort",)]
    assert world.counted("failed") == 1
    client.fault = None
    world.now_s += 1
    await world.passes()
    assert world.counted("copied") == 1


async def test_a_new_life_of_an_engine_and_a_new_wish_need_not_wait(world):
    world.want("e1")
    world.engines["e1"].client.fault = EngineUnreachable("dead")
    await world.passes()
    world.desk.fleet["e1"] = world.engines["e1"] = engine("e1", epoch="2")
    world.engines["e1"].client.fault = EngineUnreachable("dead again")
    await world.passes()
    assert world.counted("failed") == 2
    world.want()
    world.want("e1")
    await world.passes()
    assert world.counted("failed") == 3


async def test_each_copy_is_under_way_once_and_few_are_at_a_time(world):
    for each in world.engines.values():
        each.client.go_on.clear()
    hashes = [world.call(salt=salt).hashes[BLOCKS - 1] for salt in range(4)]
    hot = tuple(HotPrefix(prefix=f"{each:016x}", blocks=BLOCKS, engines=("e1",)) for each in hashes)
    world.replicator.apply(BOOTSTRAP_PLAN.model_copy(update={"replicas": hot}))
    for salt in (0, 0, 1, 2, 3):
        world.start_passing(salt=salt)
        await asyncio.sleep(0)
    assert len(world.tasks) == MOST_AT_ONCE
    assert world.engines["e1"].own_transfers == MOST_AT_ONCE
    world.engines["e0"].client.go_on.set()
    await asyncio.gather(*world.tasks)
    await world.passes(salt=2)
    assert world.counted("copied") == MOST_AT_ONCE + 1


async def test_engines_that_are_away_are_left_alone(world):
    world.want("e1", "e9")
    world.engines["e1"].view.available = False
    await world.passes()
    assert not world.tasks


async def test_an_engine_that_leaves_meanwhile_is_not_said_to_hold_anything(world):
    world.want("e1")
    world.engines["e0"].client.go_on.clear()
    world.start_passing()
    await asyncio.sleep(0)
    del world.desk.fleet["e1"]
    world.engines["e0"].client.go_on.set()
    await asyncio.gather(*world.tasks)
    assert "e1" not in world.desk.prefixes.match(block_hashes(world.call().asked.content))


async def test_the_source_is_who_holds_most_and_has_least_to_do(world):
    call = world.call()
    world.desk.prefixes.add(call.hashes[: BLOCKS - 1], "e2")
    world.want("e1")
    await world.passes(on="e0")
    assert (len(world.asked("e0")), len(world.asked("e2"))) == (1, 0)
    world.desk.prefixes.forget("e1")
    world.desk.prefixes.add(call.hashes, "e2")
    world.engines["e0"].view.pending_prefill_tokens = 10_000
    await world.passes(on="e0")
    assert (len(world.asked("e0")), len(world.asked("e2"))) == (1, 1)
