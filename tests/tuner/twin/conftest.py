"""Small worlds for the simulators."""

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import pytest

from engines.emulated.profile import load_profile
from engines.types import Role
from tuner.plan import IssuedBy, Knobs, Plan
from tuner.slo import Slo, SloTable
from tuner.twin.types import Fleet, TwinEngine
from tuner.workload import Workload

H100 = "h100-tp4-llama-3.1-70b"


def make_fleet(count: int, profile: str = H100, **changes: Any) -> Fleet:
    made = msgspec.structs.replace(load_profile(profile), **changes)
    return [TwinEngine(f"e{number}", made) for number in range(count)]


def make_plan(pattern: str = "data_parallel", roles: Mapping[str, Role] | None = None, **knobs: Any) -> Plan:
    return Plan(
        version=1,
        issued_at_s=0,
        issued_by=IssuedBy.OPERATOR,
        reason="a test",
        pattern=pattern,
        knobs=Knobs(**knobs),
        roles=roles or {},
    )


def first_prefill(engines: int, prefill: int, others: Role = Role.DECODE) -> dict[str, Role]:
    return {f"e{number}": Role.PREFILL if number < prefill else others for number in range(engines)}


def make_workload(
    count: int, rate_rps: float, prompt: float = 500, output: float = 100, seed: int = 0, **columns: Any
) -> Workload:
    """Independent requests with a log-normal spread of lengths, arriving by Poisson."""
    rng = np.random.default_rng(seed)
    arrived_s = np.cumsum(rng.exponential(1 / rate_rps, count))

    def lengths(median: float) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        return np.maximum(1, rng.lognormal(np.log(median), 0.5, count)).astype(np.int64)

    zeros = np.zeros(count, dtype=np.int64)
    made: dict[str, Any] = {
        "span_s": float(arrived_s[-1]) + 1e-6,
        "classes": ("default",),
        "arrived_s": arrived_s,
        "prompt_tokens": lengths(prompt),
        "output_tokens": lengths(output),
        "slo_class": zeros,
        "session": np.arange(count),
        "root": zeros,
        "root_tokens": zeros,
    }
    return Workload(**(made | columns))


def make_conversations(
    count: int, rate_rps: float, sessions: int, roots: int = 1, root_tokens: int = 0, seed: int = 0
) -> Workload:
    """Each prompt is the session's last prompt and answer and something new; long sessions begin anew."""
    plain = make_workload(count, rate_rps, prompt=200, output=120, seed=seed)
    speaker = np.random.default_rng(seed + 1).integers(sessions, size=count)
    session, prompt, known = speaker.copy(), plain.prompt_tokens.copy(), dict[int, int]()
    for row in range(count):
        while known.setdefault(int(session[row]), root_tokens) > 3000:
            session[row] += sessions
        prompt[row] += known[int(session[row])]
        known[int(session[row])] = int(prompt[row] + plain.output_tokens[row])
    return make_workload(
        count,
        rate_rps,
        seed=seed,
        prompt_tokens=prompt,
        output_tokens=plain.output_tokens,
        session=session,
        root=session % roots,
        root_tokens=np.full(count, root_tokens),
    )


def make_slos(ttft_ms: float = 400, tpot_ms: float = 30, **classes: Slo) -> SloTable:
    return SloTable(classes={"default": Slo(ttft_ms=ttft_ms, tpot_ms=tpot_ms), **classes})


class Make:
    """Everything tests build worlds from; a fixture, because test files cannot import one another."""

    fleet = staticmethod(make_fleet)
    plan = staticmethod(make_plan)
    roles = staticmethod(first_prefill)
    workload = staticmethod(make_workload)
    conversations = staticmethod(make_conversations)
    slos = staticmethod(make_slos)


@pytest.fixture
def make() -> type[Make]:
    return Make
