"""Latency models: known coefficients found again, physics kept, priors that fade, bounded memory."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.emulated.profile import Profile
from engines.records import PassRecord, TransferRecord
from engines.types import EngineInfo, EngineLoad
from tuner.latency import MAX_KINDS, LatencyModels
from tuner.latency_model import ERRORS, Latency
from tuner.latency_prior import shipped_priors
from tuner.latency_samples import MAX_CELLS, PER_CELL, Samples
from tuner.warm_up import WarmUp

PRIORS = shipped_priors()
PRIOR = PRIORS["a100-llama-2-13b"]
KIND = PRIOR.kind
COEFFICIENTS = (
    "a_s",
    "b_s_per_token",
    "c_s_per_token2",
    "d_s",
    "e_s_per_sequence",
    "f_s_per_kv_token",
    "g_s",
    "bandwidth_bytes_per_s",
)
TRUE = msgspec.structs.replace(
    PRIOR,
    a_s=0.02,
    b_s_per_token=2e-4,
    c_s_per_token2=2e-8,
    d_s=0.03,
    e_s_per_sequence=1e-4,
    f_s_per_kv_token=3e-7,
    g_s=5e-3,
    bandwidth_bytes_per_s=3e9,
)
INFO = EngineInfo(
    engine_id="e",
    url="http://127.0.0.1:1",
    kind=KIND,
    model=PRIOR.model,
    context_length_tokens=4096,
    kv_capacity_tokens=50_000,
    kv_layout=PRIOR.kv_layout,
    transports=(),
    epoch="1",
)


def a_pass(wall_s: float, prefill: int = 0, context: int = 0, batch: int = 0, kv: int = 0, **given) -> PassRecord:
    values = {"engine_id": "e", "kind": KIND, "at_s": 1000.0, "queued": 0} | given
    return PassRecord(
        wall_s=wall_s,
        prefill_tokens=prefill,
        prefill_context_tokens=context,
        decode_batch=batch,
        kv_tokens=kv,
        **values,
    )


def a_transfer(wall_s: float, nbytes: int, concurrent: int = 1, **given) -> TransferRecord:
    values = {"engine_id": "e", "kind": KIND, "at_s": 1000.0} | given
    return TransferRecord(wall_s=wall_s, bytes=nbytes, concurrent=concurrent, **values)


class World:
    """Passes and transfers of an engine that is as `profile` says, with noise and outliers."""

    def __init__(self, profile: Profile, seed: int = 1, noise: float = 0.03, outliers: float = 0.1) -> None:
        self.profile = profile
        self._rng = np.random.default_rng(seed)
        self._noise = noise
        self._outliers = outliers

    def _measured(self, seconds: float) -> float:
        outlier = self._rng.uniform(2, 10) if self._rng.random() < self._outliers else 1.0
        return float(seconds * np.exp(self._noise * self._rng.normal()) * outlier)

    def prefill(self, **given) -> PassRecord:
        tokens = int(np.exp(self._rng.uniform(np.log(16), np.log(2048))))
        before = self._rng.uniform(0, 2000) if self._rng.random() < 0.5 else 0.0
        context = int(tokens * (before + tokens / 2))
        return a_pass(self._measured(self.profile.prefill_s(tokens, context)), tokens, context, **given)

    def step(self, **given) -> PassRecord:
        batch = int(self._rng.integers(1, 60))
        kv = int(batch * self._rng.uniform(100, 2000))
        return a_pass(self._measured(self.profile.step_s(batch, kv)), batch=batch, kv=kv, **given)

    def mixed(self) -> PassRecord:
        batch, kv = 20, 20_000
        tokens = int(self._rng.integers(64, 2048))
        context = tokens * tokens // 2
        seconds = self.profile.pass_s(tokens, context, batch, kv)
        return a_pass(self._measured(seconds), tokens, context, batch, kv)

    def transfer(self) -> TransferRecord:
        nbytes, concurrent = int(self._rng.uniform(1e6, 2e9)), int(self._rng.integers(1, 4))
        return a_transfer(self._measured(self.profile.transfer_s(nbytes, concurrent)), nbytes, concurrent)

    def teach(self, models: LatencyModels, count: int, batches: int = 1) -> None:
        for _ in range(batches):
            models.add_passes([each() for _ in range(count // batches) for each in (self.prefill, self.step)])
            models.add_transfers([self.transfer() for _ in range(count // batches)])
            models.refit()


def taught(count: int, **given) -> LatencyModels:
    models = LatencyModels(PRIORS)
    World(TRUE, **given).teach(models, count)
    return models


def off(profile: Profile, true: Profile = TRUE) -> float:
    """Largest relative error over typical work."""
    pairs = [
        *(
            (profile.prefill_s(n, n * (p + n / 2)), true.prefill_s(n, n * (p + n / 2)))
            for n in (64, 2048)
            for p in (0, 2000)
        ),
        *((profile.step_s(batch, 500 * batch), true.step_s(batch, 500 * batch)) for batch in (1, 16, 60)),
        *((profile.transfer_s(nbytes), true.transfer_s(nbytes)) for nbytes in (10**7, 10**9)),
    ]
    return max(abs(ours / theirs - 1) for ours, theirs in pairs)


def test_known_coefficients_are_found_among_a_tenth_of_outliers():
    profile = taught(1000).profile_for(KIND, INFO)
    assert off(profile) < 0.03
    assert profile.b_s_per_token == pytest.approx(TRUE.b_s_per_token, rel=0.03)
    assert profile.d_s == pytest.approx(TRUE.d_s, rel=0.03)
    assert profile.bandwidth_bytes_per_s == pytest.approx(TRUE.bandwidth_bytes_per_s, rel=0.03)


def test_without_data_the_prior_speaks():
    profile = LatencyModels(PRIORS).profile_for(KIND, INFO)
    assert [getattr(profile, name) for name in COEFFICIENTS] == pytest.approx(
        [getattr(PRIOR, name) for name in COEFFICIENTS]
    )


def test_the_prior_fades_as_data_come_in():
    true = msgspec.structs.replace(TRUE, bandwidth_bytes_per_s=5e10)
    errors = []
    for count in (0, 5, 50, 500):
        models = LatencyModels(PRIORS)
        if count:
            World(true, outliers=0.0).teach(models, count)
        errors.append(off(models.profile_for(KIND, INFO), true))
    assert errors[0] > errors[1] > errors[2] > errors[3]
    assert errors[3] < 0.03


def test_one_wild_sample_hardly_moves_the_prior():
    models = LatencyModels(PRIORS)
    models.add_passes([a_pass(100 * PRIOR.step_s(10, 5000), batch=10, kv=5000)])
    models.refit()
    assert models.profile_for(KIND, INFO).step_s(10, 5000) < 3 * PRIOR.step_s(10, 5000)


def test_rare_batches_that_are_far_slower_than_believed_are_no_outliers():
    models, rng = LatencyModels(PRIORS), np.random.default_rng(1)
    info = msgspec.structs.replace(INFO, kind="new")
    models.profile_for("new", info)
    steps_s = [0.14] * 85 + [0.21] * 10 + [0.27] * 3
    models.add_passes(
        [
            msgspec.structs.replace(a_pass(step_s * rng.normal(1, 0.05), batch=batch, kv=100 * batch), kind="new")
            for step_s in steps_s
            for batch in [1 + (step_s > 0.14) + (step_s > 0.21)]
        ]
    )
    models.refit()
    fitted = models.profile_for("new", info)
    assert [fitted.step_s(batch, 100 * batch) for batch in (1, 2, 3)] == pytest.approx([0.14, 0.21, 0.27], rel=0.1)


def test_data_of_one_size_leave_the_shape_to_the_prior():
    """Engines that so far only saw short prompts, and are twice as slow as shipped, are so for long ones as well."""
    slow = msgspec.structs.replace(PRIOR, a_s=2 * PRIOR.a_s, b_s_per_token=2 * PRIOR.b_s_per_token)
    models = LatencyModels(PRIORS)
    models.add_passes([a_pass(slow.prefill_s(100, 5000), 100, 5000) for _ in range(300)])
    models.refit()
    assert models.profile_for(KIND, INFO).prefill_s(4000, 8_000_000) == pytest.approx(
        2 * PRIOR.prefill_s(4000, 8_000_000), rel=0.15
    )


def test_a_kind_without_a_profile_is_learnt_from_nothing():
    info = msgspec.structs.replace(INFO, kind="new")
    models = LatencyModels({})
    world = World(TRUE)
    models.add_passes([each(kind="new") for _ in range(500) for each in (world.prefill, world.step)])
    models.refit()
    learnt = models.profile_for("new", info)
    assert learnt.name == learnt.kind == "new"
    assert learnt.prefill_s(1000, 500_000) == pytest.approx(TRUE.prefill_s(1000, 500_000), rel=0.05)
    assert learnt.step_s(30, 20_000) == pytest.approx(TRUE.step_s(30, 20_000), rel=0.05)


def test_kinds_are_apart():
    models = taught(200)
    other = models.profile_for("laptop", msgspec.structs.replace(INFO, kind="laptop"))
    assert other.d_s == PRIORS["laptop"].d_s


def test_memory_is_what_the_engine_says():
    profile = LatencyModels(PRIORS).profile_for(KIND, msgspec.structs.replace(INFO, kv_capacity_tokens=777))
    assert (profile.kv_capacity_tokens, profile.context_length_tokens) == (777, 4096)


def test_knobs_that_a_plan_has_set_do_not_become_what_plans_start_from():
    set_by_a_plan = EngineLoad(chunked_prefill_tokens=512, prefill_decode_interval=3)
    profile = LatencyModels(PRIORS).profile_for(KIND, INFO, set_by_a_plan)
    assert profile.chunked_prefill_tokens == PRIOR.chunked_prefill_tokens
    assert profile.prefill_decode_interval == PRIOR.prefill_decode_interval


def test_an_unknown_kind_starts_with_the_knobs_that_it_reported_first():
    models, info = LatencyModels(PRIORS), msgspec.structs.replace(INFO, kind="unheard-of")
    first = models.profile_for("unheard-of", info, EngineLoad(chunked_prefill_tokens=2000, prefill_decode_interval=1))
    later = models.profile_for("unheard-of", info, EngineLoad(chunked_prefill_tokens=512, prefill_decode_interval=3))
    assert (first.chunked_prefill_tokens, first.prefill_decode_interval) == (2000, 1)
    assert (later.chunked_prefill_tokens, later.prefill_decode_interval) == (2000, 1)


def test_passes_that_mix_teach_prefill_once_decodes_are_known():
    world = World(TRUE, outliers=0.0)
    models = LatencyModels(PRIORS)
    models.add_passes([world.step() for _ in range(300)])
    models.refit()
    models.add_passes([world.mixed() for _ in range(300)])
    models.refit()
    profile = models.profile_for(KIND, INFO)
    assert profile.mixed_chunk
    assert profile.prefill_s(1000, 500_000) == pytest.approx(TRUE.prefill_s(1000, 500_000), rel=0.05)


def test_a_mixed_pass_that_mostly_decodes_teaches_nothing_about_prefill():
    models = LatencyModels(PRIORS)
    models.add_passes([a_pass(0.06, 1, 1, batch=250, kv=100_000)])
    assert models.refused["mixed"] == 1
    assert models.errors()[KIND, Latency.PREFILL].samples == 0


def test_rare_long_prompts_are_remembered_beside_many_short_ones():
    models = LatencyModels(PRIORS)
    long = TRUE.prefill_s(4000, 8_000_000)
    models.add_passes([a_pass(long, 4000, 8_000_000) for _ in range(20)])
    for _ in range(20):
        models.add_passes([a_pass(TRUE.prefill_s(n, n * n // 2), n, n * n // 2) for n in range(20, 220)])
    models.refit()
    assert models.profile_for(KIND, INFO).prefill_s(4000, 8_000_000) == pytest.approx(long, rel=0.03)


def test_engines_that_change_are_learnt_anew():
    models = taught(500)
    faster = msgspec.structs.replace(TRUE, d_s=TRUE.d_s / 2, e_s_per_sequence=5e-5, f_s_per_kv_token=1.5e-7)
    world = World(faster, seed=2)
    for _ in range(4):
        models.add_passes([world.step() for _ in range(500)])
        models.refit()
    assert models.profile_for(KIND, INFO).step_s(30, 15_000) == pytest.approx(faster.step_s(30, 15_000), rel=0.05)


def test_errors_are_of_predictions_made_before_the_sample_was_known():
    models = LatencyModels(PRIORS)
    world = World(TRUE, outliers=0.0)
    models.add_passes([world.step() for _ in range(100)])
    before = models.errors()[KIND, Latency.DECODE]
    world.teach(models, 2000, batches=4)
    after = models.errors()[KIND, Latency.DECODE]
    assert (before.checked, after.checked) == (100, ERRORS)
    assert before.p50 > 0.2
    assert before.bias < -0.2  # the prior is faster than the world
    assert after.mape < 0.05
    assert after.p90 < 0.1


def test_bounds_hold_about_nine_samples_in_ten():
    models = taught(1000, outliers=0.0)
    world = World(TRUE, seed=5, outliers=0.0)
    inside = []
    for _ in range(400):
        record = world.prefill()
        estimate = models.estimate(KIND, Latency.PREFILL, record.prefill_tokens, record.prefill_context_tokens)
        assert estimate is not None
        inside.append(estimate.low_s <= record.wall_s <= estimate.high_s)
    assert 0.8 < np.mean(inside) < 0.98
    assert models.estimate("unheard of", Latency.PREFILL, 1, 1) is None


def test_bounds_are_wide_before_there_are_data():
    models = LatencyModels(PRIORS)
    models.profile_for(KIND, INFO)
    estimate = models.estimate(KIND, Latency.DECODE, 10, 1000)
    assert estimate is not None
    assert estimate.low_s < 0.6 * estimate.seconds < 1.4 * estimate.seconds < estimate.high_s


def test_samples_of_engines_that_have_just_joined_are_left_out():
    warm_up = WarmUp(warm_up_s=10)
    warm_up.seen({"e": "1"}, 995.0)
    models = LatencyModels(PRIORS, warm_up)
    models.add_passes([a_pass(9.0, batch=1, kv=100, at_s=1005.0), a_pass(0.03, batch=1, kv=100, at_s=1010.0)])
    models.add_transfers([a_transfer(2.0, 1000, at_s=1000.0)])
    assert models.refused["warm_up"] == 2
    assert models.errors()[KIND, Latency.DECODE].samples == 1


def test_a_new_leader_goes_on_where_the_old_one_stopped():
    models = taught(1000)
    models.add_passes([a_pass(0.05, 10, 50, batch=300, kv=1000)])
    raw = models.state()
    again = LatencyModels.from_state(raw, PRIORS)
    ours, theirs = (each.profile_for(KIND, INFO) for each in (models, again))
    assert off(theirs, ours) < 0.03
    assert (theirs.max_running, theirs.mixed_chunk) == (300, True)
    assert again.errors()[KIND, Latency.DECODE].checked == ERRORS
    assert len(raw) < 60_000


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'{"version": 9, "kinds": {}}', b'{"version": 1}', b"\xff\xfe"])
def test_a_state_that_is_none_is_refused(raw: bytes):
    with pytest.raises(ValueError, match="no state of latency models"):
        LatencyModels.from_state(raw, PRIORS)


def test_absurd_samples_in_a_state_are_left_out():
    raw = b'{"version":1,"kinds":{"%b":{"models":{"decode":{"samples":[[1,1,-5,0],[1e99,1,1,1]],"errors":[]}},' % (
        KIND.encode()
    )
    models = LatencyModels.from_state(raw + b'"largest_batch":-7,"mixes":false}}}', PRIORS)
    assert models.errors()[KIND, Latency.DECODE].samples == 0
    assert models.profile_for(KIND, INFO).max_running == PRIOR.max_running


def test_samples_are_bounded_whatever_comes():
    rng = np.random.default_rng(3)
    samples = Samples()
    for _ in range(20):
        samples.add([(float(2**x), float(2**y), 0.1, 0.0) for x, y in rng.uniform(0, 49, (3000, 2))])
    assert len(samples) <= MAX_CELLS * PER_CELL
    assert len(samples.table(500)) <= 1000


def test_kinds_are_bounded():
    models = LatencyModels({})
    models.add_passes([a_pass(0.03, batch=1, kv=10, kind=f"kind{number}") for number in range(MAX_KINDS + 20)])
    models.refit()
    assert len(models.errors()) == MAX_KINDS * len(Latency)
    assert models.refused["too_many_kinds"] == 20
    profile = models.profile_for("one too many", msgspec.structs.replace(INFO, kind="one too many"))
    assert profile.step_s(1, 100) > 0


anything = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True),
    st.integers(-(10**20), 10**400),
    st.sampled_from([0, 1, 2, 500, 10_000, 1e-9, 0.02]),
)
passes = st.builds(
    PassRecord,
    engine_id=st.just("e"),
    kind=st.sampled_from([KIND, "new"]),
    at_s=anything,
    wall_s=anything | st.floats(1e-6, 100),
    prefill_tokens=anything | st.integers(0, 10_000),
    prefill_context_tokens=anything | st.integers(0, 10**8),
    decode_batch=anything | st.integers(0, 300),
    kv_tokens=anything | st.integers(0, 10**6),
    queued=st.just(0),
)
transfers = st.builds(
    TransferRecord,
    engine_id=st.just("e"),
    kind=st.sampled_from([KIND, "new"]),
    at_s=anything,
    wall_s=anything | st.floats(1e-6, 100),
    bytes=anything | st.integers(0, 10**10),
    concurrent=anything | st.integers(0, 20),
)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(passes, max_size=30), st.lists(transfers, max_size=15))
def test_no_records_break_the_models_or_physics(recorded: list[PassRecord], moved: list[TransferRecord]):
    models = LatencyModels(PRIORS)
    models.add_passes(recorded)
    models.add_transfers(moved)
    models.refit()
    for kind in (KIND, "new"):
        profile = models.profile_for(kind, msgspec.structs.replace(INFO, kind=kind))
        again = msgspec.convert(msgspec.to_builtins(profile), Profile)  # bounds of the type hold
        values = [getattr(again, name) for name in COEFFICIENTS]
        assert np.isfinite(values).all()
        assert min(values) >= 0
        assert profile.prefill_s(100, 5000) <= profile.prefill_s(200, 20_000)
        assert profile.step_s(1, 100) <= profile.step_s(2, 100) <= profile.step_s(2, 500)
        assert 0 < profile.transfer_s(1000) <= profile.transfer_s(10**9)
    LatencyModels.from_state(models.state(), PRIORS)
