import asyncio

import pytest

from controller.router.waiting import Lack, QueueFull, RoomQueue


async def started(queue: RoomQueue, name: str, order: list[str], **given) -> asyncio.Task[None]:
    async def wait() -> None:
        await queue.wait(10, **given)
        order.append(name)

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    return task


async def test_first_come_first_served():
    queue, order = RoomQueue(10), []
    tasks = [await started(queue, name, order) for name in "abc"]
    for _ in tasks:
        queue.wake()
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    assert order == ["a", "b", "c"]


async def test_one_who_was_woken_in_vain_keeps_its_place():
    queue, order = RoomQueue(10), []
    tasks = [await started(queue, "a", order), await started(queue, "b", order, first=True)]
    queue.wake()
    queue.wake()
    await asyncio.gather(*tasks)
    assert order == ["b", "a"]


async def test_a_full_queue_refuses_at_once():
    queue = RoomQueue(1)
    task = await started(queue, "a", [])
    with pytest.raises(QueueFull):
        await queue.wait(10)
    queue.wake()
    await task


async def test_one_who_was_woken_in_vain_is_not_turned_away_by_a_newcomer():
    queue, order = RoomQueue(1), []
    newcomer = await started(queue, "newcomer", order)
    woken = await started(queue, "woken", order, first=True)
    queue.wake()
    queue.wake()
    await asyncio.gather(newcomer, woken)
    assert order == ["woken", "newcomer"]


async def test_nobody_waits_longer_than_allowed_and_a_timed_out_place_is_free_again():
    queue = RoomQueue(1)
    for _ in range(2):
        with pytest.raises(TimeoutError):
            await queue.wait(0.01)
    assert len(queue) == 0


async def test_a_wake_for_someone_who_left_goes_to_the_next():
    queue, order = RoomQueue(10), []
    first, second = await started(queue, "a", order), await started(queue, "b", order)
    queue.wake()
    first.cancel()
    await asyncio.wait_for(second, 10)
    assert order == ["b"]


async def test_the_waiting_are_counted_by_what_they_lack_until_they_stop_waiting():
    queue = RoomQueue(10)
    tasks = [await started(queue, "a", [], lack=lack) for lack in Lack]
    assert [queue.waiting[lack] for lack in Lack] == [1, 1, 1]
    queue.wake()
    await tasks[0]
    tasks[1].cancel()
    await asyncio.gather(tasks[1], return_exceptions=True)
    assert [queue.waiting[lack] for lack in Lack] == [0, 0, 1]
    tasks[2].cancel()
