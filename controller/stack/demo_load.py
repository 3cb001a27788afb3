"""A built-in load, so that `trimtab top` has something to show; `trimtab load` sends it to any router.

Open loop: requests arrive by a Poisson process whether or not earlier ones are done, as those of real users do.
"""

import asyncio
import contextlib
import itertools
import math
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import httpx
import structlog

from engines import logs

MAX_IN_FLIGHT = 256
"""Arrivals beyond this are dropped and counted: a router that hangs must not fill this process's memory."""
TIMEOUT_S = 120.0
REPORT_S = 30.0
TEXT = (
    "the engine sends a short answer to every client while its queue grows and the cache keeps what was read before so "
    "that another question about the same page costs less time than the first one did on that machine last night"
)

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of request. Lengths are medians, in words; single requests vary around them."""

    slo_class: str
    prompt_words: int
    output_tokens: int
    shared_words: int = 0
    """Words that start the prompt and are the same for all requests of one conversation."""
    conversations: int = 1
    share: float = 1.0


CHAT = Kind("chat", prompt_words=60, output_tokens=60, shared_words=250, conversations=6, share=0.6)
SUMMARY = Kind("summary", prompt_words=1500, output_tokens=30, share=0.2)
CODE = Kind("code", prompt_words=400, output_tokens=120, shared_words=600, conversations=2, share=0.2)


@dataclass(frozen=True, slots=True)
class Phase:
    """What is sent for a while."""

    kinds: Sequence[Kind]
    duration_s: float = math.inf
    rate_factor: float = 1.0
    """Long requests come more rarely than short ones."""


SHIFT_S = 180.0
"""Long enough for a few ticks to see the new traffic, and for what they decide to show."""
SHIFTING = (
    Phase((CHAT,), SHIFT_S, 1.5),
    Phase((SUMMARY,), SHIFT_S, 0.6),
    Phase((CHAT, SUMMARY, CODE), SHIFT_S),
    Phase((CODE,), SHIFT_S, 0.8),
)
MIXES: Mapping[str, Sequence[Phase]] = {
    "chat": (Phase((CHAT,)),),
    "mixed": (Phase((CHAT, SUMMARY, CODE)),),
    "shifting": SHIFTING,
}


@dataclass(frozen=True, slots=True)
class Request:
    """One request to send."""

    slo_class: str
    prompt: str
    max_tokens: int


def gaps_s(rng: random.Random, rate: float) -> Iterator[float]:
    """Seconds between arrivals of a Poisson process of `rate` a second."""
    while True:
        yield rng.expovariate(rate)


def requests(rng: random.Random, kinds: Sequence[Kind]) -> Iterator[Request]:
    """Requests drawn from a mix, for ever."""
    while True:
        (kind,) = rng.choices(kinds, [kind.share for kind in kinds])
        conversation = f"{kind.slo_class}-{rng.randrange(kind.conversations)}"
        yield Request(
            kind.slo_class,
            f"{_shared(conversation, kind.shared_words)} {_words(rng, _vary(rng, kind.prompt_words))}".strip(),
            _vary(rng, kind.output_tokens),
        )


def arrivals(rng: random.Random, phases: Sequence[Phase], rate: float) -> Iterator[tuple[float, Request]]:
    """Gaps in seconds, and what comes after each, phase after phase, for ever."""
    waited_s = 0.0
    for phase in itertools.cycle(phases):
        left_s = phase.duration_s
        for gap_s, request in zip(gaps_s(rng, rate * phase.rate_factor), requests(rng, phase.kinds), strict=True):
            if gap_s > left_s:
                break
            left_s -= gap_s
            yield waited_s + gap_s, request
            waited_s = 0.0
        # The rest of a phase in which nothing comes any more is waited for with the next one's first gap.
        waited_s += left_s


def _vary(rng: random.Random, median: int) -> int:
    return max(1, min(round(2.5 * median), round(rng.lognormvariate(0, 0.5) * median)))


def _words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(TEXT.split(), k=count))


def _shared(conversation: str, count: int) -> str:
    return _words(random.Random(conversation), count)  # noqa: S311 — the name is the seed: same words every time


class Load:
    """Sends requests to one router and counts how they end."""

    def __init__(self, client: httpx.AsyncClient, model: str) -> None:
        self._client = client
        self._model = model
        self.counts: Counter[str] = Counter()
        self._in_flight = 0

    async def run(self, arrivals: Iterator[tuple[float, Request]]) -> None:
        """Send each request after its gap in seconds, until they end or this is cancelled."""
        async with asyncio.TaskGroup() as sent:
            for gap_s, request in arrivals:
                await asyncio.sleep(gap_s)
                if self._in_flight < MAX_IN_FLIGHT:
                    sent.create_task(self._send(request))
                else:
                    self.counts["dropped here"] += 1

    async def _send(self, request: Request) -> None:
        self._in_flight += 1
        try:
            self.counts[await self._stream(request)] += 1
        except httpx.HTTPError as error:
            self.counts[type(error).__name__] += 1
        finally:
            self._in_flight -= 1

    async def _stream(self, request: Request) -> str:
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": request.prompt}],
            "max_tokens": request.max_tokens,
            "stream": True,
        }
        headers = {"x-slo-class": request.slo_class}
        async with self._client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
            async for _ in answer.aiter_raw():
                pass
            return f"status {answer.status_code}"


async def send(url: str, model: str, mix: str, rate: float, api_key: str | None, seed: int) -> None:
    """Load the router at `url` until cancelled."""
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    limits = httpx.Limits(max_connections=MAX_IN_FLIGHT)
    rng = random.Random(seed)  # noqa: S311 — a load, not a secret
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=TIMEOUT_S, limits=limits) as client:
        load = Load(client, model)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(load.run(arrivals(rng, MIXES[mix], rate)))
            tasks.create_task(_report(load))


async def _report(load: Load) -> None:
    while True:
        await asyncio.sleep(REPORT_S)
        log.info("load", **{name.replace(" ", "_"): count for name, count in sorted(load.counts.items())})


def run(url: str, model: str, mix: str, rate: float, seed: int) -> None:
    """Send a load until SIGTERM or Ctrl-C. The API key comes from TRIMTAB_API_KEY."""
    logs.configure()
    with contextlib.suppress(KeyboardInterrupt):
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        asyncio.run(send(url, model, mix, rate, os.environ.get("TRIMTAB_API_KEY"), seed))
