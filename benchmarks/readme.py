"""README's table of benchmarks, made from the reports in benchmarks/results.

A benchmark is listed by adding it to `BENCHMARKS`; what its row says of figures comes from its own report: the
`headline`, and the goals that were missed.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from benchmarks.report import number, table

README = Path(__file__).parents[1] / "README.md"
RESULTS = Path(__file__).parent / "results"
BEGIN, END = "<!-- benchmarks -->", "<!-- /benchmarks -->"
"""Lines around the table; what is between them is overwritten."""

BENCHMARKS: Mapping[str, str] = {
    "router": "What does the router cost, beside sglang-router, smg, HAProxy and FastAPI + httpx?",
    "adapt": "Traffic that moves, in virtual time: Trimtab beside fixed plans, a threshold rule and the oracle in "
    "hindsight",
    "adapt --live": "The same over real processes on this machine, one scenario",
    "adapt --sglang": "Two real SGLang engines and traffic that moves: Trimtab beside fixed patterns and sglang-router",
    "traces": "Public production traces at 4 to 64 engines: Trimtab beside fixed plans and a threshold rule",
    "paper": "Does the simulator reproduce published results of disaggregation?",
    "fidelity": "Does the simulator, fitted to real SGLang engines, foresee what they do?",
    "twin": "How fast is the simulator of the search, and how near to the reference?",
    "sglang-transfer": "KV between two SGLang engines, beside NIXL alone and a memory copy",
    "sglang-interference": "What does a long prompt do to running streams, beside SGLang's own disaggregation?",
}
"""What follows `python -m benchmarks` -> what it asks."""


class ReadmeError(ValueError):
    """The table cannot be made or put in its place; the message says why."""


class ToldGoal(msgspec.Struct, frozen=True):
    """A goal as a report's JSON has it."""

    name: str
    value: float | None
    goal: float
    met: bool | None

    def __str__(self) -> str:
        """A missed goal's bound is on the other side of its value."""
        sign = "≥" if self.value is not None and self.value < self.goal else "≤"
        return f"{self.name}: {number(self.value)} ({sign} {self.goal:g})"


class Told(msgspec.Struct, frozen=True):
    """What README says of a report; its JSON holds more."""

    benchmark: str
    date: str
    goals: Sequence[ToldGoal]
    machine: Mapping[str, str | int | float]
    headline: Sequence[str] = ()
    quick: bool = False


def told(folder: Path) -> Mapping[str, Told]:
    """Benchmark -> its report in the folder. Raises `ReadmeError` for one that cannot be read or is not listed."""
    found = {}
    for file in sorted(folder.glob("*.json")):
        try:
            each = msgspec.json.decode(file.read_bytes(), type=Told)
        except msgspec.DecodeError as error:
            raise ReadmeError(f"{file.name}: {error}") from error
        if each.benchmark not in BENCHMARKS:
            raise ReadmeError(f"{file.name}: {each.benchmark!r} is not listed in benchmarks/readme.py")
        found[each.benchmark] = each
    return found


def benchmark_table(reports: Mapping[str, Told]) -> str:
    """One row for each benchmark, in the order of `BENCHMARKS`."""
    rows = [_row(name, asks, reports.get(name)) for name, asks in BENCHMARKS.items()]
    headers = ["`python -m benchmarks …`", "asks", "found", "goals", "when, where"]
    # Sentences, so everything is left-aligned.
    return table(headers, rows).replace("---:", "---")


def with_table(text: str, made: str) -> str:
    """The text with the table between its markers. Raises `ReadmeError` if they are not there, once and in order."""
    before, begin, rest = text.partition(BEGIN)
    old, end, after = rest.partition(END)
    if not begin or not end or BEGIN in old or BEGIN in after or END in after:
        raise ReadmeError(f"there must be one {BEGIN} and one {END} after it")
    return f"{before}{BEGIN}\n\n{made}\n\n{END}{after}"


def _row(name: str, asks: str, report: Told | None) -> list[str]:
    if report is None:
        return [f"`{name}`", asks, "not yet run here", "–", "–"]
    command = f"`{name} --quick`" if report.quick else f"`{name}`"
    where = f"{report.date}; {report.machine.get('cpu', 'unknown')}, {report.machine.get('cores', '?')} cores"
    return [command, asks, "<br>".join(map(_cell, report.headline)) or "–", _goals(report.goals), where]


def _goals(goals: Sequence[ToldGoal]) -> str:
    judged = [goal for goal in goals if goal.met is not None]
    if not judged:
        return "–"
    missed = [f"missed: {_cell(str(goal))}" for goal in judged if not goal.met]
    return "<br>".join([f"{len(judged) - len(missed)} of {len(judged)} met", *missed])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
