"""Documents as tables, and as JSON for scripts."""

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich import box
from rich.bar import Bar
from rich.console import Console
from rich.table import Table

BAR_WIDTH = 60

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts")]


def print_json(document: Any) -> None:
    typer.echo(json.dumps(document, indent=2))


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    table = Table(*columns, title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for row in rows:
        table.add_row(*row)
    Console(highlight=False).print(table)


def print_bars(title: str, values: Iterable[tuple[str, float]]) -> None:
    """A bar for each value, as long as it is large."""
    rows = list(values)
    table = Table(title=title, title_justify="left", box=None, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(width=BAR_WIDTH)
    table.add_column(justify="right", no_wrap=True)
    largest = max((value for _, value in rows), default=0.0)
    for label, value in rows:
        table.add_row(label, Bar(largest or 1.0, 0, value), f"{value:.2f}")
    Console(highlight=False).print(table)


def plan_summary(plan: Mapping[str, Any]) -> str:
    """One line: `version 7, balanced, by operator at …: why`."""
    when = at(float(plan["issued_at_s"]))
    return f"version {plan['version']}, {plan['pattern']}, by {plan['issued_by']} at {when}: {plan['reason']}"


def knob_rows(plan: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Knobs and roles as name and value."""
    knobs = [(name, "as the engines have it" if value is None else str(value)) for name, value in _knobs(plan)]
    return knobs + [(f"role of {engine_id}", str(role)) for engine_id, role in plan["roles"].items()]


def _knobs(plan: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    return (plan["knobs"] or {}).items()


def at(unix_s: float) -> str:
    """A moment in local time."""
    return datetime.fromtimestamp(unix_s, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")
