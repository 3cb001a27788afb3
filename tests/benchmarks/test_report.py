"""What a benchmark hands over: percentiles, goals, Markdown and JSON."""

import json
import socket
from pathlib import Path

import pytest

from benchmarks.machine import describe
from benchmarks.report import Report, Section, at_least, at_most, number, percentiles, publish, table


def a_report(**changes):
    fields = {
        "benchmark": "router",
        "seed": 7,
        "versions": {"python": "3.11"},
        "machine": {"cores": 2},
        "results": [{"target": "x", "cpu_us": 1.5}],
        "goals": [at_most("cost", 2.0, 1.0), at_most("delay", 0.5, 1.0), at_most("other", None, 1.0)],
        "skipped": {"peer": "not installed"},
        "sections": [Section(title="Cost", headers=["stack", "µs"], rows=[["x", "1.5"]], notes=["a note"])],
    }
    return Report(**(fields | changes))


def test_percentiles_are_observed_values_at_the_nearest_rank():
    assert percentiles([5, 1, 4, 2, 3], [50, 99, 100]) == [3, 5, 5]
    assert percentiles(range(1, 101), [50, 99]) == [50, 99]


def test_percentiles_of_nothing_are_none():
    assert percentiles([], [50]) is None


@pytest.mark.parametrize(("value", "met"), [(0.99, True), (1.0, True), (1.01, False), (None, None)])
def test_a_goal_is_met_up_to_and_including_its_bound_and_unknown_without_a_value(value, met):
    assert at_most("goal", value, 1.0).met is met


@pytest.mark.parametrize(("value", "met"), [(1.01, True), (1.0, True), (0.99, False), (None, None)])
def test_a_goal_from_below_is_met_from_its_bound_on(value, met):
    assert at_least("goal", value, 1.0).met is met


def test_a_goal_from_below_is_shown_as_such_and_is_like_the_others_in_json():
    made = a_report(goals=[at_least("share", 0.5, 0.95)])
    assert "| share | 0.50 | ≥ 0.95 | **missed** |" in made.markdown().splitlines()
    assert json.loads(made.json())["goals"] == [{"name": "share", "value": 0.5, "goal": 0.95, "met": False}]


@pytest.mark.parametrize(
    ("value", "shown"), [(None, "–"), (0.123, "0.12"), (12.34, "12.3"), (123.4, "123"), (38127, "38,127")]
)
def test_numbers_are_shown_with_three_significant_digits(value, shown):
    assert number(value) == shown


def test_a_table_has_a_ruler_and_one_line_for_each_row():
    assert table(["a", "b"], [["1", "2"], ["3", "4"]]).splitlines() == [
        "| a | b |",
        "| --- | ---: |",
        "| 1 | 2 |",
        "| 3 | 4 |",
    ]


def test_markdown_names_missed_unmeasured_and_skipped():
    lines = a_report().markdown().splitlines()
    assert "| cost | 2.00 | ≤ 1 | **missed** |" in lines
    assert "| delay | 0.50 | ≤ 1 | met |" in lines
    assert "| other | – | ≤ 1 | not measured |" in lines
    assert "- skipped **peer**: not installed" in lines
    assert "| x | 1.5 |" in lines
    assert "- a note" in lines


def test_json_holds_the_agreed_keys_and_goals():
    document = json.loads(a_report().json())
    assert {"benchmark", "seed", "versions", "machine", "results", "goals"} <= document.keys()
    assert "sections" not in document
    assert document["goals"][0] == {"name": "cost", "value": 2.0, "goal": 1.0, "met": False}
    assert document["results"] == [{"target": "x", "cpu_us": 1.5}]


def test_json_has_a_line_for_each_result_and_six_digits_of_a_float():
    written = a_report(results=[{"a": 1 / 3, "b": [1, None]}, {"a": 2.0}], date="2026-01-31").json().decode()
    assert '{"a":0.333333,"b":[1,null]},\n{"a":2.0}' in written
    assert json.loads(written)["date"] == "2026-01-31"


def test_markdown_says_what_was_run_and_when_and_begins_with_the_headline():
    lines = (
        a_report(benchmark="adapt --live", date="2026-01-31", quick=True, headline=["It works"]).markdown().split("\n")
    )
    assert lines[2] == "`python -m benchmarks adapt --live` · quick form · 2026-01-31 · seed 7"
    assert lines.index("- It works") < lines.index("## Cost")


def test_publish_puts_both_forms_into_a_folder_that_it_makes(tmp_path, capsys):
    publish(a_report(benchmark="adapt --live"), None, tmp_path / "new")
    assert sorted(file.name for file in (tmp_path / "new").iterdir()) == ["adapt-live.json", "adapt-live.md"]
    assert (tmp_path / "new" / "adapt-live.md").read_text() == capsys.readouterr().out.removesuffix("\n")


def test_the_machine_is_described_without_its_name_or_any_path():
    described = " ".join(describe().values())
    assert socket.gethostname() not in described.split()
    assert str(Path.cwd()) not in described


def test_publish_prints_markdown_and_writes_json_only_if_asked(tmp_path, capsys):
    publish(a_report(), None)
    assert list(tmp_path.iterdir()) == []
    publish(a_report(), tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_bytes())["seed"] == 7
    assert capsys.readouterr().out.count("# router") == 2
