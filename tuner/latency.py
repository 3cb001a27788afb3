"""How long things take on each kind of engine, learnt from what engines report.

Prefill and decode are learnt from forward passes, transfer from inbound transfers; each is linear in its work, with
coefficients that are never negative. What counts is what an engine calls a pass: an emulated engine reports the time
that it modelled, a real one the wall time from the end of the pass before, or from the launch if it was idle.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Self, TypeVar

import msgspec
import numpy as np

from engines.emulated.profile import Profile
from engines.records import PassRecord, TransferRecord
from engines.types import EngineInfo, EngineLoad
from tuner.latency_model import (
    Estimate,
    Latency,
    LatencyModel,
    ModelError,
    Prior,
    StoredModel,
    plausible,
    prior_of,
)
from tuner.latency_prior import guessed_prior
from tuner.latency_samples import Sample
from tuner.warm_up import WarmUp
from tuner.workload import Floats

PRIOR_WEIGHT = 8.0
"""Samples that a shipped profile is worth."""
GUESS_WEIGHT = 2.0
"""Samples that a guess is worth."""
MAX_KINDS = 64
MAX_BATCH = 1_000_000
MOST_DECODE_SHARE = 0.6
"""Of a pass that also prefills; where decodes are more of it, it says too little about prefill."""
LEAST_SECONDS_PER_BYTE = 1e-15

Record = TypeVar("Record", PassRecord, TransferRecord)


class _Kind:
    """All that is known of one kind of engine."""

    def __init__(self) -> None:
        self.models = {latency: LatencyModel(latency) for latency in Latency}
        self.priors: dict[Latency, Prior] = {}
        """Empty until the kind's profile or KV layout is known."""
        self.largest_batch = 0
        self.mixes = False
        """Whether one of its passes has prefilled and decoded at once."""


class _StoredKind(msgspec.Struct):
    models: dict[Latency, StoredModel]
    largest_batch: int
    mixes: bool


class _Stored(msgspec.Struct, tag=1, tag_field="version"):
    kinds: dict[str, _StoredKind]


class LatencyModels:
    """Fitted latencies by engine kind; bounded in memory.

    `priors` are profiles by kind. `warm_up`, if given, tells which samples are of engines that have just joined.
    Feed it each tick, then `refit`.
    """

    def __init__(self, priors: Mapping[str, Profile], warm_up: WarmUp | None = None) -> None:
        self._profiles = dict(priors)
        self._shipped = frozenset(priors)
        self._warm_up = warm_up
        self._kinds: dict[str, _Kind] = {}
        self.refused: Counter[str] = Counter()
        """Samples that were not used, by why: `absurd`, `warm_up`, `mixed`, `too_many_kinds`."""

    def add_passes(self, passes: Sequence[PassRecord]) -> None:
        """Take in forward passes; those that make no sense are counted and left out."""
        for kind, records in self._usable(passes, _sane_pass):
            kind.largest_batch = max(kind.largest_batch, *(int(record.decode_batch) for record in records))
            kind.mixes |= any(record.prefill_tokens and record.decode_batch for record in records)
            steps = [_step_sample(record) for record in records if not record.prefill_tokens]
            kind.models[Latency.DECODE].learn(steps, kind.priors.get(Latency.DECODE))
            prefills = self._prefill_samples(kind, [record for record in records if record.prefill_tokens])
            kind.models[Latency.PREFILL].learn(prefills, kind.priors.get(Latency.PREFILL))

    def add_transfers(self, transfers: Sequence[TransferRecord]) -> None:
        """Take in KV transfers; those that make no sense are counted and left out."""
        for kind, records in self._usable(transfers, _sane_transfer):
            samples = [_transfer_sample(record) for record in records]
            kind.models[Latency.TRANSFER].learn(samples, kind.priors.get(Latency.TRANSFER))

    def refit(self) -> None:
        """Fit anew what has new samples."""
        for kind in self._kinds.values():
            for latency, prior in kind.priors.items():
                kind.models[latency].refit(prior)

    def profile_for(self, kind: str, info: EngineInfo, load: EngineLoad | None = None) -> Profile:
        """The profile that this engine behaves by: latencies as fitted, memory as it says itself.

        Chunk and interval are those that such engines start with, not what a plan set since: a profile is what plans
        are made from. Of kinds without a shipped profile they are what the first such engine reported.
        """
        if kind not in self._profiles:
            self._profiles[kind] = _with_knobs(guessed_prior(kind, info), load)
        known = self._known(kind)
        profile = self._profiles[kind]
        if known is not None:
            profile = _fitted(profile, known)
        return msgspec.structs.replace(
            profile,
            model=info.model,
            kv_layout=info.kv_layout,
            kv_capacity_tokens=max(1, info.kv_capacity_tokens),
            context_length_tokens=max(1, info.context_length_tokens),
        )

    def estimate(self, kind: str, latency: Latency, first: float, second: float = 0.0) -> Estimate | None:
        """Seconds for this much work (see `Latency`); `None` for a kind of which nothing is known."""
        known = self._known(kind)
        if known is None or latency not in known.priors:
            return None
        return known.models[latency].estimate(first, second, known.priors[latency])

    def errors(self) -> Mapping[tuple[str, Latency], ModelError]:
        """By kind and latency: the newest predictions against what then happened."""
        return {
            (name, latency): model.error()
            for name, kind in list(self._kinds.items())  # scrapes ask while a thread adds kinds
            for latency, model in kind.models.items()
        }

    def state(self) -> bytes:
        """What a new leader needs to go on: JSON, some tens of kilobytes for each kind."""
        kinds = {
            name: _StoredKind(
                models={latency: model.stored() for latency, model in kind.models.items()},
                largest_batch=kind.largest_batch,
                mixes=kind.mixes,
            )
            for name, kind in self._kinds.items()
        }
        return msgspec.json.encode(_Stored(kinds=kinds))

    @classmethod
    def from_state(cls, raw: bytes, priors: Mapping[str, Profile], warm_up: WarmUp | None = None) -> Self:
        """Models as another instance left them. Raises `ValueError` if `raw` is no such state."""
        try:
            stored = msgspec.json.decode(raw, type=_Stored)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"this is no state of latency models: {error}") from error
        models = cls(priors, warm_up)
        for name, of_kind in list(stored.kinds.items())[:MAX_KINDS]:
            kind = models._known(name)
            if kind is not None:
                kind.mixes, kind.largest_batch = of_kind.mixes, min(MAX_BATCH, max(0, of_kind.largest_batch))
                for latency, model in of_kind.models.items():
                    kind.models[latency] = LatencyModel.restored(latency, model)
        models.refit()
        return models

    def _usable(
        self, records: "Sequence[Record]", sane: "Callable[[Record], bool]"
    ) -> "Iterator[tuple[_Kind, list[Record]]]":
        """Records that can be learnt from, by kind."""
        good = [record for record in records if sane(record)]
        self.refused["absurd"] += len(records) - len(good)
        by_kind: dict[str, list[Record]] = {}
        for record in self._warm(good):
            by_kind.setdefault(record.kind, []).append(record)
        for name, of_kind in by_kind.items():
            kind = self._known(name)
            if kind is None:
                self.refused["too_many_kinds"] += len(of_kind)
            else:
                yield kind, of_kind

    def _warm(self, records: "list[Record]") -> "list[Record]":
        if self._warm_up is None or not records:
            return records
        began_s = np.array([record.at_s - record.wall_s for record in records])
        warming = self._warm_up.warming([record.engine_id for record in records], began_s)
        self.refused["warm_up"] += int(warming.sum())
        return [record for record, cold in zip(records, warming, strict=True) if not cold]

    def _known(self, name: str) -> _Kind | None:
        """What is known of a kind; `None` if there are too many."""
        if name not in self._kinds:
            if len(self._kinds) >= MAX_KINDS:
                return None
            self._kinds[name] = _Kind()
        kind = self._kinds[name]
        if not kind.priors and name in self._profiles:
            kind.priors = {latency: self._prior(name, latency) for latency in Latency}
            for latency, prior in kind.priors.items():
                kind.models[latency].refit(prior)
        return kind

    def _prior(self, name: str, latency: Latency) -> Prior:
        """The network between engines is no property of their kind, so of transfers a profile can only guess."""
        shipped = name in self._shipped and latency is not Latency.TRANSFER
        return prior_of(self._profiles[name], latency, PRIOR_WEIGHT if shipped else GUESS_WEIGHT)

    def _prefill_samples(self, kind: _Kind, records: Sequence[PassRecord]) -> list[Sample]:
        """Passes that prefill, less what decodes in the same pass are thought to add."""
        prior = kind.priors.get(Latency.DECODE)
        per_sequence = kind.models[Latency.DECODE].coefficients(prior)[1:] if prior is not None else None
        samples = []
        for record in records:
            added_s = _added_s(record, per_sequence)
            if added_s > MOST_DECODE_SHARE * record.wall_s:
                self.refused["mixed"] += 1
                continue
            tokens, context = float(record.prefill_tokens), float(record.prefill_context_tokens)
            samples.append((tokens, context, record.wall_s - added_s, record.at_s))
        return samples


def _fitted(profile: Profile, kind: _Kind) -> Profile:
    """The profile with coefficients in place of its own."""
    a_s, b_s, c_s = map(float, kind.models[Latency.PREFILL].coefficients(kind.priors[Latency.PREFILL]))
    d_s, e_s, f_s = map(float, kind.models[Latency.DECODE].coefficients(kind.priors[Latency.DECODE]))
    g_s, per_byte_s = map(float, kind.models[Latency.TRANSFER].coefficients(kind.priors[Latency.TRANSFER]))
    return msgspec.structs.replace(
        profile,
        a_s=a_s,
        b_s_per_token=b_s,
        c_s_per_token2=c_s,
        d_s=d_s,
        e_s_per_sequence=e_s,
        f_s_per_kv_token=f_s,
        g_s=g_s,
        bandwidth_bytes_per_s=1 / max(LEAST_SECONDS_PER_BYTE, per_byte_s),
        mixed_chunk=profile.mixed_chunk or kind.mixes,
        max_running=max(profile.max_running, kind.largest_batch),
    )


def _added_s(record: PassRecord, per_sequence: Floats | None) -> float:
    """What decodes add to a pass that prefills; infinite if nothing is known about decodes."""
    if not record.decode_batch:
        return 0.0
    if per_sequence is None:
        return float("inf")
    return float(per_sequence[0] * record.decode_batch + per_sequence[1] * record.kv_tokens)


def _sane_pass(record: PassRecord) -> bool:
    if not plausible((record.prefill_tokens, record.prefill_context_tokens, record.wall_s, record.at_s)):
        return False
    worked = record.prefill_tokens > 0 or record.decode_batch > 0
    return worked and 0 <= record.decode_batch <= MAX_BATCH and plausible(_step_sample(record))


def _sane_transfer(record: TransferRecord) -> bool:
    bounded = plausible((record.bytes, 0.0, record.wall_s, record.at_s)) and 0 <= record.concurrent <= MAX_BATCH
    return bounded and plausible(_transfer_sample(record))


def _step_sample(record: PassRecord) -> Sample:
    return record.decode_batch, record.kv_tokens, record.wall_s, record.at_s


def _transfer_sample(record: TransferRecord) -> Sample:
    return record.bytes * max(1, record.concurrent), 0.0, record.wall_s, record.at_s


def _with_knobs(profile: Profile, load: EngineLoad | None) -> Profile:
    """The profile with the chunk and interval that an engine reports, as far as it does."""
    chunk = load.chunked_prefill_tokens if load is not None else None
    interval = load.prefill_decode_interval if load is not None else None
    return msgspec.structs.replace(
        profile,
        chunked_prefill_tokens=profile.chunked_prefill_tokens if chunk is None else max(16, chunk),
        prefill_decode_interval=profile.prefill_decode_interval if interval is None else min(64, max(0, interval)),
    )
