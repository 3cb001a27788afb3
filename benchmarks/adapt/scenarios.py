"""Scenarios as data: a fleet, one SLO table, and phases of traffic. Read from the TOML files in benchmarks/scenarios.

`traffic.toml` holds kinds of traffic by name; each other file is a scenario that strings some of them together.
"""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from engines.emulated.profile import Profile, load_profile
from tuner.slo import Slo, SloTable
from tuner.twin.types import Fleet, TwinEngine

FOLDER = Path(__file__).parents[1] / "scenarios"
TRAFFIC = FOLDER / "traffic.toml"

Positive = Annotated[float, msgspec.Meta(gt=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Kind = TypeVar("Kind")


class ScenarioError(ValueError):
    """A data file that cannot be read or does not hold together; the message says which and why."""


class Data(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is read from the files: unknown keys are refused."""


class Fixed(Data, frozen=True, tag="fixed", tag_field="kind"):
    """Always the same number."""

    tokens: Count


class LogNormal(Data, frozen=True, tag="lognormal", tag_field="kind"):
    """Around a median, with a long tail; draws beyond `low` and `high` become those."""

    median: Positive
    sigma: Positive
    low: Count = 1
    high: Count = 1_000_000


class Empirical(Data, frozen=True, tag="empirical", tag_field="kind"):
    """Values at evenly spread quantiles from 0 to 1; straight lines between them."""

    quantiles: Annotated[Sequence[Count], msgspec.Meta(min_length=2)]


Lengths = Fixed | LogNormal | Empirical


class Poisson(Data, frozen=True, tag="poisson", tag_field="process"):
    """Arrivals that know nothing of each other."""


class Gamma(Data, frozen=True, tag="gamma", tag_field="process"):
    """Gaps with a coefficient of variation: above 1 arrivals come in clumps."""

    cv: Positive


class OnOff(Data, frozen=True, tag="on_off", tag_field="process"):
    """Poisson whose rate jumps: bursts of `on_s`, between them pauses with the `quiet` share of the bursts' rate."""

    on_s: Positive
    off_s: Positive
    quiet: Share = 0.0


Arrivals = Poisson | Gamma | OnOff


class Sessions(Data, frozen=True):
    """Conversations: a geometric number of turns, each with the whole history before it."""

    turns: Annotated[float, msgspec.Meta(ge=1)]
    """On average."""
    think_s: Positive
    """Mean of an exponential, from the end of an answer to the next question."""


class Roots(Data, frozen=True):
    """Beginnings that sessions share, such as system prompts or documents; low numbers are the popular ones."""

    count: Count
    tokens: Count
    skew: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    """Exponent of the popularity by rank; 0: all alike."""


class Requests(Data, frozen=True):
    """One kind of request within a mix."""

    slo_class: str
    input_tokens: Lengths
    """What the user adds at each turn, on top of the root and the history."""
    output_tokens: Lengths
    share: Positive = 1.0
    """Of the requests, relative to the others in the mix."""
    sessions: Sessions | None = None
    roots: Roots | None = None


class Traffic(Data, frozen=True):
    """A kind of traffic, without its rate."""

    title: str
    mix: Annotated[Sequence[Requests], msgspec.Meta(min_length=1)]
    arrivals: Arrivals = Poisson()


class Phase(Data, frozen=True):
    """Some traffic for some time."""

    traffic: str
    """A key of `traffic.toml`."""
    duration_s: Positive
    rate_rps: Positive


class Engines(Data, frozen=True):
    """Engines of one kind."""

    profile: str
    count: Count
    overrides: Mapping[str, Any] = {}
    """Fields of the profile that differ."""

    def engine(self) -> Profile:
        """The profile with the overrides. Raises `ProfileError` or `ScenarioError`."""
        shipped = load_profile(self.profile)
        try:
            return msgspec.convert({**msgspec.structs.asdict(shipped), **self.overrides}, Profile)
        except msgspec.ValidationError as error:
            raise ScenarioError(f"overrides of {self.profile}: {error}") from error


class Bounds(Data, frozen=True):
    """The SLO of one class."""

    ttft_ms: Positive
    tpot_ms: Positive
    attainment: Share = 0.9
    weight: Positive = 1.0


class Described(Data, frozen=True):
    """A scenario's file as it is."""

    title: str
    fleet: Engines
    slos: Mapping[str, Bounds]
    phases: Annotated[Sequence[Phase], msgspec.Meta(min_length=1)]


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """A scenario, ready to be run."""

    name: str
    title: str
    engines: Engines
    profile: Profile
    slos: SloTable
    phases: Sequence[Phase]
    traffic: Mapping[str, Traffic]
    """Only the kinds that its phases name."""

    @property
    def shifts(self) -> bool:
        """Whether the traffic moves."""
        return len(self.phases) > 1

    @property
    def span_s(self) -> float:
        return sum(phase.duration_s for phase in self.phases)

    @property
    def starts_s(self) -> Sequence[float]:
        """When each phase begins."""
        return [sum(phase.duration_s for phase in self.phases[:at]) for at in range(len(self.phases))]

    @property
    def fleet(self) -> Fleet:
        return [TwinEngine(f"e{number}", self.profile) for number in range(self.engines.count)]

    def shortened(self, phase_s: float, most_phases: int) -> "Scenario":
        """The same with fewer and shorter phases, for a quick look."""
        phases = [
            msgspec.structs.replace(phase, duration_s=min(phase.duration_s, phase_s))
            for phase in self.phases[:most_phases]
        ]
        return msgspec.structs.replace(self, phases=phases)


def scenario_names() -> list[str]:
    """Stationary ones first, each group in order of its names."""
    files = [path for path in FOLDER.glob("*.toml") if path != TRAFFIC]
    return sorted((path.stem for path in files), key=lambda name: (name.startswith("shift"), name))


def load_scenario(name: str) -> Scenario:
    """One of `scenario_names()`. Raises `ScenarioError` or `ProfileError`."""
    described = read(FOLDER / f"{name}.toml", Described)
    kinds = load_traffic()
    missing = {phase.traffic for phase in described.phases} - kinds.keys()
    if missing:
        raise ScenarioError(f"{name}: no such traffic: {', '.join(sorted(missing))}")
    used = {phase.traffic: kinds[phase.traffic] for phase in described.phases}
    return Scenario(
        name=name,
        title=described.title,
        engines=described.fleet,
        profile=described.fleet.engine(),
        slos=_slos(name, described.slos, used),
        phases=described.phases,
        traffic=used,
    )


def load_traffic() -> Mapping[str, Traffic]:
    """Every kind of traffic by name."""
    return read(TRAFFIC, dict[str, Traffic])


def read(path: Path, kind: type[Kind]) -> Kind:
    """A TOML file as a data type. Raises `ScenarioError`."""
    try:
        return msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), kind)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ScenarioError(f"{path.name}: {error}") from error


def _slos(name: str, bounds: Mapping[str, Bounds], used: Mapping[str, Traffic]) -> SloTable:
    asked = {requests.slo_class for traffic in used.values() for requests in traffic.mix}
    if missing := asked - bounds.keys():
        raise ScenarioError(f"{name}: requests of a class without bounds: {', '.join(sorted(missing))}")
    table = {each: Slo(**msgspec.structs.asdict(bound)) for each, bound in bounds.items()}
    return SloTable(version=1, classes={"default": next(iter(table.values())), **table})
