"""Work under a request's id that a verb may abort while its caller waits for it."""

import asyncio
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar

from engines.errors import BadRequest

Result = TypeVar("Result")


class Abortable(Generic[Result]):
    """Any number of tasks, also of the same id. Belongs to one event loop."""

    def __init__(self) -> None:
        self._tasks: dict[str, set[asyncio.Task[Result]]] = {}

    def __len__(self) -> int:
        """How many ids have work under way."""
        return len(self._tasks)

    async def run(self, request_id: str, work: Coroutine[Any, Any, Result]) -> Result:
        """What `work` returns. Cancelling the caller cancels it; so does `abort`, and then this raises `BadRequest`."""
        task = asyncio.create_task(work)
        same_id = self._tasks.setdefault(request_id, set())
        same_id.add(task)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise BadRequest(f"request {request_id!r} was aborted") from None
            task.cancel()
            raise
        finally:
            same_id.discard(task)
            if not same_id:
                self._tasks.pop(request_id, None)

    def abort(self, request_id: str) -> bool:
        """Whether there was anything to abort."""
        tasks = list(self._tasks.get(request_id, ()))
        for task in tasks:
            task.cancel()
        return bool(tasks)
