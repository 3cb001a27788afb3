"""Context-cache migration: copying the KV of a prompt from one engine's context cache to another's."""

import time
from collections.abc import Callable, Sequence

import msgspec
import structlog
from pydantic import BaseModel, ConfigDict, Field

from controller.admin.engine_calls import EngineCalls
from controller.store.keys import Keys
from controller.store.protocol import Store, StoreUnavailable
from engines.client import EngineClient, Prompt
from engines.errors import EngineError

RESERVATION_S = 60.0
KEPT = 100
MAX_PROMPT_TOKENS = 2_000_000

log = structlog.get_logger(__name__)


class MigrationRequest(BaseModel):
    """Which context to copy where."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str = Field(description="Id of the engine that sends; it computes what it does not hold")
    target: str = Field(description="Id of the engine that receives")
    prompt: list[int] = Field(min_length=2, max_length=MAX_PROMPT_TOKENS, description="Token ids")


class Migration(BaseModel):
    """One finished migration. The last token of the prompt stays behind: every generation computes it itself."""

    model_config = ConfigDict(frozen=True)

    migration_id: str
    source: str
    target: str
    at_s: float = Field(description="Unix time of the start")
    prompt_tokens: int
    already_there_tokens: int = Field(description="Leading tokens that the target held before")
    moved_tokens: int
    bytes: int
    prefill_s: float
    transfer_s: float
    seconds: float = Field(description="From the first call to the last answer")


class SameEngine(Exception):
    def __init__(self, engine_id: str) -> None:
        super().__init__(f"source and target are both {engine_id!r}: name two engines")


class Moved(msgspec.Struct, frozen=True):
    """What one copy did."""

    already_there_tokens: int
    moved_tokens: int
    bytes: int = 0
    prefill_s: float = 0.0
    transfer_s: float = 0.0


class MigrationService:
    """Runs migrations one call at a time and remembers the last `KEPT`."""

    def __init__(
        self, store: Store, keys: Keys, calls: EngineCalls, now_s: Callable[[], float], new_id: Callable[[], str]
    ) -> None:
        self._store = store
        self._keys = keys
        self._calls = calls
        self._now_s = now_s
        self._new_id = new_id

    async def run(self, asked: MigrationRequest) -> Migration:
        """Copy a context; returns once the target holds it.

        Raises `SameEngine`, `UnknownEngine`, or the `EngineError` that either engine answered; then the target has
        let go of the room it had reserved.
        """
        if asked.source == asked.target:
            raise SameEngine(asked.source)
        at_s, started_s, migration_id = self._now_s(), time.monotonic(), f"migration-{self._new_id()}"
        async with self._calls.client(asked.source) as sender, self._calls.client(asked.target) as receiver:
            moved = await copy_context(migration_id, sender, receiver, asked.prompt)
        migration = Migration(
            migration_id=migration_id,
            source=asked.source,
            target=asked.target,
            at_s=at_s,
            prompt_tokens=len(asked.prompt),
            seconds=time.monotonic() - started_s,
            **msgspec.structs.asdict(moved),
        )
        await self._remember(migration)
        return migration

    async def recent(self) -> Sequence[Migration]:
        """The last migrations, newest first."""
        entries = await self._store.latest(self._keys.migrations, KEPT)
        return [Migration.model_validate_json(entry.value) for entry in reversed(entries)]

    async def _remember(self, migration: Migration) -> None:
        try:
            await self._store.append(self._keys.migrations, [migration.model_dump_json().encode()], KEPT)
        except StoreUnavailable as error:
            log.warning("migration not remembered", migration_id=migration.migration_id, error=str(error))


async def copy_context(request_id: str, sender: EngineClient, receiver: EngineClient, ids: list[int]) -> Moved:
    """`prep_recv` and `remote_send` of all tokens but the last; the receiver's pin is lifted in any case."""
    prompt, end = Prompt.of(ids), len(ids) - 1
    try:
        room = await receiver.prep_recv(request_id, prompt, end, RESERVATION_S)
        begin = room.prefix_matched_length
        if begin >= end:
            return Moved(begin, 0)
        sent = await sender.remote_send(request_id, prompt, room.kv_addr_info, begin, end)
        return Moved(begin, end - begin, sent.bytes, sent.prefill_s, sent.transfer_s)
    finally:
        await _unpin(request_id, receiver)


async def _unpin(request_id: str, receiver: EngineClient) -> None:
    """Nothing will consume the reservation, so without this its tokens could not be evicted until it expires."""
    try:
        await receiver.abort(request_id)
    except EngineError as error:
        log.warning("reservation left to expire", request_id=request_id, error=str(error))
