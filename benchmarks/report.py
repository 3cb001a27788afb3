"""What every benchmark hands over: Markdown for people, JSON for programs, goals that are met or missed.

A goal that is missed is reported as missed; nothing here fails. Benchmarks report, tests judge.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
from numpy.typing import ArrayLike

DIGITS = 6
"""Significant ones of floats in JSON: more says nothing and fills files."""


class Goal(msgspec.Struct, frozen=True, kw_only=True):
    """A bound on a measured value. `value` is `None` where it was not measured, and then so is `met`."""

    sign: ClassVar[str] = "≤"

    name: str
    value: float | None
    goal: float
    met: bool | None


class Floor(Goal, frozen=True, kw_only=True):
    """A goal from below; equal in JSON."""

    sign: ClassVar[str] = "≥"


def at_most(name: str, value: float | None, goal: float) -> Goal:
    return Goal(name=name, value=value, goal=goal, met=None if value is None else value <= goal)


def at_least(name: str, value: float | None, goal: float) -> Goal:
    return Floor(name=name, value=value, goal=goal, met=None if value is None else value >= goal)


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """One table of the Markdown report with its heading and the sentences below it."""

    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a run found out. `sections` are for the Markdown form only."""

    benchmark: str
    """What follows `python -m benchmarks` on the command line, such as `adapt --live`."""
    seed: int
    date: str | None = None
    """ISO day; whoever publishes the report knows it."""
    quick: bool = False
    """Whether this was the short form."""
    versions: Mapping[str, str]
    machine: Mapping[str, Any]
    results: Sequence[Mapping[str, Any]]
    goals: Sequence[Goal]
    stretch: Sequence[Goal] = ()
    skipped: Mapping[str, str] = {}
    """Name -> why, for whatever should have been measured and was not."""
    headline: Sequence[str] = ()
    """What to know if one reads nothing else: a few sentences with figures. README's table quotes them."""
    sections: Sequence[Section] = ()

    @property
    def name(self) -> str:
        """Of its files: `adapt-live`."""
        return self.benchmark.replace(" --", "-")

    def json(self) -> bytes:
        """All but the sections; each element of a list is on a line of its own, floats have `DIGITS` digits."""
        document = {name: value for name, value in msgspec.structs.asdict(self).items() if name != "sections"}
        members = [f"{_encoded(name)}: {_lines(value)}" for name, value in _rounded(document).items()]
        return ("{\n" + ",\n".join(members) + "\n}\n").encode()

    def markdown(self) -> str:
        form = "quick form" if self.quick else None
        about = filter(None, (f"`python -m benchmarks {self.benchmark}`", form, self.date, f"seed {self.seed}"))
        parts = [f"# {self.benchmark}", " · ".join(about), _facts(self.machine), _facts(self.versions)]
        if self.headline:
            parts.append("\n".join(f"- {sentence}" for sentence in self.headline))
        parts += [_section(section) for section in self.sections]
        if self.skipped:
            parts.append("\n".join(f"- skipped **{name}**: {why}" for name, why in self.skipped.items()))
        parts += [_goals(title, goals) for title, goals in (("Goals", self.goals), ("Stretch", self.stretch)) if goals]
        return "\n\n".join(parts) + "\n"


def publish(report: Report, json_file: Path | None, folder: Path | None = None) -> None:
    """Print the Markdown and, if asked, write the JSON to a file, and both forms into a folder."""
    print(report.markdown())
    if json_file is not None:
        json_file.write_bytes(report.json())
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{report.name}.json").write_bytes(report.json())
        (folder / f"{report.name}.md").write_text(report.markdown(), encoding="utf-8")


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first column is left-aligned, the others (numbers) right-aligned."""
    ruler = ["---", *["---:"] * (len(headers) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (headers, ruler, *rows))


def number(value: float | None) -> str:
    """Three significant digits, thousands grouped, `–` for what was not measured."""
    if value is None:
        return "–"
    magnitude = abs(value)
    if magnitude >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if magnitude >= 10 else f"{value:.2f}"


def percentiles(values: ArrayLike, wanted: Sequence[float]) -> list[float] | None:
    """The given percentiles (0 to 100), each an observed value (nearest rank); `None` if there are no values."""
    observed = np.asarray(values, dtype=float)
    if observed.size == 0:
        return None
    return [float(found) for found in np.percentile(observed, wanted, method="inverted_cdf")]


def _rounded(value: Any) -> Any:
    """The same, of builtin types."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    return value if isinstance(value, str | int | None) else _rounded(msgspec.to_builtins(value))


def _encoded(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _lines(value: Any) -> str:
    if not isinstance(value, list) or not value:
        return _encoded(value)
    return "[\n" + ",\n".join(_encoded(each) for each in value) + "\n]"


def _section(section: Section) -> str:
    notes = "\n".join(f"- {note}" for note in section.notes)
    return "\n\n".join(filter(None, (f"## {section.title}", table(section.headers, section.rows), notes)))


def _facts(facts: Mapping[str, Any]) -> str:
    return " · ".join(f"{name} {value}" for name, value in facts.items())


def _goals(title: str, goals: Sequence[Goal]) -> str:
    verdicts = {True: "met", False: "**missed**", None: "not measured"}
    rows = [[goal.name, number(goal.value), f"{goal.sign} {goal.goal:g}", verdicts[goal.met]] for goal in goals]
    return f"## {title}\n\n" + table(["goal", "measured", "bound", "verdict"], rows)
