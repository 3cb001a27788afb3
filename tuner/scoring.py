"""What the search maximises: weighted goodput, with each class's attainment target as a constraint.

Goodput alone can be gamed: drop every long request and the rest are fast. Below its target a class therefore costs
`SHORTFALL_PRICE` times what its missing requests are worth, so that targets come first.
"""

from typing import NamedTuple

from tuner.slo import Slo, SloTable
from tuner.twin.types import ClassForecast, Forecast

SHORTFALL_PRICE = 2.0
PRESSURE_PRICE = 0.005
"""Share of the offered load that being at every bound costs: of two good plans, the one with room to spare wins."""

ODDITY_PRICE = 0.001
"""Share of the offered load that a knob off its default costs: one that does nothing in a simulation may do harm in
what the simulation leaves out, such as the wake of the last plan."""

TOLERANCE = 0.002
"""Shortfall that is put down to the few requests of a simulation."""


class Scored(NamedTuple):
    goodput_rps: float
    shortfall: float
    """Weighted share of requests by which classes miss their targets."""
    score: float
    """Requests per second."""


def scored(forecast: Forecast, slos: SloTable, factor: float = 1.0, oddities: int = 0) -> Scored:
    """A forecast whose attainment is multiplied by `factor`, the measured error of like predictions.

    `oddities` are the knobs that differ from their defaults, see `tuner.candidates.oddities`.
    """
    counts = {name: each.requests for name, each in forecast.classes.items() if each.attainment is not None}
    total = sum(counts.values())
    if not total:
        return Scored(0.0, 0.0, 0.0)
    goodput = worth = shortfall = pressure = 0.0
    for name, count in counts.items():
        slo = slos.classes[slos.resolve(name)]
        share = count / total
        attained = min(1.0, factor * (forecast.classes[name].attainment or 0.0))
        goodput += share * attained
        worth += slo.weight * share * attained
        shortfall += slo.weight * share * max(0.0, slo.attainment - attained)
        pressure += share * _pressure(forecast.classes[name], slo)
    shortfall = shortfall if shortfall > TOLERANCE else 0.0
    price = SHORTFALL_PRICE * shortfall + PRESSURE_PRICE * pressure + ODDITY_PRICE * oddities
    score = forecast.offered_rps * (worth - price)
    return Scored(forecast.offered_rps * goodput, shortfall, score)


def _pressure(found: ClassForecast, slo: Slo) -> float:
    """How close the 90th percentiles come to the bounds, 0 to 1."""
    ttft = found.ttft_s[1] * 1e3 / slo.ttft_ms if found.ttft_s else 0.0
    tpot = found.tpot_s[1] * 1e3 / slo.tpot_ms if found.tpot_s else 0.0
    return (min(1.0, ttft) + min(1.0, tpot)) / 2
