"""The fast twin: the reference simulator's model written for speed. Same arguments, same columns back.

The first run compiles for some seconds; `warm_up` has that happen when it suits. What was compiled is kept on disk.
"""

import hashlib
import inspect
import math
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit

from engines.emulated import scheduler
from engines.emulated.profile import load_profile
from engines.types import Role
from tuner import placement
from tuner.plan import BOOTSTRAP_PLAN, DATA_PARALLEL, Admission, Knobs, Plan, Policy
from tuner.slo import BOOTSTRAP_SLOS, SloTable
from tuner.twin import limits
from tuner.twin.core import layout
from tuner.twin.core.heap import JOB_BITS
from tuner.twin.core.layout import World
from tuner.twin.core.run import run
from tuner.twin.core.timers import make_timers
from tuner.twin.types import Fleet, Timeline, TwinEngine
from tuner.workload import Ints, Workload

ROLES = {Role.PREFILL: layout.ROLE_PREFILL, Role.DECODE: layout.ROLE_DECODE, Role.MIXED: layout.ROLE_MIXED}
POLICIES = {
    Policy.ROUND_ROBIN: layout.ROUND_ROBIN,
    Policy.LEAST_LOAD: layout.LEAST_LOAD,
    Policy.PREFIX_AFFINITY: layout.PREFIX_AFFINITY,
}
ADMISSIONS = {
    Admission.OFF: layout.ADMIT_ALL,
    Admission.QUEUE: layout.ADMIT_QUEUE,
    Admission.SHED: layout.ADMIT_SHED,
}


def simulate(workload: Workload, fleet: Fleet, plan: Plan, slos: SloTable) -> Timeline:
    """See `tuner.twin.types.Simulator`. Raises `ValueError` for an empty fleet or more requests than it can number."""
    if not fleet:
        raise ValueError("a fleet needs at least one engine")
    if 2 * len(workload) >= 1 << JOB_BITS:
        raise ValueError(f"{len(workload)} requests are more than one run can number")
    world = make_world(workload, fleet, plan, slos)
    run_world(world)
    return _timeline(world)


def run_world(world: World) -> None:
    """Let everything that is going to happen in a world happen."""
    if world.state["requests"][0]:
        _compiled()(*world)


def warm_up() -> None:
    """Have everything compiled or loaded that `simulate` needs: seconds the first time, a fraction of one later."""
    empty = np.zeros(1, np.int64)
    workload = Workload(1.0, ("default",), np.zeros(1), empty + 1, empty + 1, empty, empty, empty, empty)
    simulate(workload, [TwinEngine("e0", load_profile("laptop"))], BOOTSTRAP_PLAN, BOOTSTRAP_SLOS)


@cache
def _compiled() -> Callable[..., None]:
    """The loop, compiled; takes the arrays of a `World`.

    Numba keeps compiled code by the file of the function that is called first and by its closure, not by what that
    calls in turn: with a digest of all sources in the closure, no change of any of them goes unnoticed.
    """
    digest = digest_of(sources())

    def entry(
        state: Any,
        plan: Any,
        engines: Any,
        views: Any,
        requests: Any,
        jobs: Any,
        holdings: Any,
        holders: Any,
        heaps: Any,
        timers: Any,
    ) -> None:
        if digest:
            run(
                World(
                    state[0],
                    plan[0],
                    engines[0],
                    views[0],
                    requests[0],
                    jobs[0],
                    holdings[0],
                    holders[0],
                    heaps[0],
                    timers[0],
                )
            )

    return _jit(entry)


def _jit(entry: Callable[..., None]) -> Callable[..., None]:
    """Compiled when it is first called, and kept on disk where there is a place for that."""
    try:
        return njit(entry, cache=True, error_model="numpy")  # type: ignore[no-any-return]
    except RuntimeError:  # neither beside the source nor in the user's cache can anything be written
        return njit(entry, error_model="numpy")  # type: ignore[no-any-return]


def sources() -> list[Path]:
    """The files that compiled code comes from."""
    constants = [Path(inspect.getfile(each)) for each in (limits, placement, scheduler)]
    return [*constants, *sorted(Path(inspect.getfile(layout)).parent.glob("*.py"))]


def digest_of(files: Sequence[Path]) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def make_world(workload: Workload, fleet: Fleet, plan: Plan, slos: SloTable) -> layout.World:
    count, size = len(workload), len(fleet)
    sessions, roots, contexts = _contexts(workload)
    heap_size = max(each.profile.max_running for each in fleet) + 1
    timers = make_timers(2 * size)
    views = _views(fleet, plan)
    holders = np.full(contexts + 1, layout.NONE).astype(layout.HOLDERS)
    return layout.World(
        state=_state(count, heap_size, len(timers) // 2, views),
        plan=_plan(plan),
        engines=_engines(fleet, plan),
        views=views,
        requests=_requests(workload, slos, sessions, roots),
        jobs=np.zeros(2 * count + 1, layout.JOB),
        holdings=np.zeros(_most_holdings(count, size, contexts), layout.HOLDING),
        holders=holders,
        heaps=np.zeros(size * heap_size, layout.HEAP),
        timers=timers,
    )


def _most_holdings(requests: int, engines: int, contexts: int) -> int:
    """Each request touches at most a session and a root on a prefill and a decode engine."""
    return min(4 * requests, engines * contexts) + 1


def _contexts(workload: Workload) -> tuple[Ints, Ints, int]:
    """Sessions and roots numbered from 0 in one row; `NONE` for requests without a root."""
    names, sessions = np.unique(workload.session, return_inverse=True)
    rooted = workload.root_tokens > 0
    roots = np.full(len(workload), layout.NONE, dtype=np.int64)
    kinds, numbers = np.unique(workload.root[rooted], return_inverse=True)
    roots[rooted] = len(names) + numbers
    return sessions, roots, len(names) + len(kinds)


def _state(requests: int, heap_size: int, leaves: int, views: layout.Records) -> layout.Records:
    state = np.zeros(1, layout.STATE)
    for name in layout.STATE.names or ():
        if name.endswith(("_first", "_last")):
            state[name] = layout.NONE
    state["requests"], state["engines"] = requests, len(views)
    state["heap_size"], state["leaves"] = heap_size, leaves
    state["not_decoding"] = _barred(views, layout.ROLE_PREFILL)
    state["not_prefilling"] = _barred(views, layout.ROLE_DECODE)
    state["decoders"] = (views["role"] != state["not_decoding"]).sum()
    state["unrated"] = (views["role"] != state["not_prefilling"]).sum()
    return state


def _barred(views: layout.Records, role: int) -> int:
    """The role itself, unless there are only engines of that role: roles are a preference."""
    return role if (views["role"] != role).any() else layout.NONE


def _plan(plan: Plan) -> layout.Records:
    knobs, found = plan.knobs, np.zeros(1, layout.PLAN)
    found["data_parallel"] = plan.pattern == DATA_PARALLEL
    found["policy"] = POLICIES[knobs.policy]
    found["min_remote"] = knobs.min_remote_tokens
    found["max_transfers"] = knobs.max_inflight_transfers
    found["admission"] = ADMISSIONS[knobs.admission]
    found["max_running"] = layout.NONE if knobs.max_running_per_engine is None else knobs.max_running_per_engine
    found["offload_ratio"] = knobs.offload_ratio
    found["bypass_fraction"] = knobs.bypass_cached_fraction
    found["hints"] = _wants_hints(plan)
    return found


def _wants_hints(plan: Plan) -> bool:
    """Whether placement or admission looks at what the prefix index knows."""
    knobs = plan.knobs
    return plan.pattern != DATA_PARALLEL or knobs.policy is Policy.PREFIX_AFFINITY or knobs.admission is Admission.SHED


def _engines(fleet: Fleet, plan: Plan) -> layout.Records:
    engines = np.zeros(len(fleet), layout.ENGINE)
    for name in layout.ENGINE.names or ():
        if name.endswith(("_first", "_last")):
            engines[name] = layout.NONE
    for row, engine in enumerate(fleet):
        _fill_engine(engines[row], engine, plan.knobs)
    return engines


def _fill_engine(row: Any, engine: TwinEngine, knobs: Knobs) -> None:
    profile = engine.profile
    row["a"], row["b"], row["c"] = profile.a_s, profile.b_s_per_token, profile.c_s_per_token2
    row["d"], row["e"], row["f"] = profile.d_s, profile.e_s_per_sequence, profile.f_s_per_kv_token
    row["g"], row["bandwidth"] = profile.g_s, profile.bandwidth_bytes_per_s
    row["capacity"] = profile.kv_capacity_tokens
    row["limit"] = min(profile.context_length_tokens, profile.kv_capacity_tokens)
    row["max_running"], row["mixed"] = profile.max_running, profile.mixed_chunk
    row["bytes_per_token"] = profile.kv_layout.bytes_per_token
    chunk, interval = knobs.chunked_prefill_tokens, knobs.prefill_decode_interval
    row["chunk"] = profile.chunked_prefill_tokens if chunk is None else chunk
    row["interval"] = profile.prefill_decode_interval if interval is None else interval


def _views(fleet: Fleet, plan: Plan) -> layout.Records:
    views = np.zeros(len(fleet), layout.VIEW)
    views["role"] = [ROLES[plan.role_of(engine.engine_id)] for engine in fleet]
    views["kv_free"] = [engine.profile.kv_capacity_tokens for engine in fleet]
    return views


def _requests(workload: Workload, slos: SloTable, sessions: Ints, roots: Ints) -> layout.Records:
    requests = np.zeros(len(workload), layout.REQUEST)
    bounds_s = np.array([slos.classes[slos.resolve(name)].ttft_ms / 1e3 for name in workload.classes])
    requests["arrived_s"] = workload.arrived_s
    requests["ttft_s"] = bounds_s[workload.slo_class]
    requests["prompt"], requests["output"] = workload.prompt_tokens, workload.output_tokens
    requests["session"], requests["root"] = sessions, roots
    requests["root_tokens"] = workload.root_tokens
    requests["first_s"] = math.nan
    requests["decode"] = requests["prefill"] = layout.NONE
    return requests


def _timeline(world: layout.World) -> Timeline:
    requests = world.requests
    served = requests["ending"] == 0
    ttft_s = np.where(served, requests["first_s"] - requests["arrived_s"], np.nan)
    gaps = np.where(requests["output"] > 1, requests["output"] - 1, np.nan)
    return Timeline(
        ending=requests["ending"].astype(np.int8),
        ttft_s=ttft_s,
        tpot_s=np.where(served, requests["decode_time"] / gaps, np.nan),
        e2e_s=requests["e2e"].copy(),
        queue_s=requests["queue"].copy(),
        prefill_s=requests["prefill_time"].copy(),
        transfer_s=requests["transfer"].copy(),
        decode_s=np.where(served, requests["decode_time"], np.nan),
        cached_tokens=requests["cached"].copy(),
        decode_engine=requests["decode"].copy(),
        split=requests["split"].astype(np.bool_),
        busy_prefill_s=world.engines["busy_prefill_s"].copy(),
        busy_decode_s=world.engines["busy_decode_s"].copy(),
        makespan_s=float(world.state["makespan_s"][0]),
    )
