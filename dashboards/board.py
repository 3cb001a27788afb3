"""A board: titled rows of panels, with the same variables, annotations and links on each."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as models

from dashboards.panels import MODEL, SOURCE, Panel

TAG = "trimtab"
ALL = models.VariableOption(text="All", value="$__all", selected=True)


@dataclass(frozen=True, slots=True)
class Row:
    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True, slots=True)
class Board:
    uid: str
    title: str
    about: str
    rows: Sequence[Row]


@dataclass(frozen=True, slots=True)
class Moment:
    """An annotation. `expr` gives the milliseconds of Unix time at which something happened."""

    name: str
    expr: str
    colour: str
    says: str


MOMENTS = (
    Moment(
        "Plan changes",
        f"max by (pattern, issued_by) (1000 * trimtab_plan_issued_timestamp_seconds{{{MODEL}}})",
        "blue",
        "New plan: {{pattern}}, issued by {{issued_by}}",
    ),
    Moment(
        "Roll-backs",
        f'max (1000 * trimtab_tuner_last_decision_timestamp_seconds{{{MODEL}, reason="rolled_back"}})',
        "red",
        "Rolled back: measured goodput fell short of the promise",
    ),
)


def encode(board: Board) -> str:
    """The board's JSON as Grafana imports it; equal boards give equal text."""
    document: dict[str, Any] = json.loads(json.dumps(_build(board), cls=JSONEncoder))
    document["annotations"]["list"] = [*document["annotations"].get("list", []), *map(_annotation, MOMENTS)]
    for number, panel in enumerate(document["panels"], start=1):
        panel["id"] = number
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def _build(board: Board) -> models.Dashboard:
    built = dashboard.Dashboard(board.title).uid(board.uid).description(board.about).tags([TAG])
    built = built.time("now-30m", "now").refresh("5s").timezone("browser").readonly()
    built = built.tooltip(models.DashboardCursorSync.CROSSHAIR).link(_links())
    for variable in _variables():
        built = built.with_variable(variable)
    for row in board.rows:
        built = built.with_row(dashboard.Row(row.title))
        for panel in row.panels:
            built = built.with_panel(panel)
    return built.build()


def _links() -> dashboard.DashboardLink:
    link = dashboard.DashboardLink("Trimtab").type(models.DashboardLinkType.DASHBOARDS).tags([TAG])
    return link.include_vars(True).keep_time(True)


def _variables() -> Sequence[dashboard.DatasourceVariable | dashboard.QueryVariable]:
    source = dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
    return (
        source,
        _label("model", "Model", "label_values(trimtab_plan_version, model)"),
        _label("class", "Class", f"label_values(trimtab_slo_weight{{{MODEL}}}, slo_class)"),
        _label("engine", "Engine", f"label_values(trimtab_engine_info{{{MODEL}}}, engine)"),
    )


def _label(name: str, label: str, query: str) -> dashboard.QueryVariable:
    variable = dashboard.QueryVariable(name).label(label).datasource(SOURCE)
    variable = variable.query({"qryType": 1, "query": query, "refId": f"variable-{name}"})
    variable = variable.refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED).sort(models.VariableSort.ALPHABETICAL_ASC)
    return variable.multi(True).include_all(True).all_value(".*").current(ALL)


def _annotation(moment: Moment) -> Mapping[str, Any]:
    """By hand: the SDK's schema knows no queries of Prometheus in annotations."""
    return {
        "name": moment.name,
        "enable": True,
        "iconColor": moment.colour,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "target": {"refId": "Anno", "expr": moment.expr, "interval": "5s"},
        "expr": moment.expr,
        "step": "5s",
        "useValueForTime": True,
        "titleFormat": moment.says,
        "textFormat": "",
        "tagKeys": "pattern,issued_by",
    }
