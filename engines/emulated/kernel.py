"""The emulated engine without sockets and clock: what it is asked, what it holds, and what each pass yields.

The caller keeps time: it passes `now_s` in, runs `begin_pass`, lets `duration_s` go by (on the wall or by decree), and
calls `end_pass`. Everything else may be called at any moment, also during a pass. Times never go backwards.
"""

from array import array

from engines.emulated.events import Event, Finished, Pass, Prefilled, Token
from engines.emulated.pool import KvPool
from engines.emulated.profile import Profile
from engines.emulated.reservations import Reservation, Reservations
from engines.emulated.scheduler import DECODE_HEADROOM_TOKENS, Scheduler
from engines.emulated.sequences import ChooseToken, GenerationState, Sequence
from engines.errors import BadRequest, ContextTooLong, Draining
from engines.protocol import Config
from engines.types import EngineLoad, EngineTimings

__all__ = [
    "ChooseToken",
    "Event",
    "Finished",
    "GenerationState",
    "Kernel",
    "Pass",
    "Prefilled",
    "Reservation",
    "Token",
]

MIN_CHUNK_TOKENS = 16
MAX_PREFILL_DECODE_INTERVAL = 64
RETRY_AFTER_S = (0.05, 1.0)
"""Bounds of the advice that comes with `NoKvRoom`."""


class Kernel:
    """Continuous batching, chunked prefill, context cache and KV room of one engine.

    A failed call changes nothing. Prompts are `array("I")` and must not be changed by the caller afterwards.
    """

    def __init__(self, profile: Profile, choose_token: ChooseToken) -> None:
        self.profile = profile
        self._pool = KvPool(profile.kv_capacity_tokens)
        self._reservations = Reservations(self._pool)
        self._scheduler = Scheduler(profile, self._pool, self._reservations, choose_token)
        self._draining = False
        self._submitted = 0

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def retracted_total(self) -> int:
        """How often a running request was put back into the queue for lack of room."""
        return self._scheduler.retracted_total

    def submit_generation(
        self, request_id: str, prompt: "array[int]", max_tokens: int, now_s: float, *, group: str | None = None
    ) -> None:
        """Queue a generation of up to `max_tokens` behind `prompt`; a `Token` follows for each, then `Finished`.

        The reservation of `request_id`, or else of `group` (for several choices of one request), no longer expires and
        is used up when the first of its generations is admitted. Raises `BadRequest` (empty prompt, no token wanted,
        id in use), `ContextTooLong` (prompt and output do not fit the context or the KV room), `Draining`.
        """
        if max_tokens < 1:
            raise BadRequest(f"max_tokens is {max_tokens}, but at least 1 is needed")
        self._check_submission(request_id in self._scheduler.generations, request_id, len(prompt), max_tokens)
        self._reservations.claim(request_id, group, now_s)
        self._scheduler.submit(Sequence(request_id, prompt, max_tokens, self._next_order(), now_s, group))

    def submit_prefill(self, request_id: str, prompt: "array[int]", end: int, now_s: float) -> None:
        """Compute `prompt[:end]` into the cache and pin it until `release_prefill`; `Prefilled` says when.

        At least one token is computed, as SGLang does. Ids are apart from those of generations. Raises `BadRequest`,
        `ContextTooLong`, `Draining`.
        """
        if not 0 < end <= len(prompt):
            raise BadRequest(f"end {end} is not within the prompt of {len(prompt)} tokens")
        self._check_submission(request_id in self._scheduler.prefills, request_id, end, 0)
        self._scheduler.submit(Sequence(request_id, prompt[:end], 0, self._next_order(), now_s))

    def release_prefill(self, request_id: str, now_s: float) -> bool:
        """Unpin a prefill, or stop it if it is not through; `False` if there is none."""
        return self._end(self._scheduler.prefills.get(request_id))

    def finish(self, request_id: str, now_s: float) -> EngineTimings | None:
        """End a generation before `max_tokens`: its timings, or `None` if it is gone already."""
        sequence = self._scheduler.generations.get(request_id)
        self._reservations.release(request_id)
        if sequence is None:
            return None
        self._end(sequence)
        return sequence.timings(now_s)

    def abort(self, request_id: str, now_s: float) -> bool:
        """End the generation, the prefill and the reservation of that id, whichever there are; whether any was."""
        ended = [
            self._end(self._scheduler.generations.get(request_id)),
            self._end(self._scheduler.prefills.get(request_id)),
            self._reservations.release(request_id),
        ]
        return any(ended)

    def reserve(self, request_id: str, prompt: "array[int]", end: int, ttl_s: float, now_s: float) -> Reservation:
        """Pin what is cached of `prompt[:end]` and reserve room for the rest, until `receive` and for `ttl_s` at most.

        `end` may be negative, as in Python. An older reservation of the id is given up, even if this one then fails.
        Raises `NoKvRoom` (with `retry_after_s`), `Draining`, `ContextTooLong`, `BadRequest`.
        """
        if self._draining:
            raise Draining("the engine is draining")
        end = normalized_end(end, len(prompt))
        if ttl_s <= 0:
            raise BadRequest(f"ttl_s is {ttl_s}, but must be above 0")
        self._check_fits(len(prompt), 1)
        others = self._scheduler.admitted + len(self._reservations)
        spare_tokens = len(prompt) - end + DECODE_HEADROOM_TOKENS * others
        retry_s = self._retry_after_s(now_s)
        return self._reservations.open(request_id, prompt, end, now_s + ttl_s, spare_tokens, retry_s)

    def receive(self, request_id: str, begin: int, end: int, now_s: float) -> None:
        """The KV of `[begin, end)` arrived and was checked: it is cached now, pinned until used, released or expired.

        Doing it twice is fine. Raises `ReservationGone`, or `BadRequest` if the range is not the reserved one.
        """
        self._reservations.receive(request_id, begin, end, now_s)

    def release(self, request_id: str, now_s: float) -> bool:
        """Give a reservation up; `False` if there is none."""
        return self._reservations.release(request_id)

    def expire(self, now_s: float) -> list[str]:
        """Give up the reservations that are past their time; their request ids."""
        return self._reservations.expire(now_s)

    def next_expiry_s(self) -> float | None:
        """When `expire` will next have something to do."""
        return self._reservations.next_expiry_s()

    def set_draining(self, on: bool) -> None:
        """Refuse new work, or take it again. Reservations that no generation has come for are given up at once."""
        self._draining = on
        if on:
            self._reservations.release_unclaimed()

    def config(self, wanted: Config) -> Config:
        """Set the knobs that are given, all or none; those in force now. Raises `BadRequest` naming a bad value."""
        chunk, interval = wanted.chunked_prefill_tokens, wanted.prefill_decode_interval
        if chunk is not None and chunk < MIN_CHUNK_TOKENS:
            raise BadRequest(f"chunked_prefill_tokens is {chunk}, but must be at least {MIN_CHUNK_TOKENS}")
        if interval is not None and not 0 <= interval <= MAX_PREFILL_DECODE_INTERVAL:
            raise BadRequest(f"prefill_decode_interval is {interval}, but must be 0 to {MAX_PREFILL_DECODE_INTERVAL}")
        scheduler = self._scheduler
        scheduler.set_knobs(chunk, interval)
        return Config(
            chunked_prefill_tokens=scheduler.chunked_prefill_tokens,
            prefill_decode_interval=scheduler.prefill_decode_interval,
        )

    def begin_pass(self, now_s: float) -> Pass | None:
        """Choose the next pass. `None`: nothing can run, until something is submitted, ended, released or expired."""
        return self._scheduler.begin_pass(now_s)

    def end_pass(self, now_s: float) -> list[Event]:
        """What the pass that `begin_pass` chose has yielded, in order; nothing of what was ended meanwhile."""
        return self._scheduler.end_pass(now_s)

    def load(self) -> EngineLoad:
        """The load now; `inbound_transfers` is the caller's to fill in."""
        scheduler = self._scheduler
        return EngineLoad(
            running=scheduler.admitted,
            queued=len(scheduler.waiting),
            pending_prefill_tokens=scheduler.pending_prefill_tokens,
            kv_used_tokens=self._pool.used_tokens,
            kv_reserved_tokens=self._pool.reserved_tokens,
            kv_capacity_tokens=self._pool.capacity_tokens,
            draining=self._draining,
            chunked_prefill_tokens=scheduler.chunked_prefill_tokens,
            prefill_decode_interval=scheduler.prefill_decode_interval,
        )

    def check(self) -> None:
        """Raise `RuntimeError` if any token of KV room, or any pin, is not accounted for."""
        self._pool.check()
        holders = list(self._scheduler.holders())
        private = sum(sequence.private_tokens for sequence in holders) + self._scheduler.in_flight_tokens
        if private != self._pool.private_tokens:
            raise RuntimeError(f"requests hold {private} tokens, the pool counts {self._pool.private_tokens}")
        if self._reservations.tokens != self._pool.reserved_tokens:
            raise RuntimeError(f"reserved are {self._reservations.tokens}, counted {self._pool.reserved_tokens}")
        pins, locks = len(holders) + len(self._reservations), self._pool.cache.locks
        if pins != locks:
            raise RuntimeError(f"requests and reservations pin {pins} prefixes, the cache counts {locks}")

    def _next_order(self) -> int:
        self._submitted += 1
        return self._submitted

    def _end(self, sequence: Sequence | None) -> bool:
        if sequence is None:
            return False
        self._scheduler.end(sequence)
        return True

    def _check_submission(self, in_use: bool, request_id: str, prompt_tokens: int, max_tokens: int) -> None:
        if self._draining:
            raise Draining("the engine is draining")
        if prompt_tokens < 1:
            raise BadRequest("the prompt is empty")
        if in_use:
            raise BadRequest(f"request {request_id!r} is under way already")
        self._check_fits(prompt_tokens, max_tokens)

    def _check_fits(self, prompt_tokens: int, max_tokens: int) -> None:
        limit = min(self.profile.context_length_tokens, self.profile.kv_capacity_tokens)
        if prompt_tokens + max_tokens > limit:
            raise ContextTooLong(f"{prompt_tokens} prompt and {max_tokens} output tokens are more than {limit}")

    def _retry_after_s(self, now_s: float) -> float:
        """A guess when room comes back: the first end of a running request or of a reservation, within bounds."""
        low, high = RETRY_AFTER_S
        expiry_s = self._reservations.next_expiry_s()
        guesses = [high, self._scheduler.soonest_end_s(), high if expiry_s is None else expiry_s - now_s]
        return max(low, min(guesses))


def normalized_end(end: int, prompt_tokens: int) -> int:
    """`end` counted from the front. Raises `BadRequest` unless `0 < end < prompt_tokens` then holds."""
    counted = end + prompt_tokens if end < 0 else end
    if not 0 < counted < prompt_tokens:
        raise BadRequest(f"end {end} is not within the prompt of {prompt_tokens} tokens")
    return counted
