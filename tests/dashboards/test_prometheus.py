"""The whole stack under load, a real Prometheus with our files, and every query that boards and rules make."""

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from controller.stack.embedded import free_port
from controller.stack.running import RunningStack
from dashboards import EMPTY_UNLESS
from tests.support.boards import BOARD_FILES, filled_in, panels
from tests.support.prometheus import BINARY, WHY_SKIPPED, Prometheus, running_prometheus
from tests.support.up import end_hard, environment_of, until_announced, wait_until

pytestmark = pytest.mark.skipif(BINARY is None, reason=WHY_SKIPPED)

QUICKLY = {
    "TRIMTAB_TICK_S": "1",
    "TRIMTAB_TUNER__MIN_REQUESTS": "8",
    "TRIMTAB_TUNER__SETTLE_S": "2",
    "TRIMTAB_TUNER__SEARCH_EVERY_S": "2",
    "TRIMTAB_TUNER__HORIZON_S": "20",
    "TRIMTAB_TUNER__TRIALS": "6",
    "TRIMTAB_TUNER__REPLICAS": "2",
    "TRIMTAB_TUNER__FINALISTS": "1",
}
"""Of the tuner: small searches, often."""
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
LONG_PROMPT = "the quick brown fox jumps over the lazy dog and runs far away " * 60
LAST_TO_COME = (
    "trimtab_tuner_prediction_error_ratio",
    "trimtab_tuner_model_error_ratio",
    "trimtab_tuner_search_seconds_count > 1",
    "rate(trimtab_kv_transfer_seconds_count[15s]) > 0",
    "rate(trimtab_tpot_seconds_count[15s]) > 0",
    "model_class:trimtab_attainment:ratio_rate5m",
    "model:trimtab_kv_transfers_failed:ratio_rate5m",
)
PATIENCE_S = 150.0
ALLOWED_ALERTS = {"TrimtabAttainmentBelowTarget", "TrimtabKvExhausted"}
"""What a small machine under load may say; everything else would be a lie."""


@pytest.mark.timeout(500)
def test_every_query_of_every_board_and_rule_is_answered_and_every_panel_has_data(tmp_path: Path) -> None:
    with _stack(tmp_path) as stack, _watching(tmp_path, stack) as prometheus:
        _use_it(stack)
        for expr in LAST_TO_COME:
            wait_until(lambda expr=expr: prometheus.has_data(expr), f"{expr} has data", PATIENCE_S)
        assert _empty_panels(prometheus) == []
        assert _empty_variables_and_marks(prometheus) == []
        assert _rules_at_fault(prometheus) == []
        assert _traces(prometheus) == {TRACE_ID}


@contextlib.contextmanager
def _stack(folder: Path) -> Iterator[RunningStack]:
    """A `trimtab up` with a load, whose tuner is in a hurry."""
    # On a fresh checkout the twin is compiled first, which may take longer than everything else here.
    subprocess.run([sys.executable, "-c", "from tuner.twin.fast import warm_up; warm_up()"], check=True)
    environment = {**environment_of(folder), **QUICKLY}
    output = folder / "up.out"
    command = [sys.executable, "-m", "controller.cli", "up", "--engines", "2", "--port", "0", "--admin-port", "0"]
    with output.open("w") as out:
        process = subprocess.Popen([*command, "--load", "mixed"], env=environment, stdout=out, stderr=out, text=True)
    try:
        yield until_announced(process, folder / "trimtab", output)
    except BaseException as error:
        error.add_note(_last_said(folder))
        raise
    finally:
        end_hard(process)


def _last_said(folder: Path) -> str:
    logs = folder.glob("trimtab-up-*/*.log")
    return "\n".join(f"{log.name}:\n{log.read_text()[-2000:]}" for log in sorted(logs))


@contextlib.contextmanager
def _watching(folder: Path, stack: RunningStack) -> Iterator[Prometheus]:
    with _admin(stack) as admin:
        engines = [engine["info"]["url"] for engine in admin.get("/engines").json()["engines"]]
    targets = {"router": [stack.url], "engine": engines, "controller": [stack.admin_url]}
    addresses = {what: [urlsplit(url).netloc for url in urls] for what, urls in targets.items()}
    with running_prometheus(folder, free_port(), addresses, stack.model) as prometheus:
        wait_until(lambda: prometheus.healthy_targets() == len(engines) + 2, "all targets are scraped")
        yield prometheus


def _use_it(stack: RunningStack) -> None:
    """A promise, a plan that moves KV, and a request that belongs to a trace."""
    with _admin(stack) as admin:
        admin.put("/slo/chat", json={"ttft_ms": 1500, "tpot_ms": 80}).raise_for_status()
        roles = {"e0": "prefill", "e1": "decode"}
        plan = {"pattern": "balanced", "knobs": {"offload_ratio": 0.2}, "roles": roles, "reason": "to see transfers"}
        admin.put("/plan", json=plan).raise_for_status()
    body = {"model": stack.model, "prompt": LONG_PROMPT, "max_tokens": 4, "stream": True}
    headers = {"traceparent": f"00-{TRACE_ID}-00f067aa0ba902b7-01", "x-slo-class": "chat"}
    httpx.post(f"{stack.url}/v1/completions", json=body, headers=headers, timeout=60).raise_for_status()


def _admin(stack: RunningStack) -> httpx.Client:
    headers = {"authorization": f"Bearer {stack.admin_token}"}
    return httpx.Client(base_url=f"{stack.admin_url}/v1", headers=headers, timeout=30)


def _empty_panels(prometheus: Prometheus) -> Sequence[str]:
    """Panels without data that should have some; every query is made in any case."""
    empty = []
    for file in BOARD_FILES:
        for panel in panels(json.loads(file.read_text())):
            found = [prometheus.has_data(filled_in(target["expr"])) for target in panel["targets"]]
            if not any(found) and EMPTY_UNLESS not in panel["description"]:
                empty.append(f"{file.stem}: {panel['title']}")
    return empty


def _empty_variables_and_marks(prometheus: Prometheus) -> Sequence[str]:
    board = json.loads(BOARD_FILES[0].read_text())
    empty = []
    for variable in (each for each in board["templating"]["list"] if each["type"] == "query"):
        (asked,) = re.findall(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
        labels = {series["metric"].get(asked[1]) for series in prometheus.series(filled_in(asked[0]))}
        empty += [variable["name"]] if not labels - {None} else []
    marks = {mark["name"]: prometheus.series(filled_in(mark["expr"])) for mark in board["annotations"]["list"]}
    return empty + (["Plan changes"] if not marks["Plan changes"] else [])


def _rules_at_fault(prometheus: Prometheus) -> Sequence[str]:
    """Rules that failed, recorded nothing, or fire on a stack that is well."""
    rules = [rule for group in prometheus.get("/rules")["groups"] for rule in group["rules"]]
    failed = [f"{rule['name']}: {rule['lastError']}" for rule in rules if rule["health"] != "ok"]
    nothing = [rule["name"] for rule in rules if rule["type"] == "recording" and not prometheus.has_data(rule["name"])]
    firing = {
        alert["labels"]["alertname"] for alert in prometheus.get("/alerts")["alerts"] if alert["state"] == "firing"
    }
    return failed + nothing + sorted(firing - ALLOWED_ALERTS)


def _traces(prometheus: Prometheus) -> set[str]:
    began_s = prometheus.began_s
    found = prometheus.get("/query_exemplars", query="trimtab_ttft_seconds_bucket", start=began_s, end=began_s + 3600)
    return {exemplar["labels"]["trace_id"] for series in found for exemplar in series["exemplars"]}
