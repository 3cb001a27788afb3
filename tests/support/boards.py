"""Grafana boards and Prometheus rules as they lie on disk, taken apart."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "dashboards"
BOARD_FILES = sorted((FOLDER / "grafana").glob("*.json"))
PROMETHEUS = FOLDER / "prometheus"
RULES = sorted((PROMETHEUS / "rules").glob("*.yml"))

STRING = re.compile(r'"[^"]*"')
METRIC = re.compile(r"\b(?:[a-z_]+:)?trimtab_[a-z0-9_]+(?::[a-z0-9_]+)?\b")
VARIABLES = {"$__rate_interval": "15s", "$model": ".*", "$class": ".*", "$engine": ".*"}


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    """All panels that show something."""
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def queries(board: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Where each query of a board stands, and the query: of panels, annotations and variables."""
    for panel in panels(board):
        for target in panel["targets"]:
            yield f"{panel['title']} {target['refId']}", target["expr"]
    for mark in board["annotations"]["list"]:
        if "expr" in mark:
            yield mark["name"], mark["expr"]
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            yield f"${variable['name']}", variable["query"]["query"]


def metric_names(expr: str) -> frozenset[str]:
    """Trimtab's metrics and recorded series in an expression."""
    return frozenset(METRIC.findall(STRING.sub('""', expr)))


def filled_in(expr: str) -> str:
    """An expression as Grafana would send it, with everything selected."""
    for name, value in VARIABLES.items():
        expr = expr.replace(name, value)
    return expr
