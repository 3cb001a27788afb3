"""The fast twin beside the reference: the same requests under the same plans."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from engines.types import Role
from tuner.twin import fast
from tuner.twin.forecast import good_requests
from tuner.twin.reference import simulate_reference
from tuner.twin.types import Fleet, Timeline
from tuner.workload import Workload

pytestmark = pytest.mark.timeout(600)  # compiled if nothing on disk fits the sources

COUNT = 400
Case = Callable[[Any], tuple[Workload, Fleet, Any]]

EXACT: dict[str, Case] = {
    "prompts of one length": lambda make: (
        make.workload(COUNT, 100, prompt_tokens=np.full(COUNT, 1000), output_tokens=np.full(COUNT, 50)),
        make.fleet(8),
        make.plan("disaggregated", make.roles(8, 4)),
    ),
    "data parallel": lambda make: (make.workload(COUNT, 100), make.fleet(8), make.plan()),
    "overload": lambda make: (make.workload(COUNT, 250), make.fleet(8), make.plan()),
    "round robin": lambda make: (make.workload(COUNT, 80), make.fleet(8), make.plan(policy="round_robin")),
    "disaggregated": lambda make: (
        make.workload(COUNT, 100),
        make.fleet(8),
        make.plan("disaggregated", make.roles(8, 4)),
    ),
    "balanced, mixed roles": lambda make: (
        make.workload(COUNT, 100),
        make.fleet(8),
        make.plan("balanced", make.roles(8, 3, Role.MIXED), offload_ratio=0.3, min_remote_tokens=400),
    ),
    "no roles": lambda make: (make.workload(COUNT, 100), make.fleet(8), make.plan("disaggregated")),
    "split in turns": lambda make: (
        make.workload(COUNT, 60),
        make.fleet(8),
        make.plan("disaggregated", make.roles(8, 3), policy="round_robin"),
    ),
    "queue": lambda make: (
        make.workload(COUNT, 220),
        make.fleet(4),
        make.plan(admission="queue", max_running_per_engine=10),
    ),
    "queue before a split": lambda make: (
        make.workload(COUNT, 150),
        make.fleet(8),
        make.plan("disaggregated", make.roles(8, 2), admission="queue", max_running_per_engine=8),
    ),
    "shed by the rate of prompts that wait for decodes": lambda make: (
        make.workload(COUNT, 150),
        make.fleet(4),
        make.plan(admission="shed", chunked_prefill_tokens=512, prefill_decode_interval=4),
    ),
    "shed before a split": lambda make: (
        make.workload(COUNT, 200),
        make.fleet(8),
        make.plan("disaggregated", make.roles(8, 2), admission="shed"),
    ),
    "one transfer at a time": lambda make: (
        make.workload(COUNT, 100),
        make.fleet(8),
        make.plan("disaggregated", make.roles(8, 4), max_inflight_transfers=1),
    ),
    "small chunks": lambda make: (
        make.workload(COUNT, 60),
        make.fleet(8),
        make.plan(chunked_prefill_tokens=512, prefill_decode_interval=4),
    ),
    "mixed passes": lambda make: (
        make.workload(COUNT, 8, 4000, 200),
        make.fleet(8, mixed_chunk=True),
        make.plan(chunked_prefill_tokens=1024, prefill_decode_interval=1),
    ),
    "slow network": lambda make: (
        make.workload(COUNT, 8, 4000, 200),
        make.fleet(8, bandwidth_bytes_per_s=3e9),
        make.plan("balanced", make.roles(8, 4), offload_ratio=0.5),
    ),
    "conversations": lambda make: (
        make.conversations(COUNT, 60, 40),
        make.fleet(8),
        make.plan("disaggregated", make.roles(8, 3), policy="prefix_affinity"),
    ),
    "hot prefixes": lambda make: (
        make.conversations(COUNT, 60, 300, roots=5, root_tokens=2000),
        make.fleet(8),
        make.plan("disaggregated", make.roles(8, 3), policy="prefix_affinity", bypass_cached_fraction=0.5),
    ),
    "shared beginnings, one engine each": lambda make: (
        make.conversations(COUNT, 60, 300, roots=5, root_tokens=2000),
        make.fleet(4),
        make.plan(policy="prefix_affinity"),
    ),
    "few at a time": lambda make: (make.workload(COUNT, 20), make.fleet(8, max_running=3), make.plan()),
    "two kinds of engine": lambda make: (
        make.workload(COUNT, 30),
        [*make.fleet(4), *make.fleet(8, "a100-tp4-llama-2-70b")[4:]],
        make.plan("disaggregated", {"e0": Role.PREFILL, "e4": Role.PREFILL}),
    ),
    "only prefill roles": lambda make: (
        make.workload(COUNT, 15),
        make.fleet(2),
        make.plan("disaggregated", make.roles(2, 2)),
    ),
}
"""Where room for KV does not run out, both do the same to the last request."""

SHORT_OF_ROOM: dict[str, Case] = {
    "evictions": lambda make: (
        make.conversations(COUNT, 30, 40),
        make.fleet(8, kv_capacity_tokens=30_000),
        make.plan(policy="prefix_affinity"),
    ),
    "evictions and transfers": lambda make: (
        make.conversations(COUNT, 25, 40),
        make.fleet(8, kv_capacity_tokens=40_000),
        make.plan("balanced", make.roles(8, 3), policy="prefix_affinity", offload_ratio=0.2),
    ),
    "retractions": lambda make: (
        make.workload(COUNT, 5, 1500, 400),
        make.fleet(8, "a100-llama-2-13b", kv_capacity_tokens=20_000),
        make.plan(),
    ),
}
"""What is evicted differs a little: of each context the twin only remembers the last two edges of the radix tree."""


def both(case: Case, make: Any) -> tuple[Workload, Timeline, Timeline]:
    work, fleet, plan = case(make)
    slos = make.slos()
    return work, simulate_reference(work, fleet, plan, slos), fast.simulate(work, fleet, plan, slos)


@pytest.mark.parametrize("case", EXACT.values(), ids=EXACT)
def test_it_is_the_reference_to_the_last_request(case, make):
    _, reference, found = both(case, make)
    for name in ("ending", "decode_engine", "split", "cached_tokens"):
        np.testing.assert_array_equal(getattr(found, name), getattr(reference, name), err_msg=name)
    for name in ("ttft_s", "tpot_s", "e2e_s", "queue_s", "prefill_s", "transfer_s", "decode_s"):
        np.testing.assert_allclose(getattr(found, name), getattr(reference, name), atol=1e-6, err_msg=name)
    for name in ("busy_prefill_s", "busy_decode_s", "makespan_s"):
        np.testing.assert_allclose(getattr(found, name), getattr(reference, name), rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("case", SHORT_OF_ROOM.values(), ids=SHORT_OF_ROOM)
def test_short_of_room_it_stays_close_to_the_reference(case, make):
    work, reference, found = both(case, make)
    slos = make.slos(ttft_ms=2000, tpot_ms=60)
    good = good_requests(work, reference, slos).sum()
    assert good_requests(work, found, slos).sum() == pytest.approx(good, rel=0.03)
    for name in ("ttft_s", "tpot_s"):
        medians = [np.nanmedian(getattr(timeline, name)) for timeline in (found, reference)]
        assert medians[0] == pytest.approx(medians[1], rel=0.1)


@pytest.mark.parametrize("case", SHORT_OF_ROOM.values(), ids=SHORT_OF_ROOM)
def test_all_room_is_accounted_for_at_the_end(case, make):
    work, fleet, plan = case(make)
    world = fast.make_world(work, fleet, plan, make.slos())
    fast.run_world(world)
    engines = world.engines
    for name in ("used", "reserved", "running", "prefilling", "waiting", "kv_sum", "reservations", "flows"):
        assert not engines[name].any(), name
    for name in ("own_inflight", "own_pending", "own_transfers", "waiting_tokens", "prefilling_tokens"):
        assert not engines[name].any(), name
    assert (engines["cached"] <= engines["capacity"]).all()
    holdings = world.holdings[: world.state["holdings"][0]]
    assert not holdings["pins"].any()
    kept = np.bincount(holdings["engine"], holdings["length"] - holdings["base"], minlength=len(fleet))
    np.testing.assert_array_equal(kept, engines["cached"])


def test_a_change_of_any_source_compiles_anew(tmp_path, monkeypatch):
    before = fast.digest_of(fast.sources())
    (tmp_path / "more.py").write_text("# another source")
    assert fast.digest_of([*fast.sources(), tmp_path / "more.py"]) != before
    assert {"run.py", "router.py", "scheduler.py", "limits.py"} <= {source.name for source in fast.sources()}
