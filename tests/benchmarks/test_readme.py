"""README's table of benchmarks: made from reports, and up to date."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.readme import BENCHMARKS, RESULTS, ReadmeError, benchmark_table, told, with_table
from benchmarks.report import Report, at_least, at_most, publish

MOST_BYTES = 60_000


@pytest.fixture
def published(tmp_path):
    """Publishes a report into a folder, and gives that folder back."""

    def publish_one(**changes):
        fields = {
            "benchmark": "twin",
            "seed": 1,
            "date": "2026-01-31",
            "versions": {},
            "machine": {"cpu": "Some CPU", "cores": "2"},
            "results": [],
            "goals": [at_least("speed", 0.5, 1), at_most("cost", 3.0, 2), at_most("error", 0.1, 1)],
            "headline": ["Fast | small", "Near"],
        }
        publish(Report(**(fields | changes)), None, tmp_path)
        return tmp_path

    return publish_one


def row(folder, name):
    (found,) = [line for line in benchmark_table(told(folder)).splitlines() if line.startswith(f"| `{name}")]
    return [cell.strip() for cell in found.replace(r"\|", "¦").strip("|").split("|")]


def test_the_readme_is_up_to_date_with_the_reports():
    result = CliRunner().invoke(app, ["readme", "--check"])
    assert result.exit_code == 0, result.output


def test_kept_reports_are_small():
    assert [file.name for file in RESULTS.glob("*.json") if file.stat().st_size > MOST_BYTES] == []


def test_kept_reports_name_no_path_of_the_machine():
    private = re.compile(rf"/(tmp|home|root|Users)/|{re.escape(str(Path.cwd()))}")
    reports = [*RESULTS.glob("*.json"), *RESULTS.glob("*.md")]
    assert reports
    assert [file.name for file in reports if private.search(file.read_text())] == []


def test_a_row_says_what_was_found_which_goals_were_missed_by_how_much_and_where(published):
    name, _, found, goals, where = row(published(), "twin")
    assert name == "`twin`"
    assert found == "Fast ¦ small<br>Near"
    assert goals == "1 of 3 met<br>missed: speed: 0.50 (≥ 1)<br>missed: cost: 3.00 (≤ 2)"
    assert where == "2026-01-31; Some CPU, 2 cores"


def test_goals_that_were_not_measured_are_neither_met_nor_missed(published):
    assert row(published(goals=[at_most("cost", None, 2)]), "twin")[3] == "–"


def test_a_short_form_is_shown_as_such(published):
    assert row(published(quick=True), "twin")[0] == "`twin --quick`"


def test_what_was_not_run_has_a_row_that_says_so(published):
    assert row(published(), "router")[2] == "not yet run here"
    assert len(benchmark_table({}).splitlines()) == 2 + len(BENCHMARKS)


def test_a_report_of_a_benchmark_that_is_not_listed_is_refused(published):
    with pytest.raises(ReadmeError, match="unheard-of"):
        told(published(benchmark="unheard-of"))


def test_a_file_that_is_no_report_is_refused(tmp_path):
    (tmp_path / "odd.json").write_text("{}")
    with pytest.raises(ReadmeError, match=r"odd\.json"):
        told(tmp_path)


def test_only_what_is_between_the_markers_changes():
    made = with_table("a\n<!-- benchmarks -->\nold\n<!-- /benchmarks -->\nb\n", "| new |")
    assert made == "a\n<!-- benchmarks -->\n\n| new |\n\n<!-- /benchmarks -->\nb\n"
    assert with_table(made, "| new |") == made


@pytest.mark.parametrize("text", ["", "<!-- benchmarks -->", "<!-- /benchmarks --><!-- benchmarks -->"])
def test_a_text_without_both_markers_in_order_is_refused(text):
    with pytest.raises(ReadmeError):
        with_table(text, "| new |")
