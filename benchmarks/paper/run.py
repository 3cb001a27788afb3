"""`python -m benchmarks paper`: simulates both evaluations again, checks their claims, draws and reports."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import describe, versions
from benchmarks.paper import goodput_claims, microserving_claims, plots
from benchmarks.paper.claims import Claim
from benchmarks.paper.curves import Curves
from benchmarks.paper.goodput import Goodput, find_all
from benchmarks.paper.goodput_claims import gain
from benchmarks.paper.microserving import Sizes, run_patterns
from benchmarks.paper.published import (
    DistServe,
    Microserving,
    Reasons,
    load_distserve,
    load_microserving,
    load_reasons,
)
from benchmarks.paper.tables import baseline_section, claim_section, curve_section, error, goodput_section, times
from benchmarks.report import Goal, Report, Section, at_least, at_most

PACKAGES = ("trimtab", "numpy", "matplotlib")
SERVED = "served"
DISTSERVE = "distserve"
GOAL_ERROR = 0.06
"""Of mean JCT on the hardware as served: what a small model fitted to the published curves comes to."""
QUICK_RATES_RPS = (1.6, 4.0, 4.8, 5.6)


@dataclass(frozen=True, slots=True)
class PaperOptions:
    seed: int
    rates_rps: Sequence[float] | None
    """Of the MicroServing evaluation; `None`: all that were published. 4 must be among them."""
    requests: int | None
    """`None`: as many as were measured there."""
    seeds: int
    goodput_requests: int
    plots: Path


FULL = PaperOptions(1, None, None, seeds=5, goodput_requests=1000, plots=Path("benchmarks") / "results" / "paper")
QUICK = PaperOptions(1, QUICK_RATES_RPS, requests=150, seeds=1, goodput_requests=150, plots=Path("build") / "paper")


@dataclass(frozen=True, slots=True)
class Findings:
    """Everything that was simulated, and what it says of the claims, by group."""

    curves: Mapping[str, Curves]
    goodput: Sequence[Goodput]
    claims: Mapping[str, Sequence[Claim]]


def run_paper(options: PaperOptions) -> Report:
    """Raises `ScenarioError` for a data file that is wrong."""
    machine = describe()
    microserving, distserve = load_microserving(), load_distserve()
    curves = run_patterns(microserving, sizes(options, microserving), options.seed)
    goodput = find_all(distserve, options.goodput_requests, options.seed)
    found = Findings(curves, goodput, all_claims(microserving, distserve, curves, goodput))
    drawn, skipped = draw(options.plots, microserving, distserve, found)
    return Report(
        benchmark="paper",
        seed=options.seed,
        versions=versions(PACKAGES),
        machine=machine,
        results=results(found),
        goals=goals(microserving, found),
        skipped=skipped,
        headline=headline(microserving, distserve, found),
        sections=[*sections(options, microserving, distserve, found, load_reasons()), *drawn],
    )


def sizes(options: PaperOptions, spec: Microserving) -> Sizes:
    requests = options.requests or spec.requests
    return Sizes(options.rates_rps or spec.rates_rps, requests, spec.warm_up, options.seeds)


def all_claims(
    microserving: Microserving, distserve: DistServe, curves: Mapping[str, Curves], goodput: Sequence[Goodput]
) -> dict[str, Sequence[Claim]]:
    """By hardware, and those of DistServe."""
    found: dict[str, Sequence[Claim]] = {
        hardware: microserving_claims.claims(microserving, own) for hardware, own in curves.items()
    }
    found[DISTSERVE] = [
        claim
        for comparison in distserve.comparisons
        for claim in goodput_claims.claims(comparison, by_kind(goodput, comparison.name))
    ]
    return found


def draw(
    folder: Path, microserving: Microserving, distserve: DistServe, found: Findings
) -> tuple[list[Section], dict[str, str]]:
    """What to say of the plots: a section that names them, or why there are none."""
    try:
        files = plots.draw(folder, microserving, found.curves, distserve, found.goodput)
    except ImportError as error:
        return [], {"plots": f"{error}; matplotlib comes with the benchmarks' own dependencies"}
    rows = [[file.name, f"{file.stat().st_size / 1e3:.0f}"] for file in files]
    return [Section(title=f"Plots in {folder}", headers=["file", "kB"], rows=rows)], {}


def sections(
    options: PaperOptions, microserving: Microserving, distserve: DistServe, found: Findings, reasons: Reasons
) -> list[Section]:
    requests = options.requests or microserving.requests
    made = []
    for hardware, curves in found.curves.items():
        title = f"LLM MicroServing's claims on {microserving.hardware[hardware].title}"
        made.append(curve_section(microserving, hardware, curves, options.seeds, requests))
        made.append(claim_section(title, found.claims[hardware], reasons.get(hardware, {})))
    made.append(goodput_section(distserve, found.goodput, options.goodput_requests))
    made.append(baseline_section(distserve, found.goodput))
    made.append(claim_section("DistServe's claims", found.claims[DISTSERVE], reasons.get(DISTSERVE, {})))
    return made


def headline(microserving: Microserving, distserve: DistServe, found: Findings) -> list[str]:
    counts = {group: f"{sum(each.reproduced for each in own)} of {len(own)}" for group, own in found.claims.items()}
    hardware = ", ".join(f"{counts[each]} on {about.title}" for each, about in microserving.hardware.items())
    return [
        f"LLM MicroServing, claims reproduced: {hardware}; mean error of mean JCT as served "
        f"{_jct_error(microserving, found):.1%}",
        f"DistServe, claims reproduced: {counts[DISTSERVE]}; gain in goodput per GPU over vLLM "
        f"{_gains(distserve, found, 'baseline')} (published "
        f"{', '.join(f'{each.published.rate_gain:.1f}' for each in distserve.comparisons)}), over a collocated engine "
        f"that is as fast {_gains(distserve, found, 'same_kernels')}",
    ]


def goals(microserving: Microserving, found: Findings) -> list[Goal]:
    """The independent hardware has none: it tells which claims depend on the coefficients."""
    counted = [
        at_least(f"claims reproduced, {name}", sum(each.reproduced for each in claims), len(claims))
        for name, claims in (
            ("MicroServing as served", found.claims[SERVED]),
            ("DistServe", found.claims[DISTSERVE]),
        )
    ]
    return [at_most("error of mean JCT as served", _jct_error(microserving, found), GOAL_ERROR), *counted]


def results(found: Findings) -> list[dict[str, Any]]:
    """For JSON: every curve, every search and every claim."""
    curves = [
        {"hardware": hardware, "pattern": pattern, "rates_rps": list(own.rates_rps), **metrics}
        for hardware, own in found.curves.items()
        for pattern, metrics in own.values.items()
    ]
    claims = [{"group": group, **asdict(each)} for group, own in found.claims.items() for each in own]
    return [*curves, *map(asdict, found.goodput), *claims]


def by_kind(goodput: Sequence[Goodput], comparison: str) -> dict[str, Goodput]:
    return {each.kind: each for each in goodput if each.comparison == comparison}


def _jct_error(spec: Microserving, found: Findings) -> float:
    served = found.curves[SERVED]
    return error(served, Curves(spec.rates_rps, spec.published).only(served.rates_rps), "jct_mean_s")


def _gains(spec: DistServe, found: Findings, over: str) -> str:
    """By comparison, in order."""
    own = [by_kind(found.goodput, each.name) for each in spec.comparisons]
    return ", ".join(times(gain(each["disaggregated"], each[over])) for each in own)
