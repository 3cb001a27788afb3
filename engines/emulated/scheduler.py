"""Continuous batching with chunked prefill, first come first served: which pass runs next, and what it changes."""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from engines.emulated.events import Event, Finished, Pass, Prefilled, Token
from engines.emulated.pool import KvPool
from engines.emulated.profile import Profile
from engines.emulated.reservations import Reservations
from engines.emulated.sequences import ChooseToken, Phase, Sequence

DECODE_HEADROOM_TOKENS = 32
"""Room that admission leaves for each running request, so that it is not retracted a moment later."""


@dataclass(slots=True)
class _Current:
    """The pass under way."""

    chunks: list[tuple[Sequence, int]]
    batch: int

    def holds(self, sequence: Sequence) -> bool:
        if sequence.phase is Phase.RUNNING:
            return self.batch > 0
        return any(sequence is chunked for chunked, _ in self.chunks)


class Scheduler:
    """Owns every sequence from submission to its end, and the KV that each holds in the pool."""

    def __init__(self, profile: Profile, pool: KvPool, reservations: Reservations, choose_token: ChooseToken) -> None:
        self._profile = profile
        self._pool = pool
        self._reservations = reservations
        self._choose_token = choose_token
        self.chunked_prefill_tokens = profile.chunked_prefill_tokens
        self.prefill_decode_interval = profile.prefill_decode_interval
        self.generations: dict[str, Sequence] = {}
        self.prefills: dict[str, Sequence] = {}
        self.waiting: deque[Sequence] = deque()
        self.prefilling: list[Sequence] = []
        self.running: list[Sequence] = []
        self.retracted_total = 0
        self._decodes_owed = 0
        self._current: _Current | None = None
        self._ended = 0

    @property
    def admitted(self) -> int:
        return len(self.running) + len(self.prefilling)

    @property
    def pending_prefill_tokens(self) -> int:
        waiting = sum(sequence.expected_prefill_tokens for sequence in self.waiting)
        return waiting + sum(sequence.remaining_prefill_tokens for sequence in self.prefilling)

    @property
    def in_flight_tokens(self) -> int:
        """Room taken for the tokens that the pass under way decodes."""
        return self._current.batch if self._current else 0

    def holders(self) -> Iterator[Sequence]:
        """Every sequence that holds KV: admitted and not yet through, or prefilled and pinned."""
        yield from self.running
        yield from self.prefilling
        yield from (job for job in self.prefills.values() if job.phase is Phase.PREFILLED)

    def set_knobs(self, chunked_prefill_tokens: int | None, prefill_decode_interval: int | None) -> None:
        if chunked_prefill_tokens is not None:
            self.chunked_prefill_tokens = chunked_prefill_tokens
        if prefill_decode_interval is not None:
            self.prefill_decode_interval = prefill_decode_interval
            self._decodes_owed = min(self._decodes_owed, prefill_decode_interval)

    def soonest_end_s(self) -> float:
        """Seconds until the running request with the fewest tokens to go is through; infinite if none runs."""
        if not self.running:
            return math.inf
        to_go = min(sequence.max_tokens - len(sequence.outputs) for sequence in self.running)
        return to_go * self._profile.step_s(len(self.running), sum(sequence.kv_tokens for sequence in self.running))

    def submit(self, sequence: Sequence) -> None:
        self._registry(sequence)[sequence.request_id] = sequence
        sequence.to_compute = sequence.prompt
        self._estimate(sequence)
        self.waiting.append(sequence)

    def end(self, sequence: Sequence) -> None:
        """Forget a sequence. It yields no more events; its KV goes to the cache, after the pass if it is in one."""
        del self._registry(sequence)[sequence.request_id]
        sequence.ended = True
        if sequence.phase is Phase.WAITING:
            self.waiting.remove(sequence)
            self._reservations.unclaim(sequence.request_id, sequence.group)
        elif self._current and self._current.holds(sequence):
            self._ended += 1
        else:
            self._release_kv(sequence)
            self._drop(sequence)

    def begin_pass(self, now_s: float) -> Pass | None:
        if self._current is not None:
            raise RuntimeError("begin_pass while a pass is under way")
        chunks = self._next_chunks(now_s) if self._may_prefill() else []
        batch = self._decode_batch() if self._profile.mixed_chunk or not chunks else 0
        if not chunks and not batch:
            chunks = self._forced_chunks(now_s)
        if not chunks and not batch:
            return None
        self._decodes_owed = self.prefill_decode_interval if chunks else max(0, self._decodes_owed - 1)
        self._current = _Current(chunks, batch)
        return self._describe(chunks, batch)

    def end_pass(self, now_s: float) -> list[Event]:
        if self._current is None:
            raise RuntimeError("end_pass without begin_pass")
        current, self._current = self._current, None
        events: list[Event] = []
        if current.batch:
            self._decode(now_s, events)
        for sequence, tokens in current.chunks:
            self._end_chunk(sequence, tokens, now_s, events)
        if self._ended:
            self._drop_ended()
        return events

    def _registry(self, sequence: Sequence) -> dict[str, Sequence]:
        return self.prefills if sequence.prefill_only else self.generations

    def _estimate(self, sequence: Sequence) -> None:
        """Note how much it will have to compute, as far as the cache can tell now."""
        cached = self._pool.cache.peek(sequence.to_compute, len(sequence.to_compute) - 1)
        sequence.expected_prefill_tokens = len(sequence.to_compute) - cached

    def _may_prefill(self) -> bool:
        return bool(self.prefilling or self.waiting) and (not self.running or self._decodes_owed <= 0)

    def _next_chunks(self, now_s: float) -> list[tuple[Sequence, int]]:
        """Fill the token budget: first what is under way, then the queue in order, as long as there is room."""
        budget = self.chunked_prefill_tokens
        chunks: list[tuple[Sequence, int]] = []
        for sequence in self.prefilling:
            chunks.append((sequence, min(budget, sequence.remaining_prefill_tokens)))
            budget -= chunks[-1][1]
        while budget > 0 and self.waiting and self._admit(self.waiting[0], now_s):
            sequence = self.waiting.popleft()
            self.prefilling.append(sequence)
            chunks.append((sequence, min(budget, sequence.remaining_prefill_tokens)))
            budget -= chunks[-1][1]
        return chunks

    def _forced_chunks(self, now_s: float) -> list[tuple[Sequence, int]]:
        """Nothing runs. If the queue is stuck on room that generations behind its head hold, take that back."""
        chunks = self._next_chunks(now_s)
        while self.waiting and not chunks and self._reservations.release_youngest_claimed():
            chunks = self._next_chunks(now_s)
        return chunks

    def _admit(self, sequence: Sequence, now_s: float) -> bool:
        """Give a waiting sequence the room for its whole uncached prompt, if that leaves the others theirs."""
        if self.admitted >= self._profile.max_running:
            return False
        cache = self._pool.cache
        matched, node = cache.match(sequence.to_compute, len(sequence.to_compute) - 1)
        cache.lock(node)
        needed = len(sequence.to_compute) - matched
        reservation = self._reservations.claimed_by(sequence.request_id, sequence.group)
        room = self._pool.available_tokens + (reservation.tokens if reservation else 0)
        if room < needed + self._headroom_tokens(sequence):
            cache.unlock(node)
            return False
        if reservation:
            self._reservations.release(reservation.request_id)
        self._pool.take(needed)
        self._place(sequence, matched, now_s)
        sequence.node = node
        return True

    def _headroom_tokens(self, sequence: Sequence) -> int:
        """Capped for the sequence itself by what it can still need, so that one that fits alone is always admitted."""
        own = max(0, sequence.max_tokens - len(sequence.outputs) - 1)
        return min(DECODE_HEADROOM_TOKENS, own) + DECODE_HEADROOM_TOKENS * self.admitted

    @staticmethod
    def _place(sequence: Sequence, matched: int, now_s: float) -> None:
        sequence.phase = Phase.PREFILLING
        sequence.locked_tokens = sequence.computed_tokens = matched
        if sequence.admitted_s is None:
            sequence.admitted_s = now_s
            sequence.cached_tokens = matched

    def _decode_batch(self) -> int:
        """Take room for one more token of each running sequence, retracting the youngest while there is too little."""
        while self.running and not self._pool.take(len(self.running)):
            self._retract(max(self.running, key=lambda sequence: sequence.order))
        return len(self.running)

    def _retract(self, sequence: Sequence) -> None:
        """Back to the head of the queue. Its KV stays cached as long as nobody needs the room."""
        self._release_kv(sequence)
        self.running.remove(sequence)
        sequence.phase = Phase.WAITING
        sequence.to_compute = sequence.prompt + sequence.outputs
        sequence.locked_tokens = sequence.computed_tokens = 0
        self._estimate(sequence)
        self.waiting.appendleft(sequence)
        self.retracted_total += 1

    def _describe(self, chunks: list[tuple[Sequence, int]], batch: int) -> Pass:
        new = sum(tokens for _, tokens in chunks)
        context = sum(tokens * (2 * sequence.computed_tokens + tokens) for sequence, tokens in chunks) // 2
        kv = sum([len(s.prompt) + len(s.outputs) for s in self.running]) if batch else 0
        queued = len(self.waiting) + (0 if chunks else len(self.prefilling))
        return Pass(self._profile.pass_s(new, context, batch, kv), new, context, batch, kv, queued)

    def _decode(self, now_s: float, events: list[Event]) -> None:
        choose = self._choose_token
        for sequence in self.running:
            if sequence.ended:
                self._pool.give(1)
                continue
            token = choose(sequence)
            outputs = sequence.outputs
            outputs.append(token)
            events.append(Token(sequence.request_id, token, now_s))
            if len(outputs) >= sequence.max_tokens:
                self._complete(sequence, now_s, events)

    def _end_chunk(self, sequence: Sequence, tokens: int, now_s: float, events: list[Event]) -> None:
        sequence.computed_tokens += tokens
        self._cache_computed(sequence)
        if sequence.ended or sequence.remaining_prefill_tokens:
            return
        self.prefilling.remove(sequence)
        if sequence.prefill_only:
            sequence.phase = Phase.PREFILLED
            events.append(self._prefilled(sequence, now_s))
        else:
            self._start_decoding(sequence, now_s, events)

    def _cache_computed(self, sequence: Sequence) -> None:
        """Let other requests share what is computed so far."""
        cache, computed = self._pool.cache, sequence.computed_tokens
        node = self._pool.store(sequence.to_compute, computed, computed - sequence.locked_tokens)
        cache.lock(node)
        if sequence.node is not None:
            cache.unlock(sequence.node)
        sequence.node, sequence.locked_tokens = node, computed

    def _start_decoding(self, sequence: Sequence, now_s: float, events: list[Event]) -> None:
        token = self._choose_token(sequence)
        sequence.outputs.append(token)
        sequence.phase = Phase.RUNNING
        if sequence.first_token_s is None:
            sequence.first_token_s = now_s
        self.running.append(sequence)
        events.append(Token(sequence.request_id, token, now_s))
        if len(sequence.outputs) >= sequence.max_tokens:
            self._complete(sequence, now_s, events)

    def _complete(self, sequence: Sequence, now_s: float, events: list[Event]) -> None:
        events.append(Finished(sequence.request_id, sequence.timings(now_s)))
        del self.generations[sequence.request_id]
        sequence.ended = True
        self._ended += 1

    @staticmethod
    def _prefilled(job: Sequence, now_s: float) -> Prefilled:
        admitted_s = now_s if job.admitted_s is None else job.admitted_s
        queue_s, prefill_s = admitted_s - job.submitted_s, now_s - job.submitted_s
        return Prefilled(job.request_id, job.cached_tokens, queue_s, prefill_s, now_s)

    def _release_kv(self, sequence: Sequence) -> None:
        """A running sequence leaves all it computed in the cache; a prefilling one has put it there chunk by chunk."""
        if sequence.phase is Phase.RUNNING:
            self._pool.store(sequence.prompt + sequence.outputs, sequence.kv_tokens, sequence.private_tokens)
        else:
            self._pool.give(sequence.private_tokens)
        if sequence.node is not None:
            self._pool.cache.unlock(sequence.node)
            sequence.node = None

    def _drop(self, sequence: Sequence) -> None:
        for batch in (self.running, self.prefilling):
            if sequence in batch:
                batch.remove(sequence)

    def _drop_ended(self) -> None:
        """Let go of what finished in the pass, and of what was ended while it ran."""
        for sequence in (*self.running, *self.prefilling):
            if sequence.ended:
                self._release_kv(sequence)
        self.running = [sequence for sequence in self.running if not sequence.ended]
        self.prefilling = [sequence for sequence in self.prefilling if not sequence.ended]
        self._ended = 0
