import pytest
from prometheus_client import CollectorRegistry

from controller.metrics_in_force import InForceCollector, RouterIdentity
from engines.types import Role
from tuner.placement import EngineView
from tuner.plan import BOOTSTRAP_PLAN, Knobs, Plan
from tuner.slo import Slo, SloTable

PLAN = Plan(
    version=7,
    issued_at_s=1000.0,
    issued_by="tuner",
    reason="test",
    pattern="balanced",
    knobs=Knobs(offload_ratio=0.25, admission="shed", max_running_per_engine=9),
    roles={"p": Role.PREFILL, "d": Role.DECODE},
)
SLOS = SloTable(version=3, classes={"default": Slo(ttft_ms=1500, tpot_ms=40, attainment=0.95, weight=2)})


class World:
    """What a router goes by, to be changed between two scrapes."""

    def __init__(self) -> None:
        self.plan = PLAN
        self.slos = SLOS
        self.engines = [EngineView("p", Role.PREFILL), EngineView("d", Role.DECODE, available=False)]
        self.registry = CollectorRegistry()
        identity = RouterIdentity("router-0", "m", "1.2.3")
        self.registry.register(InForceCollector(identity, lambda: self.plan, lambda: self.slos, lambda: self.engines))

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"trimtab_{name}", labels)


@pytest.fixture
def world() -> World:
    return World()


def test_every_knob_of_the_plan_is_shown_as_a_number_or_a_word(world: World) -> None:
    (info,) = [
        each for family in world.registry.collect() for each in family.samples if each.name.endswith("plan_info")
    ]
    for name, value in PLAN.knobs:
        shown = info.labels.get(name, world.value(f"plan_{name}"))
        assert shown == (value if value is None or isinstance(value, float | int) else str(value)), name
    assert (info.labels["pattern"], info.labels["issued_by"]) == ("balanced", "tuner")


def test_a_plan_says_when_it_was_issued_and_one_that_never_was_does_not(world: World) -> None:
    assert world.value("plan_issued_timestamp_seconds", pattern="balanced", issued_by="tuner") == 1000
    world.plan = BOOTSTRAP_PLAN
    issued = [family for family in world.registry.collect() if family.name == "trimtab_plan_issued_timestamp_seconds"]
    assert [family.samples for family in issued] == [[]]


def test_slos_are_shown_in_base_units_and_a_class_that_went_is_gone(world: World) -> None:
    of = {"slo_class": "default"}
    shown = [
        world.value(name, **of)
        for name in ("slo_ttft_bound_seconds", "slo_tpot_bound_seconds", "slo_attainment_target_ratio", "slo_weight")
    ]
    assert shown == [1.5, 0.04, 0.95, 2]
    world.slos = SloTable(version=4, classes={"default": Slo(ttft_ms=1, tpot_ms=1), "chat": Slo(ttft_ms=1, tpot_ms=1)})
    assert world.value("slo_weight", slo_class="chat") == 1
    world.slos = SLOS
    assert world.value("slo_weight", slo_class="chat") is None


def test_each_engine_has_one_role_and_pools_count_those_that_can_be_used(world: World) -> None:
    assert world.value("engine_role", engine="p", role="prefill") == 1
    assert world.value("engine_role", engine="p", role="decode") is None
    pools = {role.value: world.value("pool_engines", role=role.value) for role in Role}
    assert pools == {"prefill": 1, "decode": 0, "mixed": 0}
    world.engines[0].role = Role.MIXED
    assert world.value("engine_role", engine="p", role="prefill") is None
