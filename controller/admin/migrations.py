"""Context-cache migration: copying the KV of a prompt from one engine's context cache to another's."""

import time
from collections.abc import Callable, Sequence

import msgspec
import structlog
from pydantic import BaseModel, ConfigDict, Field

from controller.admin.engine_calls import EngineCalls
from controller.context_copy import copy_context
from controller.store.keys import Keys
from controller.store.protocol import Store, StoreUnavailable
from engines.client import Prompt

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
            moved = await copy_context(migration_id, sender, receiver, Prompt.of(asked.prompt), len(asked.prompt) - 1)
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
