"""Hot contexts on a real fleet: a plan names one, and the router copies it between engines in the background."""

import asyncio
import itertools

from engines.records import Outcome
from tests.support.fleet import MODEL, Fleet, text_of, until
from tuner.plan import HotPrefix
from tuner.prefix import block_hashes

SHARED_TOKENS = 2000
BLOCKS = 8


def prompt(number: int) -> str:
    return text_of(SHARED_TOKENS, "document") + f" and question {number}: {text_of(40, f'question {number}')}"


def hot(*engines: str) -> HotPrefix:
    hashes = block_hashes(f'"{prompt(0)}"'.encode())  # routers hash the JSON of the prompt
    return HotPrefix(prefix=f"{hashes[BLOCKS - 1]:016x}", blocks=BLOCKS, engines=engines)


async def ask(fleet: Fleet, number: int) -> None:
    body = {"model": MODEL, "prompt": prompt(number), "max_tokens": 4, "ignore_eos": True, "temperature": 0}
    answer = await fleet.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text


def copies(fleet: Fleet, outcome: str) -> float:
    return fleet.running.service._metrics.replications.labels(outcome)._value.get()


async def ask_until(fleet: Fleet, outcome: str, count: int) -> int:
    """Ask one after the other until so many copies ended so; how many requests that took.

    An engine that answers late on a busy machine counts as away for a moment, and gets its copy with a later request.
    """
    asked = itertools.count(1)

    async def one_more() -> bool:
        await ask(fleet, next(asked))
        return copies(fleet, outcome) >= count

    await until(one_more, f"{count} copies have {outcome}")
    return next(asked) - 1


async def only_on(fleet: Fleet, engine_id: str, **given: object) -> None:
    """A plan that sends all requests to one engine."""
    roles = {each: "decode" if each == engine_id else "prefill" for each in fleet.engines}
    await fleet.plan("data_parallel", roles, **given)


async def test_a_hot_context_reaches_the_engines_that_the_plan_names(start_fleet):
    fleet = await start_fleet(3)
    await only_on(fleet, "e0")
    await ask(fleet, 0)
    await only_on(fleet, "e0", replicas=(hot("e0", "e1", "e2"),))
    asked = await ask_until(fleet, "copied", 2)
    for number, engine_id in ((1001, "e1"), (1002, "e2")):
        await only_on(fleet, engine_id)
        await ask(fleet, number)
    *_, one, two = await fleet.records(asked + 3)
    assert (one.decode_engine, two.decode_engine) == ("e1", "e2")
    least = BLOCKS * 512 // 4
    assert one.cached_tokens > least, one
    assert two.cached_tokens > least, two
    assert copies(fleet, "failed") == 0
    await fleet.settled()


async def test_a_target_that_died_harms_no_client_and_the_others_get_their_copies(start_fleet):
    fleet = await start_fleet(3)
    await only_on(fleet, "e0", replicas=(hot("e1", "e2"),))
    await fleet.engines["e1"].kill()
    asked = await ask_until(fleet, "copied", 1)
    await asyncio.gather(*(ask(fleet, 1000 + number) for number in range(4)))
    records = await fleet.records(asked + 4)
    assert {(record.outcome, record.attempts, record.decode_engine) for record in records} == {(Outcome.OK, 1, "e0")}
    await fleet.settled()


async def test_a_copy_that_breaks_is_given_up_for_a_while_and_leaves_nothing_behind(start_fleet, meddler):
    meddling, flags = meddler
    fleet = await start_fleet(2, per_engine={"e1": flags})
    meddling.cut = 99
    await only_on(fleet, "e0", replicas=(hot("e1"),))
    asked = await ask_until(fleet, "failed", 1)
    await ask(fleet, 1000)
    records = await fleet.records(asked + 1)
    assert {(record.outcome, record.attempts, record.decode_engine) for record in records} == {(Outcome.OK, 1, "e0")}
    await fleet.settled()
    assert (copies(fleet, "failed"), copies(fleet, "copied"), meddling.connections) == (1, 0, 1)
