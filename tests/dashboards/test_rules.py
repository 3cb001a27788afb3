"""Recording rules and alerts, by Prometheus's own tool."""

import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import yaml

from tests.compose.compose_file import MODEL, OURS, command_of, names_of
from tests.support.boards import PROMETHEUS, RULES
from tests.support.commands import advised, unknown_commands
from tests.support.prometheus import PROMTOOL, WHY_SKIPPED

UNIT_TESTS = sorted((PROMETHEUS / "tests").glob("*.yml"))
GROUPS = [group for file in RULES for group in yaml.safe_load(file.read_text())["groups"]]
RULE_LIST: Sequence[Mapping[str, Any]] = [rule for group in GROUPS for rule in group["rules"]]
ALERTS = [rule for rule in RULE_LIST if "alert" in rule]
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason=WHY_SKIPPED)


def promtool(*arguments: str) -> None:
    done = subprocess.run([str(PROMTOOL), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_configuration_and_rules_are_valid() -> None:
    promtool("check", "config", str(PROMETHEUS / "prometheus.yml"))
    promtool("check", "rules", *map(str, RULES))


@needs_promtool
@pytest.mark.parametrize("file", UNIT_TESTS, ids=lambda file: file.stem)
def test_rules_do_what_their_unit_tests_say(file: Any) -> None:
    promtool("test", "rules", str(file))


@pytest.mark.parametrize("rule", RULE_LIST, ids=lambda rule: rule.get("record") or rule["alert"])
def test_every_rule_has_a_unit_test(rule: Mapping[str, Any]) -> None:
    tests = [test for file in UNIT_TESTS for test in yaml.safe_load(file.read_text())["tests"]]
    if "record" in rule:
        assert any(rule["record"] in case["expr"] for test in tests for case in test.get("promql_expr_test", ()))
        return
    cases = [case for test in tests for case in test.get("alert_rule_test", ()) if case["alertname"] == rule["alert"]]
    assert any(case["exp_alerts"] for case in cases)


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_every_alert_says_how_bad_it_is_and_what_to_do(alert: Mapping[str, Any]) -> None:
    assert alert["alert"].startswith("Trimtab")
    assert alert["labels"]["severity"] in {"page", "ticket"}
    assert "$labels.model" in alert["annotations"]["summary"]
    assert len(alert["annotations"]["what_to_do"]) > 40


def test_every_command_that_an_alert_advises_exists() -> None:
    texts = "\n".join(alert["annotations"]["what_to_do"] for alert in ALERTS)
    assert list(advised(texts))
    assert unknown_commands(texts) == []


def test_what_is_scraped_by_default_are_services_of_the_compose_file() -> None:
    commands = {name: command_of(service) for service in OURS for name in names_of(service)}
    for file in (PROMETHEUS / "targets").glob("*.yml"):
        for group in yaml.safe_load(file.read_text()):
            assert group["labels"]["model"] == MODEL
            for target in group["targets"]:
                host, port = target.split(":")
                assert port in commands[host], target
