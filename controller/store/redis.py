"""The store on Redis (6.2 or newer). Hashes for documents and leases, streams, and strings that expire.

| what | in Redis |
|---|---|
| document | hash `key` with the fields `version` and `value`; each new version is published on the channel `key` |
| stream | stream `key`, entries with the one field `value`, trimmed with `MAXLEN ~` |
| heartbeat | string `key` with `PX` |
| lease | hash `key` with the fields `holder`, `token` and `until_ms`; it stays when it has run out, to keep the token |
"""

import asyncio
import contextlib
import math
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from typing import Any, NoReturn, Self

import redis.exceptions
import structlog
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_random_exponential

from controller.store.newest import Newest
from controller.store.protocol import Entry, Lease, LostLease, StoreUnavailable, VersionConflict, Versioned

log = structlog.get_logger()

NOW_MS = """
local function now_ms()
  local now = redis.call('TIME')
  return now[1] * 1000 + math.floor(now[2] / 1000)
end
"""

# The version with 'conflict' is the one that is there, empty for none.
COMPARE_AND_SET = f"""
{NOW_MS}
if KEYS[2] then
  local lease = redis.call('HMGET', KEYS[2], 'holder', 'token', 'until_ms')
  if lease[1] ~= ARGV[3] or lease[2] ~= ARGV[4] or tonumber(lease[3]) <= now_ms() then
    return {{'lost', ''}}
  end
end
local actual = redis.call('HGET', KEYS[1], 'version')
if (actual or '') ~= ARGV[1] then
  return {{'conflict', actual or ''}}
end
local version = redis.call('HINCRBY', KEYS[1], 'version', 1)
redis.call('HSET', KEYS[1], 'value', ARGV[2])
redis.call('PUBLISH', KEYS[1], version)
return {{'written', version}}
"""

LEASE = f"""
{NOW_MS}
local now = now_ms()
local lease = redis.call('HMGET', KEYS[1], 'holder', 'until_ms', 'token')
local held = lease[2] and tonumber(lease[2]) > now
if held and lease[1] ~= ARGV[1] then
  return nil
end
redis.call('HSET', KEYS[1], 'holder', ARGV[1], 'until_ms', string.format('%.0f', now + ARGV[2]))
return held and tonumber(lease[3]) or redis.call('HINCRBY', KEYS[1], 'token', 1)
"""

RELEASE = """
local lease = redis.call('HMGET', KEYS[1], 'holder', 'token')
if lease[1] == ARGV[1] and lease[2] == ARGV[2] then
  redis.call('HSET', KEYS[1], 'until_ms', 0)
end
"""

# One script for a batch, not a pipeline of XADDs: the client then packs one command and parses one reply, which takes
# a tenth of the CPU per entry.
APPEND = """
for i = 2, #ARGV do
  redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[1], '*', 'value', ARGV[i])
end
"""

NO_ANSWER = (
    redis.exceptions.ConnectionError,
    redis.exceptions.TimeoutError,
    redis.exceptions.InvalidResponse,
    OSError,
)
"""What a Redis that is gone, stuck or no Redis at all looks like (`TimeoutError` is an `OSError`)."""

GLOB = re.compile(r"([\\*?\[\]])")


class RedisStore:
    """`Store` on one Redis. Owns `client` and closes it.

    Calls are not repeated: after a connection broke nobody knows whether a write took effect, so the caller hears
    `StoreUnavailable` and decides. The client must do the same (no retries, no time-outs of its own): see `from_url`.

    A Redis that came back without its data starts again at version 1; watches follow it there.
    """

    def __init__(self, client: Redis, timeout_s: float = 2.0) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._compare_and_set = client.register_script(COMPARE_AND_SET)
        self._append = client.register_script(APPEND)
        self._lease = client.register_script(LEASE)
        self._release = client.register_script(RELEASE)
        self._following: set[asyncio.Task[None]] = set()
        self._closed = False

    @classmethod
    def from_url(cls, url: str, timeout_s: float = 2.0) -> Self:
        """Connects on first use. Raises `ValueError` for a URL that is not `redis://`, `rediss://` or `unix://`."""
        client = Redis.from_url(
            url, protocol=2, retry=Retry(NoBackoff(), 0), socket_timeout=None, socket_connect_timeout=None
        )
        return cls(client, timeout_s)

    async def get(self, key: str) -> Versioned | None:
        async with self._answer():
            fields: Any = await self._client.hmget(key, ["version", "value"])
        version, value = fields
        return None if version is None else Versioned(int(version), value)

    async def compare_and_set(
        self, key: str, value: bytes, expected_version: int | None, fence: Lease | None = None
    ) -> int:
        keys: list[str] = [key]
        args: list[str | bytes] = ["" if expected_version is None else str(expected_version), value]
        if fence is not None:
            keys.append(fence.key)
            args += [fence.holder, str(fence.token)]
        async with self._answer():
            outcome, version = await self._compare_and_set(keys=keys, args=args)
        if fence is not None and outcome == b"lost":
            raise LostLease(fence)
        if outcome == b"conflict":
            raise VersionConflict(key, expected_version, int(version) if version else None)
        return int(version)

    async def watch(self, key: str, poll_s: float = 1.0) -> AsyncGenerator[Versioned, None]:
        if self._closed:
            return
        newest: Newest[Versioned] = Newest()
        following = asyncio.create_task(self._follow(key, poll_s, newest))
        following.add_done_callback(lambda _: newest.close())
        self._following.add(following)
        try:
            async for document in newest:
                yield document
            if not following.cancelled():
                following.result()
        finally:
            following.cancel()
            await asyncio.wait([following])
            self._following.discard(following)

    async def append(self, stream: str, values: Sequence[bytes], max_len: int) -> None:
        if values:
            async with self._answer():
                await self._append(keys=[stream], args=[max_len, *values])

    async def read(self, stream: str, after: str | None, count: int, block_s: float | None = None) -> Sequence[Entry]:
        block_ms = math.ceil(block_s * 1000) if block_s else None  # BLOCK 0 would wait for ever
        async with self._answer(extra_s=block_s or 0.0):
            answer: Any = await self._client.xread({stream: after or "0-0"}, count=count, block=block_ms)
        return _entries(answer[0][1]) if answer else ()

    async def latest(self, stream: str, count: int, before: str | None = None) -> Sequence[Entry]:
        async with self._answer():
            newest_first: Any = await self._client.xrevrange(
                stream, "+" if before is None else f"({before}", count=count
            )
        return _entries(newest_first)[::-1]

    async def heartbeat(self, key: str, value: bytes, ttl_s: float) -> None:
        async with self._answer():
            await self._client.set(key, value, px=max(1, round(ttl_s * 1000)))

    async def alive(self, prefix: str) -> Mapping[str, bytes]:
        pattern = GLOB.sub(r"\\\1", prefix) + "*"
        async with self._answer():
            # SCAN may name a key twice.
            keys = sorted({key async for key in self._client.scan_iter(match=pattern, count=1000)})
            values: Any = await self._client.mget(keys) if keys else []
        return {key.decode(): value for key, value in zip(keys, values, strict=True) if value is not None}

    async def forget(self, key: str) -> None:
        async with self._answer():
            await self._client.delete(key)

    async def lease(self, key: str, holder: str, ttl_s: float) -> Lease | None:
        async with self._answer():
            token = await self._lease(keys=[key], args=[holder, max(1, round(ttl_s * 1000))])
        return None if token is None else Lease(key, holder, int(token))

    async def release(self, lease: Lease) -> None:
        async with self._answer():
            await self._release(keys=[lease.key], args=[lease.holder, lease.token])

    async def ping(self) -> None:
        async with self._answer():
            await self._client.ping()

    async def aclose(self) -> None:
        self._closed = True
        for following in self._following:
            following.cancel()
        await asyncio.gather(*self._following, return_exceptions=True)
        await self._client.aclose()

    async def _follow(self, key: str, poll_s: float, newest: Newest[Versioned]) -> None:
        """Put each change of `key` into `newest`, through outages, until cancelled."""
        patiently = AsyncRetrying(
            retry=retry_if_exception_type(StoreUnavailable),
            wait=wait_random_exponential(multiplier=0.1, max=1.0),
            before_sleep=_warn_of_news(key),
        )
        await patiently(self._relay, key, poll_s, newest)

    async def _relay(self, key: str, poll_s: float, newest: Newest[Versioned]) -> NoReturn:
        """The same, over one connection. A message only says that it is time to look, so losing one costs `poll_s`.

        The first message confirms the subscription; the look after it finds what was written meanwhile.
        """
        async with self._client.pubsub() as notices:
            async with self._answer():
                await notices.subscribe(key)
            while True:
                document = await self.get(key)
                if document is not None:
                    newest.put(document)
                async with self._answer(extra_s=poll_s):
                    await notices.get_message(timeout=poll_s)

    @contextlib.asynccontextmanager
    async def _answer(self, extra_s: float = 0.0) -> AsyncIterator[None]:
        """Bounds what is inside by the time-out (plus `extra_s`); `StoreUnavailable` for silence and refusals."""
        if self._closed:
            raise StoreUnavailable("this store has been closed")
        try:
            async with asyncio.timeout(self._timeout_s + extra_s):
                yield
        except redis.exceptions.ResponseError as error:
            # Full, demoted, busy with a script, unable to save, closed to this user, a key of another kind: to the
            # caller all of them are a store that does not work now and may again.
            raise StoreUnavailable(f"Redis refuses: {error}") from error
        except NO_ANSWER as error:
            raise StoreUnavailable(f"Redis did not answer: {error or f'nothing for {self._timeout_s} s'}") from error


def _warn_of_news(key: str) -> Callable[[RetryCallState], None]:
    """Say why a watch waits, but not again at each attempt: only an operator can mend some of these."""
    said = ""

    def warn(state: RetryCallState) -> None:
        nonlocal said
        error = str(state.outcome.exception()) if state.outcome is not None else ""
        if error != said:
            log.warning("watch_waits", key=key, error=error)
            said = error

    return warn


def _entries(pairs: Sequence[tuple[bytes, Mapping[bytes, Any]]]) -> list[Entry]:
    return [Entry(entry_id.decode(), fields[b"value"]) for entry_id, fields in pairs]
