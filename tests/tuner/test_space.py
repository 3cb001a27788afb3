import numpy as np
import optuna
import pytest

from tests.support.traffic import engine_states
from tuner.candidates import plan_of, static_baselines
from tuner.space import Space


def ask(space, parameters):
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
    study.enqueue_trial(parameters)
    return space.candidate(study.ask())


@pytest.mark.parametrize("engines", [1, 2, 5, 16])
def test_baselines_survive_the_way_into_the_space_and_back(engines):
    fleet = engine_states(engines)
    space = Space(fleet)
    for candidate in static_baselines(fleet):
        assert ask(space, space.parameters(candidate)) == candidate


@pytest.mark.parametrize("engines", [1, 2, 7])
def test_whatever_is_proposed_is_a_valid_plan_for_the_fleet(engines):
    fleet = engine_states(engines)
    space = Space(fleet)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=2))
    for _ in range(200):
        plan_of(space.candidate(study.ask()), fleet)


def test_a_neighbour_differs_in_one_parameter_at_most():
    fleet = engine_states(8)
    space, rng = Space(fleet), np.random.default_rng(3)
    for candidate in static_baselines(fleet):
        here = space.parameters(candidate)
        for _ in range(20):
            there = space.neighbour(candidate, rng)
            assert there.keys() == here.keys()
            assert sum(there[name] != here[name] for name in here) <= 1
            ask(space, there)


def test_neighbours_reach_every_parameter():
    fleet = engine_states(8)
    space, rng = Space(fleet), np.random.default_rng(4)
    candidate = list(static_baselines(fleet))[-1]
    here = space.parameters(candidate)
    moved = {name for _ in range(300) for name, value in space.neighbour(candidate, rng).items() if value != here[name]}
    assert moved == here.keys() - {"layout"}


def test_no_chunk_is_tried_that_is_larger_than_what_engines_have_left_memory_for():
    fleet = engine_states(4)
    space = Space(fleet)
    most = fleet[0].profile.chunked_prefill_tokens
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=5))
    tried = {space.candidate(study.ask()).knobs.chunked_prefill_tokens for _ in range(200)}
    assert most in tried
    assert max(tried) == most
