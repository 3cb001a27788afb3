"""The scenarios, as data: what is asked, over how many connections, and how an answer is paced."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.router.wire import MAX_REQUEST, ORDER

BodyOf = Callable[[int], bytes]
"""The JSON body of the n-th request."""

DISTINCT_PROMPTS = 64
SMALL_TEXT = "Why does a small surface on the trailing edge of a rudder move a large ship?"
LARGE_TEXT_BYTES = 12_000
LARGE_PROMPT_TOKENS = 3_000
WORDS = ("rudder", "trim", "tab", "ship", "steer", "wake", "hull", "tide", "helm", "keel", "drift", "course", "bow")


@dataclass(frozen=True, slots=True)
class Scenario:
    """`prompt` says what goes into the body. Streams have `chunks` chunks, `gap_us` microseconds apart."""

    name: str
    title: str
    prompt: Literal["small", "ids", "chat"]
    connections: int
    stream: bool = False
    chunks: int = 1
    gap_us: int = 0

    @property
    def stream_s(self) -> float:
        """How long one stream lasts at the backend; it holds the first chunk back for one gap as well."""
        return self.chunks * self.gap_us / 1e6

    @property
    def chunks_per_s(self) -> float:
        """What the backend offers when nothing between it and the clients holds it up."""
        return self.connections * 1e6 / self.gap_us


SCENARIOS = {
    each.name: each
    for each in (
        Scenario("a", "small request", "small", 64),
        Scenario("d", "3,000 token ids", "ids", 64),
        Scenario("t", "12 KB chat", "chat", 64),
        Scenario("c50", "50 streams", "small", 50, stream=True, chunks=100, gap_us=10_000),
        Scenario("c200", "200 streams", "small", 200, stream=True, chunks=100, gap_us=10_000),
        # Wider gaps keep the chunks per second at those of c200, which one core of load and backend can still make.
        Scenario("c500", "500 streams", "small", 500, stream=True, chunks=100, gap_us=25_000),
    )
}
QUICK = ("a", "d", "c200")


def path_of(scenario: Scenario, takes_ids: bool) -> str:
    """Where the request goes; targets whose completions refuse token ids get them as SGLang's own `/generate`."""
    if scenario.prompt == "ids":
        return "/v1/completions" if takes_ids else "/generate"
    return "/v1/chat/completions" if scenario.prompt == "chat" else "/v1/completions"


def bodies(scenario: Scenario, takes_ids: bool, seed: int) -> BodyOf:
    """Bodies over 64 distinct prompts that come round again, so that prefix indexes have something to find."""
    rng = random.Random(seed)
    if scenario.prompt == "ids":
        fixed = [_ids_body(rng, takes_ids) for _ in range(DISTINCT_PROMPTS)]
        return lambda request: fixed[request % DISTINCT_PROMPTS]
    halves = [_text_body(scenario, rng) for _ in range(DISTINCT_PROMPTS)]

    def body(request: int) -> bytes:
        before, after = halves[request % DISTINCT_PROMPTS]
        return before + ORDER % (request % MAX_REQUEST, scenario.gap_us, scenario.chunks) + after

    return body


def _ids_body(rng: random.Random, takes_ids: bool) -> bytes:
    ids = [rng.randrange(1, 2000) for _ in range(LARGE_PROMPT_TOKENS)]
    if takes_ids:
        return _encoded({"model": "bench", "prompt": ids, "max_tokens": 1})
    return _encoded({"input_ids": ids, "sampling_params": {"max_new_tokens": 1}})


def _text_body(scenario: Scenario, rng: random.Random) -> tuple[bytes, bytes]:
    """The body before and after the place of the order, which ends the prompt so that its prefix stays shared."""
    options: dict[str, Any] = {"max_tokens": scenario.chunks, "stream": scenario.stream}
    if scenario.prompt == "chat":
        prompt: dict[str, Any] = {"messages": [{"role": "user", "content": _words(rng, LARGE_TEXT_BYTES) + " ORDER"}]}
    else:
        prompt = {"prompt": f"{rng.choice(WORDS)}: {SMALL_TEXT} ORDER"}
    before, _, after = _encoded({"model": "bench", **prompt, **options}).partition(b"ORDER")
    return before, after


def _words(rng: random.Random, size_bytes: int) -> str:
    text = " ".join(rng.choice(WORDS) for _ in range(size_bytes // 4))
    return text[:size_bytes]


def _encoded(document: dict[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()
