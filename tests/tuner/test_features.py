import numpy as np
import pytest

from tuner.features import burstiness, distance, features, names, session_cached_tokens
from tuner.workload import Workload

RNG_SEED = 7


def workload(arrived_s, prompt=100, output=10, slo_class=0, session=None, root=None, root_tokens=0, span_s=100.0):
    arrived_s = np.asarray(arrived_s, dtype=float)
    rows = len(arrived_s)

    def column(value):
        return np.broadcast_to(np.asarray(value, dtype=np.int64), rows).copy()

    return Workload(
        span_s=span_s,
        classes=("batch", "chat"),
        arrived_s=arrived_s,
        prompt_tokens=column(prompt),
        output_tokens=column(output),
        slo_class=column(slo_class),
        session=column(np.arange(rows) if session is None else session),
        root=column(np.arange(rows) if root is None else root),
        root_tokens=column(root_tokens),
    )


def test_nothing_has_features_too():
    seen = features(workload([]))
    assert (seen.requests, seen.rate_rps, seen.burstiness, seen.cached_share) == (0, 0, 1, 0)
    assert np.isfinite(seen.as_vector(("batch", "chat"))).all()


def test_lengths_and_classes_are_told():
    seen = features(workload(np.arange(10.0), prompt=range(1, 11), output=[5] * 10, slo_class=[1] * 3 + [0] * 7))
    assert (seen.prompt_mean_tokens, seen.prompt_p50_tokens, seen.output_p90_tokens) == (5.5, 5.5, 5)
    assert seen.class_mix == {"batch": pytest.approx(0.7), "chat": pytest.approx(0.3)}
    assert seen.rate_rps == pytest.approx(0.1)


def test_burstiness_is_0_for_a_clock_1_for_poisson_and_more_for_bursts():
    rng = np.random.default_rng(RNG_SEED)
    bursts = np.sort(np.repeat(np.arange(0, 1000.0, 20), 20) + rng.random(1000))
    assert burstiness(np.arange(100.0)) == pytest.approx(0, abs=1e-9)
    assert burstiness(np.cumsum(rng.exponential(size=20_000))) == pytest.approx(1, abs=0.05)
    assert burstiness(bursts) > 5


def test_a_session_caches_the_prompt_before_and_its_answer():
    turns = workload([0, 1, 2], prompt=[100, 150, 120], output=[10, 20, 5], session=[4, 4, 4])
    assert session_cached_tokens(turns).tolist() == [0, 110, 119]
    assert features(turns).session_share == pytest.approx(2 / 3)
    assert features(turns).cached_share == pytest.approx(229 / 370)


def test_a_root_counts_only_beyond_what_the_session_shares():
    shared = workload([0, 1, 2], prompt=100, root=[9, 9, 9], root_tokens=60)
    assert features(shared).root_share == pytest.approx(120 / 300)
    assert features(shared).session_share == 0


def test_distance_is_0_to_itself_and_grows_with_the_move():
    rng = np.random.default_rng(RNG_SEED)
    at_s = np.sort(rng.uniform(0, 100, 500))
    base = features(workload(at_s, prompt=1000))
    near = features(workload(at_s, prompt=1100))
    far = features(workload(at_s, prompt=8000, slo_class=1))
    assert distance(base, base) == 0
    assert 0 < distance(base, near) < distance(base, far)


def test_vectors_have_a_name_for_each_component():
    seen = features(workload([1, 2, 3]))
    assert len(seen.as_vector(("batch", "other"))) == len(names(("batch", "other")))
    assert names(("batch",))[-1] == "class:batch"
