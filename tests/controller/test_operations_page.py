"""docs/operations.md says what to do about every alert, with commands that exist."""

import re

import pytest
import yaml

from tests.support.boards import PROMETHEUS
from tests.support.commands import unknown_commands

PAGE = (PROMETHEUS.parents[1] / "docs" / "operations.md").read_text()
RULES = yaml.safe_load((PROMETHEUS / "rules" / "alerts.yml").read_text())
ALERTS = {rule["alert"]: rule for group in RULES["groups"] for rule in group["rules"]}
SECTIONS = dict(re.findall(r"^###? (.+)\n((?:(?!##).*\n?)*)", PAGE, re.MULTILINE))
SITUATIONS = (
    "Losing Redis",
    "Losing the leader",
    "Draining an engine",
    "Rolling back a plan",
    "Changing what is promised",
)


def test_the_alerts_with_a_section_are_those_that_there_are() -> None:
    assert {title for title in SECTIONS if title.startswith("Trimtab")} == set(ALERTS)


@pytest.mark.parametrize("alert", ALERTS)
def test_a_section_says_how_bad_it_is_what_to_look_at_and_what_to_do(alert: str) -> None:
    text = SECTIONS[alert]
    assert f"**{ALERTS[alert]['labels']['severity'].capitalize()}.**" in text
    assert "Check: " in text
    assert "Do: " in text or "| do |" in text
    assert "`" in text


@pytest.mark.parametrize("title", SITUATIONS)
def test_what_an_operator_does_now_and_then_has_a_section_with_a_command(title: str) -> None:
    assert "trimtab " in SECTIONS[title]


def test_every_command_on_the_page_exists() -> None:
    assert unknown_commands(PAGE) == []


def test_every_link_on_the_page_leads_to_one_of_its_sections() -> None:
    anchors = {title.lower().replace(" ", "-").replace(":", "") for title in SECTIONS}
    assert set(re.findall(r"\]\(#([^)]+)\)", PAGE)) <= anchors
