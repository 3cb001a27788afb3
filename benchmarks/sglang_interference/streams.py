"""Streams of a client, and when each of their tokens came."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec

TIMEOUT_S = 600.0


class Stream:
    """One streamed completion. Times are of `time.perf_counter`."""

    def __init__(self, http: httpx.AsyncClient, body: dict[str, Any]) -> None:
        self._http = http
        self._body = body
        self._grown = asyncio.Condition()
        self.sent_at_s = 0.0
        self.token_at_s: list[float] = []

    @property
    def seen(self) -> int:
        return len(self.token_at_s)

    async def run(self) -> None:
        """Send the request and take the stream to its end."""
        self.sent_at_s = time.perf_counter()
        async with self._http.stream("POST", "/v1/completions", json=self._body) as answer:
            if not answer.is_success:
                raise RuntimeError(f"{answer.status_code}: {(await answer.aread()).decode(errors='replace')[:300]}")
            async for line in answer.aiter_lines():
                if _has_text(line):
                    await self._note()

    async def until(self, tokens: int) -> None:
        """Wait for that many tokens."""
        async with asyncio.timeout(TIMEOUT_S), self._grown:
            await self._grown.wait_for(lambda: self.seen >= tokens)

    def gaps_s(self, since_s: float, until_s: float) -> Sequence[float]:
        """Pauses between tokens, of all pauses that lie in that span in part."""
        pairs = zip(self.token_at_s, self.token_at_s[1:], strict=False)
        return [after - before for before, after in pairs if after > since_s and before < until_s]

    async def _note(self) -> None:
        self.token_at_s.append(time.perf_counter())
        async with self._grown:
            self._grown.notify_all()


def _has_text(line: str) -> bool:
    if not line.startswith("data: {"):
        return False
    choices = msgspec.json.decode(line.removeprefix("data: ")).get("choices") or ()
    return any(choice.get("text") for choice in choices)


class Client:
    """Asks one stack for greedy completions that do not end early."""

    def __init__(self, http: httpx.AsyncClient, model: str) -> None:
        self._http = http
        self._model = model

    @classmethod
    @asynccontextmanager
    async def at(cls, url: str, model: str) -> AsyncIterator["Client"]:
        async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as http:
            yield cls(http, model)

    def stream(self, prompt: str, tokens: int) -> Stream:
        return Stream(self._http, {**self._body(prompt, tokens), "stream": True})

    async def complete(self, prompt: str, tokens: int) -> None:
        """A request whose answer nobody reads."""
        (await self._http.post("/v1/completions", json=self._body(prompt, tokens))).raise_for_status()

    def _body(self, prompt: str, tokens: int) -> dict[str, Any]:
        asked = {"model": self._model, "prompt": prompt, "max_tokens": tokens}
        return {**asked, "temperature": 0, "ignore_eos": True}
