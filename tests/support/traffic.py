"""Generated workloads and fleets for tests of the tuner."""

import numpy as np

from engines.emulated.profile import Profile, load_profile
from tuner.types import EngineState
from tuner.workload import Workload


def traffic(
    span_s: float = 60.0,
    rate_rps: float = 20.0,
    prompt_tokens: float = 1000.0,
    output_tokens: float = 100.0,
    seed: int = 1,
    cv: float = 1.0,
) -> Workload:
    """Independent requests; gamma times between arrivals with this coefficient of variation, log-normal lengths."""
    rng = np.random.default_rng(seed)
    shape = 1 / cv**2
    arrived_s = np.cumsum(rng.gamma(shape, 1 / (shape * rate_rps), size=int(3 * span_s * rate_rps) + 100))
    arrived_s = arrived_s[arrived_s < span_s]
    count = len(arrived_s)
    none = np.zeros(count, dtype=np.int64)

    def lengths(median: float) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        return np.maximum(1, rng.lognormal(np.log(median), 0.5, count)).astype(np.int64)

    return Workload(
        span_s=span_s,
        classes=("default",),
        arrived_s=arrived_s,
        prompt_tokens=lengths(prompt_tokens),
        output_tokens=lengths(output_tokens),
        slo_class=none,
        session=np.arange(count),
        root=none,
        root_tokens=none,
    )


def engine_states(count: int, profile: str | Profile = "h100-tp4-llama-3.1-70b") -> list[EngineState]:
    """A fleet of one kind, with ids e0, e1, …"""
    found = load_profile(profile) if isinstance(profile, str) else profile
    return [EngineState(f"e{number}", found.kind, found) for number in range(count)]
