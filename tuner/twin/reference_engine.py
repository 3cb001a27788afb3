"""One engine of the reference simulator: kernel and inbound link, and what the router knows of both."""

import math
from dataclasses import dataclass, field

from engines.emulated.events import Pass
from engines.emulated.kernel import Kernel
from engines.emulated.link import Link
from engines.prefill_rate import PrefillRate
from engines.records import PassRecord, TransferRecord
from engines.sampling import PassSample
from engines.types import EngineLoad
from tuner.placement import EngineView
from tuner.plan import Plan
from tuner.twin.prompts import choose_token
from tuner.twin.types import TwinEngine


@dataclass(slots=True)
class Samples:
    """What an engine would have reported of its passes and transfers."""

    passes: list[PassRecord] = field(default_factory=list)
    transfers: list[TransferRecord] = field(default_factory=list)


class ReferenceEngine:
    """The kernel, its link, and the router's own counts of work in flight here."""

    def __init__(self, index: int, engine: TwinEngine, plan: Plan) -> None:
        profile = engine.profile
        self.index = index
        self.engine_id = engine.engine_id
        self.profile = profile
        self.bytes_per_token = profile.kv_layout.bytes_per_token
        self.kernel = Kernel(profile, choose_token)
        self.link = Link(profile.bandwidth_bytes_per_s, profile.g_s)
        self.link_version = 0
        self.current: Pass | None = None
        self.available = True
        self.view = EngineView(self.engine_id, plan.role_of(self.engine_id))
        self.own_inflight = 0
        self.own_pending_tokens = 0
        self.own_transfers = 0
        self.reported = EngineLoad(kv_capacity_tokens=profile.kv_capacity_tokens)
        self.reported_inflight = 0
        self.expiry_s = math.inf
        """No reservation is past its time before this."""
        self.busy_prefill_s = 0.0
        self.busy_decode_s = 0.0
        self._sample = PassSample()
        self._prefill_rate = PrefillRate()
        self.poll()

    def poll(self) -> None:
        """The router asks for the load."""
        load = self.reported = self.kernel.load()
        self.reported_inflight = load.running + load.queued
        self.view.available = self.available
        self.view.kv_free_tokens = load.kv_free_tokens
        self.view.prefill_tokens_per_s = self._prefill_rate.tokens_per_s
        self.refresh()

    def refresh(self) -> None:
        view = self.view
        view.inflight = max(self.own_inflight, self.reported_inflight)
        view.pending_prefill_tokens = max(self.own_pending_tokens, self.reported.pending_prefill_tokens)

    def expire(self, now_s: float) -> None:
        if now_s >= self.expiry_s:
            self.kernel.expire(now_s)
            following_s = self.kernel.next_expiry_s()
            self.expiry_s = math.inf if following_s is None else following_s

    def count(self, ended: Pass) -> None:
        self._prefill_rate.on_pass(ended.prefill_tokens, ended.duration_s, ended.queued)
        if ended.prefill_tokens:
            self.busy_prefill_s += ended.duration_s
        else:
            self.busy_decode_s += ended.duration_s

    def sample(self, ended: Pass, now_s: float, samples: Samples) -> None:
        if not self._sample.wants(ended.prefill_tokens, now_s - ended.duration_s):
            return
        samples.passes.append(
            PassRecord(
                engine_id=self.engine_id,
                kind=self.profile.kind,
                at_s=now_s,
                wall_s=ended.duration_s,
                prefill_tokens=ended.prefill_tokens,
                prefill_context_tokens=ended.prefill_context_tokens,
                decode_batch=ended.decode_batch,
                kv_tokens=ended.kv_tokens,
                queued=ended.queued,
            )
        )


class Hold:
    """A request's place on an engine in the router's own counts, until `release`."""

    __slots__ = ("_engine", "_prefill_tokens", "_released")

    def __init__(self, engine: ReferenceEngine, prefill_tokens: int) -> None:
        self._engine = engine
        self._prefill_tokens = prefill_tokens
        self._released = False
        engine.own_inflight += 1
        engine.own_pending_tokens += prefill_tokens
        engine.view.kv_free_tokens = max(0, engine.view.kv_free_tokens - prefill_tokens)
        engine.refresh()

    def prefilled(self) -> None:
        self._engine.own_pending_tokens -= self._prefill_tokens
        self._prefill_tokens = 0
        self._engine.refresh()

    def release(self) -> None:
        if not self._released:
            self._released = True
            self._engine.own_inflight -= 1
            self.prefilled()
