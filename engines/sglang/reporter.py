"""What the scheduler process tells about its passes, gathered so that few messages carry much."""

from collections.abc import Callable

from engines.metrics import Counters
from engines.prefill_rate import PrefillRate
from engines.records import PassRecord
from engines.sampling import PassSample
from engines.sglang.messages import Sampled, Totals
from engines.sglang.view import Identity, Pass
from engines.types import EngineLoad

REPORT_EVERY_S = 0.25


class Reporter:
    """Samples and totals of one engine."""

    def __init__(
        self, identity: Identity, bytes_per_token: int, clock: Callable[[], float], wall: Callable[[], float]
    ) -> None:
        self._identity = identity
        self._bytes_per_token = bytes_per_token
        self._clock = clock
        self._wall = wall
        self._passes: list[PassRecord] = []
        self._sample = PassSample()
        self._last_end_s: float | None = None
        self._reported_s = clock()
        self._prefill_rate = PrefillRate()
        self.counters = Counters()

    @property
    def is_due(self) -> bool:
        return bool(self._passes) and self._clock() >= self._reported_s + REPORT_EVERY_S

    @property
    def prefill_tokens_per_s(self) -> float | None:
        return self._prefill_rate.tokens_per_s

    def on_idle(self) -> None:
        """The scheduler had nothing to run."""
        self._last_end_s = None

    def on_pass(self, ended: Pass) -> None:
        # Without a pause, a pass lasts from the end of the one before: what the scheduler does between two is part of
        # what a stream waits for, and passes may overlap.
        wall_s = ended.ended_s - (ended.launched_s if self._last_end_s is None else self._last_end_s)
        prefill_tokens = sum(found.to - found.begin for found in ended.prefills)
        self.counters.passed(wall_s, prefill_tokens)
        self._prefill_rate.on_pass(prefill_tokens, wall_s, ended.queued)
        self.counters.output_tokens += ended.decode_batch + sum(found.through for found in ended.prefills)
        if self._sample.wants(prefill_tokens, ended.ended_s - wall_s):
            self._passes.append(self._record(ended, wall_s))
        self._last_end_s = ended.ended_s

    def on_received(self, wall_s: float, tokens: int) -> None:
        """A transfer arrived whole."""
        self.counters.transfer_bytes += tokens * self._bytes_per_token
        self.counters.transfer_s += wall_s

    def take(self, load: EngineLoad) -> Sampled:
        """Everything since the last time."""
        self._reported_s = self._clock()
        told = Sampled(passes=self._passes, load=load, totals=self.totals)
        self._passes = []
        return told

    @property
    def totals(self) -> Totals:
        return Totals(**{name: getattr(self.counters, name) for name in Totals.__struct_fields__})

    def _record(self, ended: Pass, wall_s: float) -> PassRecord:
        new = [(found.begin, found.to) for found in ended.prefills]
        return PassRecord(
            engine_id=self._identity.engine_id,
            kind=self._identity.kind,
            at_s=self._wall(),
            wall_s=wall_s,
            prefill_tokens=sum(to - begin for begin, to in new),
            prefill_context_tokens=sum((to * (to + 1) - begin * (begin + 1)) // 2 for begin, to in new),
            decode_batch=ended.decode_batch,
            kv_tokens=ended.kv_tokens,
            queued=ended.queued,
        )
