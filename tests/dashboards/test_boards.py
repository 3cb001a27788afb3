"""The boards as they lie on disk: whole, and about metrics that there are."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from dashboards.metrics_table import PAGE, controller_metrics, engine_metrics, page, router_metrics
from tests.support.boards import BOARD_FILES, RULES, metric_names, panels, queries
from tuner.plan import Knobs

CURRENT_TYPES = {"timeseries", "stat", "statetimeline", "state-timeline", "table", "row"}
PROVISIONING = Path("dashboards/grafana/provisioning")
BOARDS: Mapping[str, dict[str, Any]] = {file.stem: json.loads(file.read_text()) for file in BOARD_FILES}
each_board = pytest.mark.parametrize("uid", BOARDS)


def exported() -> frozenset[str]:
    families = [*router_metrics(), *engine_metrics(), *controller_metrics()]
    return frozenset(name for family in families for name in family.names)


def recorded() -> frozenset[str]:
    groups = [group for file in RULES for group in yaml.safe_load(file.read_text())["groups"]]
    return frozenset(rule["record"] for group in groups for rule in group["rules"] if "record" in rule)


def expressions() -> Iterator[tuple[str, str]]:
    """Where every query stands, and the query."""
    for uid, board in BOARDS.items():
        for where, expr in queries(board):
            yield f"{uid}: {where}", expr
    for file in RULES:
        for group in yaml.safe_load(file.read_text())["groups"]:
            for rule in group["rules"]:
                yield f"{file.name}: {rule.get('record') or rule['alert']}", rule["expr"]


def test_there_are_five_boards_with_different_ids() -> None:
    assert {board["uid"] for board in BOARDS.values()} == {
        "trimtab-goodput",
        "trimtab-pools",
        "trimtab-transfers",
        "trimtab-tuner",
        "trimtab-router",
    }
    assert all(board["uid"] == uid for uid, board in BOARDS.items())


def test_every_metric_that_a_board_or_rule_asks_for_is_exported_by_the_code() -> None:
    known = exported() | recorded()
    unknown = {(where, name) for where, expr in expressions() for name in metric_names(expr) - known}
    assert not unknown


def test_every_metric_that_the_code_exports_for_operators_is_on_a_board_or_in_a_rule() -> None:
    shown = frozenset(name for _, expr in expressions() for name in metric_names(expr))
    families = [*router_metrics(), *engine_metrics(), *controller_metrics()]
    unseen = {family.name for family in families if not family.names & shown}
    assert unseen == NOT_SHOWN


NOT_SHOWN = {
    "trimtab_router_info",
    "trimtab_controller_leaderships_total",
    "trimtab_controller_store_errors_total",
    "trimtab_tuner_engines",
    "trimtab_tuner_model_samples",
}
"""For looking things up, not for looking at."""


@each_board
def test_every_panel_says_what_it_shows_in_which_unit_and_why_it_may_be_empty(uid: str) -> None:
    for panel in panels(BOARDS[uid]):
        defaults = panel["fieldConfig"]["defaults"]
        assert len(panel["description"]) > 10, panel["title"]
        assert len(defaults["noValue"]) > 5, panel["title"]
        assert panel["type"] in {"state-timeline", "table"} or defaults["unit"], panel["title"]


@each_board
def test_only_current_panel_types_are_used(uid: str) -> None:
    assert {panel["type"] for panel in BOARDS[uid]["panels"]} <= CURRENT_TYPES


@each_board
def test_panels_have_ids_of_their_own_and_do_not_overlap(uid: str) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in BOARDS[uid]["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        taken |= cells
    ids = [panel["id"] for panel in BOARDS[uid]["panels"]]
    assert len(ids) == len(set(ids))


@each_board
def test_every_query_can_be_narrowed_to_a_model_and_asks_the_chosen_data_source(uid: str) -> None:
    for panel in panels(BOARDS[uid]):
        for target in panel["targets"]:
            assert '=~"$model"' in target["expr"], panel["title"]
            assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


@each_board
def test_the_variables_are_model_class_and_engine(uid: str) -> None:
    names = [variable["name"] for variable in BOARDS[uid]["templating"]["list"]]
    assert names == ["datasource", "model", "class", "engine"]


@each_board
def test_plan_changes_and_roll_backs_are_marked(uid: str) -> None:
    marks = {mark["name"]: mark for mark in BOARDS[uid]["annotations"]["list"]}
    assert {"Plan changes", "Roll-backs"} <= marks.keys()
    assert all(marks[name]["target"]["expr"] for name in ("Plan changes", "Roll-backs"))


def test_the_tuner_board_shows_every_knob_that_is_a_number() -> None:
    exprs = " ".join(expr for _, expr in queries(BOARDS["trimtab-tuner"]))
    shown = set(re.findall(r"trimtab_plan_([a-z_]+)", exprs))
    words = {"policy", "admission"}
    assert set(Knobs.model_fields) - words <= shown


def test_the_page_of_metrics_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run `python -m dashboards.build`"


def test_provisioning_offers_the_data_source_and_the_boards() -> None:
    (source,) = yaml.safe_load((PROVISIONING / "datasources/prometheus.yml").read_text())["datasources"]
    assert (source["type"], source["isDefault"]) == ("prometheus", True)
    scraped = yaml.safe_load(Path("dashboards/prometheus/prometheus.yml").read_text())["global"]["scrape_interval"]
    assert source["jsonData"]["timeInterval"] == scraped
    (provider,) = yaml.safe_load((PROVISIONING / "dashboards/trimtab.yml").read_text())["providers"]
    assert (provider["type"], provider["allowUiUpdates"]) == ("file", False)
