"""Scenarios as data: files that load, arrivals that are what they say."""

import numpy as np
import pytest

from benchmarks.adapt.generate import arrivals, generate, lengths, phases
from benchmarks.adapt.scenarios import (
    Empirical,
    Fixed,
    Gamma,
    LogNormal,
    OnOff,
    Poisson,
    Requests,
    Roots,
    ScenarioError,
    Sessions,
    Traffic,
    load_scenario,
    load_traffic,
    read,
    scenario_names,
)
from tuner.features import burstiness, features

SEED = 7


def rng():
    return np.random.default_rng(SEED)


@pytest.mark.parametrize("name", scenario_names())
def test_every_scenario_loads_and_offers_about_the_rate_it_says(name):
    scenario = load_scenario(name)
    for phase, workload in zip(scenario.phases, phases(scenario, SEED), strict=True):
        assert workload.span_s == phase.duration_s
        assert workload.rate_rps == pytest.approx(phase.rate_rps, rel=0.15)


@pytest.mark.parametrize("name", scenario_names())
def test_every_request_of_every_scenario_fits_an_engine(name):
    scenario = load_scenario(name)
    workload = generate(scenario, SEED)
    limit = min(scenario.profile.context_length_tokens, scenario.profile.kv_capacity_tokens)
    assert (workload.prompt_tokens + workload.output_tokens).max() <= limit
    assert workload.prompt_tokens.min() >= 1
    assert workload.output_tokens.min() >= 1


def test_the_scenarios_that_were_promised_are_there():
    shifting = [name for name in scenario_names() if load_scenario(name).shifts]
    assert len(shifting) >= 4
    assert {"chat", "code", "summaries", "documents", "conversations", "bursts", "slow-network"} <= set(
        scenario_names()
    )
    assert {load_scenario(name).engines.count for name in ("fleet-2", "fleet-8", "fleet-16")} == {2, 8, 16}


def test_the_slow_network_is_that_of_25_gigabit_ethernet():
    assert load_scenario("slow-network").profile.bandwidth_bytes_per_s == pytest.approx(25e9 / 8, rel=0.01)


def test_every_kind_of_traffic_is_used():
    used = {phase.traffic for name in scenario_names() for phase in load_scenario(name).phases}
    assert used == load_traffic().keys()


def test_the_same_seed_gives_the_same_requests_and_another_seed_others():
    scenario = load_scenario("bursts")
    one, same, other = generate(scenario, 1), generate(scenario, 1), generate(scenario, 2)
    assert np.array_equal(one.arrived_s, same.arrived_s)
    assert np.array_equal(one.prompt_tokens, same.prompt_tokens)
    assert not np.array_equal(one.arrived_s[:10], other.arrived_s[:10])


def test_a_shortened_scenario_has_fewer_and_shorter_phases():
    short = load_scenario("shift-day").shortened(60, 2)
    assert [phase.duration_s for phase in short.phases] == [60, 60]
    assert short.starts_s == [0, 60]
    assert short.span_s == 120


@pytest.mark.parametrize("process", [Poisson(), Gamma(cv=3), OnOff(on_s=10, off_s=20, quiet=0.25)])
def test_arrivals_are_in_order_within_the_span_and_as_many_as_asked_for(process):
    times_s = arrivals(process, 20, 3000, rng())
    assert np.all(np.diff(times_s) >= 0)
    assert times_s[0] >= 0
    assert times_s[-1] < 3000
    assert len(times_s) / 3000 == pytest.approx(20, rel=0.08)


def test_arrivals_are_as_uneven_as_asked_for():
    assert burstiness(arrivals(Poisson(), 20, 3000, rng())) == pytest.approx(1, rel=0.1)
    assert burstiness(arrivals(Gamma(cv=3), 20, 3000, rng())) == pytest.approx(9, rel=0.15)
    assert burstiness(arrivals(Gamma(cv=0.5), 20, 3000, rng())) == pytest.approx(0.25, rel=0.15)


def test_bursts_have_the_rate_that_their_pauses_lack():
    counts = np.histogram(arrivals(OnOff(on_s=10, off_s=10), 20, 1000, rng()), np.arange(0, 1001, 1.0))[0]
    assert np.mean(counts == 0) == pytest.approx(0.5, abs=0.06)
    assert np.median(counts[counts > 0]) == pytest.approx(40, rel=0.15)


def test_lengths_follow_their_distribution():
    drawn = lengths(LogNormal(median=1000, sigma=0.5, low=300, high=4000), 20_000, rng())
    assert np.median(drawn) == pytest.approx(1000, rel=0.03)
    assert np.quantile(drawn, 0.841) == pytest.approx(1000 * np.exp(0.5), rel=0.03)
    assert drawn.min() >= 300
    assert drawn.max() <= 4000
    assert set(lengths(Fixed(tokens=7), 10, rng())) == {7}


def test_empirical_lengths_have_the_given_quantiles():
    drawn = lengths(Empirical(quantiles=[10, 100, 1000]), 20_000, rng())
    assert np.quantile(drawn, 0.25) == pytest.approx(55, rel=0.05)
    assert np.quantile(drawn, 0.75) == pytest.approx(550, rel=0.05)


def conversations(**changes):
    scenario = load_scenario("conversations")
    (name,) = scenario.traffic
    fields = {
        "slo_class": "chat",
        "input_tokens": Fixed(tokens=100),
        "output_tokens": Fixed(tokens=50),
        "sessions": Sessions(turns=4, think_s=5),
        "roots": Roots(count=2, tokens=700),
    }
    traffic = Traffic(title="t", mix=[Requests(**(fields | changes))])
    return generate(type(scenario)(**{**{f: getattr(scenario, f) for f in scenario.__struct_fields__},
                                      "traffic": {name: traffic}}), SEED)  # fmt: skip


def test_each_turn_of_a_conversation_holds_the_history():
    workload = conversations()
    session = np.bincount(workload.session).argmax()
    prompts = workload.prompt_tokens[workload.session == session]
    assert len(prompts) > 2
    assert set(np.diff(prompts)) == {150}
    assert (prompts[0] - 800) % 150 == 0


def test_conversations_are_under_way_from_the_first_second_on():
    workload = conversations()
    tenth = workload.span_s / 10
    first, last = (workload.arrived_s < tenth).sum(), (workload.arrived_s >= 9 * tenth).sum()
    assert first == pytest.approx(last, rel=0.2)
    assert workload.prompt_tokens[workload.arrived_s < tenth].max() > 1000


def test_beginnings_are_shared():
    shared = features(conversations(sessions=None))
    assert shared.root_share > 0.8
    assert features(conversations(sessions=None, roots=None)).root_share == 0


def test_a_file_with_a_key_that_means_nothing_is_refused_with_its_name(tmp_path):
    file = tmp_path / "odd.toml"
    file.write_text('[chat]\ntitle = "x"\nmood = "good"\nmix = []\n')
    with pytest.raises(ScenarioError, match=r"odd\.toml.*mood"):
        read(file, dict[str, Traffic])
