"""An open-loop client: requests are sent when they are due, whatever became of those before."""

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self
from urllib.parse import urlsplit

import msgspec
import numpy as np

from benchmarks.adapt.outcome import Flags
from engines.errors import EngineUnreachable
from engines.http1 import Exchange, Pool
from tuner.slo import SloTable
from tuner.workload import Floats, Workload

FIRST_TOKEN_ID = 1000
"""Token ids below may mean something special."""
TOKEN_IDS = 2000
PATIENCE_S = 60.0
SLO_HEADER = "x-slo-class"


@dataclass(slots=True)
class Reply:
    """A streamed answer as it comes in: a sink of `engines.http1`. Times are monotonic seconds."""

    done: "asyncio.Future[None]"
    status: int | None = None
    first_s: float | None = None
    last_s: float | None = None
    complete: bool = False

    def on_head(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        self.status = status

    def on_body(self, data: bytes) -> None:
        self.last_s = time.monotonic()
        if self.first_s is None:
            self.first_s = self.last_s

    def on_end(self) -> None:
        self.complete = True
        self._over()

    def on_lost(self, error: EngineUnreachable) -> None:
        self._over()

    def times(self, sent_s: float, tokens: int) -> tuple[float, float] | None:
        """TTFT and TPOT (NaN for one token), seconds; `None` unless the client got all of it."""
        if not self.complete or self.status != 200 or self.first_s is None or self.last_s is None:
            return None
        tpot_s = (self.last_s - self.first_s) / (tokens - 1) if tokens > 1 else math.nan
        return self.first_s - sent_s, tpot_s

    def _over(self) -> None:
        if not self.done.done():
            self.done.set_result(None)


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """What a client saw of each request, in order of arrival: columns of times, NaN where there is none."""

    complete: Flags
    ttft_s: Floats
    tpot_s: Floats
    """NaN for one token too."""

    @classmethod
    def nothing_of(cls, requests: int) -> Self:
        return cls(np.zeros(requests, dtype=np.bool_), np.full(requests, np.nan), np.full(requests, np.nan))

    def good(self, workload: Workload, slos: SloTable) -> Flags:
        """Which requests met both bounds."""
        table = [slos.classes[slos.resolve(name)] for name in workload.classes]
        ttft_ms = np.array([slo.ttft_ms for slo in table])[workload.slo_class]
        tpot_ms = np.array([slo.tpot_ms for slo in table])[workload.slo_class]
        in_pace = np.isnan(self.tpot_s) | (self.tpot_s * 1e3 <= tpot_ms)
        found: Flags = self.complete & (self.ttft_s * 1e3 <= ttft_ms) & in_pace
        return found


Prompt = list[int] | str
"""Token ids, or text where a router takes no ids."""


class Client:
    """Sends requests of one workload to one router. `aclose` it."""

    def __init__(self, url: str, model: str, workload: Workload, prompts: Sequence[str] | None = None) -> None:
        """`prompts`: texts, one a request; without them, token ids that share what the workload says."""
        address = urlsplit(url)
        self._pool = Pool(address.hostname or "127.0.0.1", address.port or 80)
        self._host = address.netloc
        self._model = model
        self._workload = workload
        self._prompts = prompts

    async def run(self) -> Seen:
        """The whole workload from now on, in real time."""
        seen = Seen.nothing_of(len(self._workload))
        begun_s = time.monotonic()
        async with asyncio.TaskGroup() as sent:
            for row, arrived_s in enumerate(self._workload.arrived_s.tolist()):
                # Made before it is due: a long prompt takes its time.
                request = self.request(row)
                await asyncio.sleep(max(0.0, begun_s + arrived_s - time.monotonic()))
                sent.create_task(self._send(row, request, seen))
        return seen

    async def aclose(self) -> None:
        await self._pool.aclose()

    async def _send(self, row: int, request: bytes, seen: Seen) -> None:
        sent_s = time.monotonic()
        reply = Reply(asyncio.get_running_loop().create_future())
        exchange = Exchange(self._pool, request, reply, PATIENCE_S, PATIENCE_S).start()
        try:
            await reply.done
        finally:
            exchange.abort()
        times = reply.times(sent_s, int(self._workload.output_tokens[row]))
        if times is not None:
            seen.complete[row] = True
            seen.ttft_s[row], seen.tpot_s[row] = times

    def request(self, row: int) -> bytes:
        """One request as HTTP. It asks for exactly the tokens that the workload says."""
        body = msgspec.json.encode(
            {
                "model": self._model,
                "prompt": self._prompt(row),
                "max_tokens": int(self._workload.output_tokens[row]),
                "ignore_eos": True,
                "stream": True,
            }
        )
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: {self._host}\r\ncontent-type: application/json\r\n"
            f"{SLO_HEADER}: {self._class_of(row)}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    def _prompt(self, row: int) -> Prompt:
        return prompt_ids(self._workload, row) if self._prompts is None else self._prompts[row]

    def _class_of(self, row: int) -> str:
        return self._workload.classes[int(self._workload.slo_class[row])]


def prompt_ids(workload: Workload, row: int) -> list[int]:
    """Token ids that share with other prompts what the workload says they share, answers aside."""
    tokens, root_tokens = int(workload.prompt_tokens[row]), int(workload.root_tokens[row])
    shared = min(root_tokens, tokens - 1)
    root, session = int(workload.root[row]), int(workload.session[row])
    return [*_stream(2 * root + 1, 0, shared), *_stream(2 * session, shared, tokens)]


def _stream(seed: int, begin: int, end: int) -> list[int]:
    drawn = np.random.default_rng(seed).integers(FIRST_TOKEN_ID, FIRST_TOKEN_ID + TOKEN_IDS, size=end)
    return [int(token) for token in drawn[begin:]]
