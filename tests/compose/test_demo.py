"""`docker compose up` as an operator sees it: the real Dockerfile and compose file, in containers."""

import os
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from controller.stack.embedded import free_port
from tests.compose.conftest import ENABLED
from tests.compose.demo import Demo, running_demo, wait_until
from tests.compose.machine import Machine, missing_tools

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    assert not missing_tools(), f"install {missing_tools()}: make system-compose"
    machine = Machine.prepared(Path(os.environ[ENABLED]).absolute())
    with running_demo(machine, tmp_path_factory.mktemp("compose"), free_port) as demo:
        yield demo
    assert demo.leftovers() == []


def test_a_chat_with_the_key_is_answered_and_one_without_is_not(demo: Demo) -> None:
    assert demo.chat() == 200
    with demo.router as router:
        assert router.get("/v1/models", headers={"authorization": "Bearer no"}).status_code == 401


def test_prometheus_scrapes_every_part_and_knows_goodput(demo: Demo) -> None:
    assert demo.query("up") == [1.0] * 4
    wait_until(
        lambda: sum(demo.query("model:trimtab_good_requests:rate5m")) > 0,
        lambda: f"the demo's load brings goodput; it says:\n{demo.logs('demo-load')}",
    )


def test_a_promise_changed_by_the_admin_api_reaches_the_router_and_outlives_redis(demo: Demo) -> None:
    bound = 'trimtab_slo_ttft_bound_seconds{slo_class="chat"}'
    with demo.admin as admin:
        promise = {"ttft_ms": 1234, "tpot_ms": 60, "attainment": 0.9}
        assert admin.put("/v1/slo/chat", json=promise).status_code == 200
        wait_until(lambda: demo.query(bound) == [1.234], lambda: "the router has the new bound")
        demo.compose("restart", "redis")
        demo.until_healthy(["redis", "controller", "router"])
        assert admin.get("/v1/slo").json()["classes"]["chat"]["ttft_ms"] == 1234


@pytest.mark.parametrize("service", ["demo-engine-0", "controller"])
def test_service_goes_on_while_a_part_restarts(demo: Demo, service: str) -> None:
    with chatting(demo) as answers:
        demo.compose("restart", service)
        demo.until_healthy([service, "router"])
    assert set(answers) == {200}
    assert answers[200] > 3


@pytest.mark.parametrize("service", ["redis", "controller", "router", "demo-engine-0", "demo-load", "prometheus"])
def test_no_part_is_root_or_writes_where_it_should_not(demo: Demo, service: str) -> None:
    assert demo.inside(service, "id", "-u").stdout.strip() != "0"
    assert "Read-only file system" in demo.inside(service, "touch", "/usr/new").stderr
    assert demo.inside(service, "sh", "-c", "touch $(mktemp)").returncode == 0


class chatting:  # noqa: N801 — used as a word in a sentence
    """Chats one after the other while the block runs; how many ended with which status."""

    def __init__(self, demo: Demo) -> None:
        self._demo = demo
        self._over = threading.Event()
        self._answers: Counter[int] = Counter()
        self._thread = threading.Thread(target=self._chat)

    def __enter__(self) -> Counter[int]:
        self._thread.start()
        return self._answers

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _chat(self) -> None:
        while not self._over.wait(0.2):
            self._answers[self._demo.chat()] += 1
