import pytest

from engines.types import Role
from tests.support.traffic import engine_states
from tuner.candidates import (
    assign_roles,
    candidate_of,
    data_parallel,
    explicit_knobs,
    oddities,
    plan_of,
    prefill_counts,
    region,
    split,
    static_baselines,
)
from tuner.plan import BALANCED, BOOTSTRAP_PLAN, DISAGGREGATED, Knobs


@pytest.mark.parametrize("engines", [1, 2, 3, 8, 16])
def test_every_static_baseline_becomes_a_valid_plan_and_comes_back_from_it(engines):
    fleet = engine_states(engines)
    baselines = list(static_baselines(fleet))
    assert len(set(baselines)) == len(baselines)
    for candidate in baselines:
        assert candidate_of(plan_of(candidate, fleet), fleet) == candidate


def test_one_engine_has_no_split_baselines():
    assert {candidate.pattern for candidate in static_baselines(engine_states(1))} == {"data_parallel"}


def test_roles_that_are_wanted_stay_where_they_are():
    fleet = engine_states(4)
    current = {"e0": Role.DECODE, "e1": Role.DECODE, "e2": Role.PREFILL, "e3": Role.DECODE}
    roles = assign_roles(split(4, 2, 0.0, Knobs()), fleet, current)
    changed = [engine_id for engine_id in current if roles[engine_id] is not current[engine_id]]
    assert len(changed) == 1
    assert sorted(roles.values()) == [Role.DECODE, Role.DECODE, Role.PREFILL, Role.PREFILL]


def test_roles_for_another_number_of_engines_are_refused():
    with pytest.raises(ValueError, match="roles for 4 engines, but there are 3"):
        assign_roles(split(4, 2, 0.0, Knobs()), engine_states(3), {})


def test_a_ratio_decides_between_disaggregated_and_balanced():
    assert split(2, 1, 0.0, Knobs()).pattern == DISAGGREGATED
    assert split(2, 1, 0.2, Knobs()).pattern == BALANCED


def test_plans_of_the_tuner_spell_engine_knobs_out():
    knobs = explicit_knobs(engine_states(2))
    assert knobs.chunked_prefill_tokens is not None
    assert knobs.prefill_decode_interval is not None


@pytest.mark.parametrize(("engines", "most"), [(2, 8), (8, 8), (16, 8), (64, 8), (1, 8)])
def test_prefill_counts_are_possible_and_few(engines, most):
    counts = prefill_counts(engines, most)
    assert len(counts) <= most
    assert all(0 < count < engines for count in counts)


def test_the_bootstrap_plan_is_data_parallel_on_every_engine():
    candidate = candidate_of(BOOTSTRAP_PLAN, engine_states(5))
    assert (candidate.mixed_engines, candidate.prefill_engines) == (5, 0)


def test_regions_tell_patterns_and_role_shares_apart_but_not_knobs():
    knobs = Knobs()
    assert region(split(8, 2, 0.2, knobs)) == region(
        split(8, 2, 0.25, knobs.model_copy(update={"min_remote_tokens": 9}))
    )
    assert len({region(split(8, 2, 0.2, knobs)), region(split(8, 6, 0.2, knobs)), region(data_parallel(8, knobs))}) == 3


def test_knobs_off_their_defaults_are_counted_and_those_left_alone_are_not():
    defaults = explicit_knobs(engine_states(4))
    assert oddities(data_parallel(4, Knobs()), defaults) == 0
    assert oddities(split(4, 1, 0.3, defaults), defaults) == 0
    odd = defaults.model_copy(update={"prefill_decode_interval": 4, "min_remote_tokens": 512})
    assert oddities(split(4, 1, 0.3, odd), defaults) == 2
