"""What an engine says about itself in Redis: a heartbeat, and records of passes and transfers.

Redis being away costs nothing but records, which are counted. Uses Redis directly: engines know no controller.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import structlog
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_exponential

from engines.records import PassRecord, TransferRecord
from engines.types import EngineInfo, EngineLoad

log = structlog.get_logger(__name__)

STREAM_LENGTH = 20_000
FIELD = "value"
"""The one field of a stream entry."""
BUFFERED_RECORDS = 5_000
TIMEOUT_S = 2.0
RETRY_MIN_S = 0.2
RETRY_MAX_S = 5.0
HEARTBEATS_PER_TTL = 3


@dataclass(frozen=True, slots=True)
class EngineKeys:
    """Names in Redis of one engine of one model."""

    model: str
    engine_id: str

    @property
    def heartbeat(self) -> str:
        return f"trimtab:{self.model}:engine:{self.engine_id}"

    @property
    def passes(self) -> str:
        return f"trimtab:{self.model}:passes"

    @property
    def transfers(self) -> str:
        return f"trimtab:{self.model}:transfers"


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """What is under an engine's key while it lives."""

    info: EngineInfo
    load: EngineLoad


class Recorder:
    """A bounded buffer of records on their way to Redis; the oldest give way, and are counted."""

    def __init__(self, max_records: int = BUFFERED_RECORDS) -> None:
        self._records: deque[PassRecord | TransferRecord] = deque(maxlen=max_records)
        self.dropped = 0

    def add_pass(self, record: PassRecord) -> None:
        self._add(record)

    def add_transfer(self, record: TransferRecord) -> None:
        self._add(record)

    def take(self) -> Sequence[PassRecord | TransferRecord]:
        """All that is buffered, oldest first; the buffer is empty then."""
        taken = list(self._records)
        self._records.clear()
        return taken

    def put_back(self, records: Sequence[PassRecord | TransferRecord]) -> None:
        """Return what could not be delivered; newer records win where there is no room for all."""
        room = (self._records.maxlen or 0) - len(self._records)
        kept = records[len(records) - room :] if room < len(records) else records
        self.dropped += len(records) - len(kept)
        self._records.extendleft(reversed(kept))

    def _add(self, record: PassRecord | TransferRecord) -> None:
        if len(self._records) == self._records.maxlen:
            self.dropped += 1
        self._records.append(record)


def connect(url: str) -> Redis:
    """A client that fails fast and never repeats a call by itself; the caller closes it with `aclose()`."""
    return Redis.from_url(url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S, retry=Retry(NoBackoff(), 0))


class Telemetry:
    """Publishes an engine's heartbeat and records every `heartbeat_s`. The Redis client stays the caller's."""

    def __init__(
        self, redis: Redis, info: EngineInfo, load: Callable[[], EngineLoad], recorder: Recorder, heartbeat_s: float
    ) -> None:
        self._redis = redis
        self._info = info
        self._load = load
        self._recorder = recorder
        self._heartbeat_s = heartbeat_s
        self._keys = EngineKeys(info.model, info.engine_id)
        self.failures = 0
        self.redis_answers: bool | None = None

    async def run(self) -> None:
        """Publish until cancelled, then say good-bye."""
        try:
            while True:
                await self._publish_patiently()
                await asyncio.sleep(self._heartbeat_s)
        finally:
            await self._forget()

    async def publish(self) -> None:
        """One heartbeat, and all buffered records. Raises what Redis raises; the records are kept then."""
        records = self._recorder.take()
        try:
            await self._write(records)
        except BaseException:  # Redis failed or the engine stops: nothing that was recorded may be lost
            self._recorder.put_back(records)
            raise

    async def _publish_patiently(self) -> None:
        """Publish, with growing pauses between attempts while Redis is away."""
        attempts = AsyncRetrying(
            wait=wait_exponential(multiplier=RETRY_MIN_S, max=RETRY_MAX_S),
            retry=retry_if_exception_type((RedisError, OSError)),
            before_sleep=self._count_failure,
            sleep=asyncio.sleep,
        )
        await attempts(self.publish)
        self.redis_answers = True

    async def _write(self, records: Sequence[PassRecord | TransferRecord]) -> None:
        heartbeat = msgspec.json.encode(Heartbeat(info=self._info, load=self._load()))
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.set(self._keys.heartbeat, heartbeat, px=round(self._heartbeat_s * HEARTBEATS_PER_TTL * 1000))
            for record in records:
                stream = self._keys.passes if isinstance(record, PassRecord) else self._keys.transfers
                pipe.xadd(stream, {FIELD: msgspec.json.encode(record)}, maxlen=STREAM_LENGTH, approximate=True)
            await pipe.execute()

    def _count_failure(self, attempt: RetryCallState) -> None:
        self.failures += 1
        self.redis_answers = False
        if attempt.attempt_number == 1 and attempt.outcome is not None:
            log.warning("redis is away; heartbeats stop until it is back", error=str(attempt.outcome.exception()))

    async def _forget(self) -> None:
        try:
            await self._redis.delete(self._keys.heartbeat)
        except (RedisError, OSError) as error:
            log.info("could not remove the heartbeat; it will expire", error=str(error))
