"""The command line, run in this process against a real admin API in a process of its own."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from redis import Redis

from controller.cli import main
from controller.cli.admin import find_target
from controller.cli.errors import CliError
from controller.cli.plan import wait_until_applied
from controller.heartbeats import RouterBeat
from controller.stack.embedded import EmbeddedRedis
from controller.stack.running import RunningStack, announced, runtime_dir
from controller.store import Keys

MODEL = "cli-model"
TOKEN = "operator-token"
START_S = 30.0

Trimtab = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No stack of this user, and no setting of theirs, reaches a test."""
    for name in [name for name in os.environ if name.startswith("TRIMTAB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def trimtab(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Trimtab:
    """Run a command; its exit code, stdout and stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["trimtab", *arguments])
        capsys.readouterr()
        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture(scope="module")
def admin_url(redis_server: EmbeddedRedis, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A controller process; tests share what they put in force."""
    with Redis.from_url(redis_server.url) as client:
        client.flushall()
    ready = tmp_path_factory.mktemp("admin") / "ready"
    command = [sys.executable, "-m", "controller.cli", "controller", "--model", MODEL, "--port", "0"]
    process = subprocess.Popen(
        [*command, "--redis-url", redis_server.url, "--ready-file", str(ready)],
        env={**os.environ, "TRIMTAB_ADMIN_TOKEN": TOKEN},
    )
    try:
        yield _url_when_ready(process, ready)
    finally:
        process.terminate()
        code = process.wait(timeout=20)
    assert code == 0


def _url_when_ready(process: subprocess.Popen[bytes], ready: Path) -> str:
    give_up_s = time.monotonic() + START_S
    while not ready.exists():
        if process.poll() is not None or time.monotonic() > give_up_s:
            pytest.fail("the controller did not start")
        time.sleep(0.05)
    return str(json.loads(ready.read_text())["url"])


@pytest.fixture
def operator(trimtab: Trimtab, admin_url: str, monkeypatch: pytest.MonkeyPatch) -> Trimtab:
    """Commands of somebody who has set address and token."""
    monkeypatch.setenv("TRIMTAB_ADMIN_URL", admin_url)
    monkeypatch.setenv("TRIMTAB_ADMIN_TOKEN", TOKEN)
    return trimtab


@pytest.fixture
def router_at(redis_server: EmbeddedRedis) -> Iterator[Callable[[int], None]]:
    """Lets a router say that it has applied a version."""
    key = Keys(MODEL).router("router-1")

    def say(version: int) -> None:
        beat = RouterBeat(router_id="router-1", url="http://127.0.0.1:1", plan_version=version)
        with Redis.from_url(redis_server.url) as client:
            client.set(key, msgspec.json.encode(beat), ex=60)

    yield say
    with Redis.from_url(redis_server.url) as client:
        client.delete(key)


@pytest.fixture
def stack() -> RunningStack:
    return RunningStack(
        pid=os.getpid(),
        model=MODEL,
        url="http://127.0.0.1:1",
        admin_url="http://127.0.0.1:2",
        admin_token="stack-token",
        redis_url="redis://127.0.0.1:3/0",
        log_dir="/nowhere",
    )


def shown(operator: Trimtab, what: str) -> dict[str, object]:
    code, out, _ = operator(what, "show", "--json")
    assert code == 0
    document = json.loads(out)
    assert isinstance(document, dict)
    return document


class TestPlan:
    def test_set_puts_a_plan_in_force_that_show_shows(self, operator: Trimtab) -> None:
        code, out, _ = operator("plan", "set", "balanced", "--offload-ratio", "0.1", "--reason", "try it")
        plan = shown(operator, "plan")
        assert code == 0
        assert f"version {plan['version']} is in force; no router is alive" in out
        assert (plan["pattern"], plan["reason"]) == ("balanced", "try it")
        assert "balanced" in operator("plan", "show")[1]

    def test_set_starts_from_defaults_unless_told_to_keep(self, operator: Trimtab) -> None:
        operator("plan", "set", "balanced", "--offload-ratio", "0.3", "--max-attempts", "5", "--role", "e0=decode")
        operator("plan", "set", "balanced", "--keep", "--offload-ratio", "0.2")
        kept = shown(operator, "plan")
        assert kept["knobs"]["max_attempts"] == 5  # type: ignore[index]
        assert kept["knobs"]["offload_ratio"] == 0.2  # type: ignore[index]
        assert kept["roles"] == {"e0": "decode"}
        operator("plan", "set", "data_parallel", "--keep")
        assert shown(operator, "plan")["knobs"]["max_attempts"] == 5  # type: ignore[index]
        operator("plan", "set", "data_parallel")
        fresh = shown(operator, "plan")
        assert fresh["knobs"]["max_attempts"] == 3  # type: ignore[index]
        assert fresh["roles"] == {}

    def test_set_says_how_many_routers_have_applied_it(
        self, operator: Trimtab, router_at: Callable[[int], None]
    ) -> None:
        version = int(str(shown(operator, "plan")["version"])) + 1
        router_at(version)
        code, out, _ = operator("plan", "set", "disaggregated")
        assert (code, out.strip()) == (0, f"version {version} applied by 1 of 1 routers")

    def test_set_fails_and_names_the_router_that_lags(
        self, operator: Trimtab, router_at: Callable[[int], None]
    ) -> None:
        router_at(0)
        code, _, err = operator("plan", "set", "disaggregated", "--wait-s", "0.3")
        assert code == 1
        assert "applied by 0 of 1 routers" in err
        assert "router-1" in err

    def test_rollback_puts_an_earlier_plan_in_force_again(self, operator: Trimtab) -> None:
        operator("plan", "set", "balanced", "--offload-ratio", "0.25")
        old = shown(operator, "plan")
        operator("plan", "set", "data_parallel")
        assert operator("plan", "rollback", str(old["version"]))[0] == 0
        now = shown(operator, "plan")
        assert (now["pattern"], now["knobs"]) == (old["pattern"], old["knobs"])
        code, out, _ = operator("plan", "history", "--json", "--count", "3")
        assert code == 0
        assert json.loads(out)[0]["version"] == now["version"]

    @pytest.mark.parametrize(
        ("arguments", "code", "says"),
        [
            (("plan", "set", "magic"), 1, "there is no pattern 'magic'; known are: balanced"),
            (("plan", "set", "balanced"), 1, "0 < offload_ratio < 1"),
            (("plan", "set", "balanced", "--offload-ratio", "1.5"), 1, "knobs.offload_ratio"),
            (("plan", "set", "data_parallel", "--role", "e0"), 1, "ENGINE=ROLE"),
            (("plan", "set", "data_parallel", "--role", "e0=chef"), 1, "roles.e0"),
            (("plan", "set", "data_parallel", "--policy", "random"), 2, "--policy"),
            (("plan", "rollback", "9999"), 1, "no plan of version 9999"),
            (("slo", "set", "chat", "--ttft-ms", "-5"), 1, "ttft_ms"),
            (("slo", "remove", "nothing"), 1, "no class 'nothing'"),
        ],
    )
    def test_mistakes_end_in_a_sentence_and_a_code(
        self, operator: Trimtab, arguments: tuple[str, ...], code: int, says: str
    ) -> None:
        found, _, err = operator(*arguments)
        assert found == code
        assert says in err
        assert "Traceback" not in err

    def test_a_role_for_an_engine_that_is_not_there_is_a_warning(self, operator: Trimtab) -> None:
        code, _, err = operator("plan", "set", "data_parallel", "--role", "ghost=decode")
        assert code == 0
        assert "warning: engine 'ghost'" in err

    def test_waiting_ends_as_soon_as_all_routers_are_there(self) -> None:
        answers = iter([[{"plan_version": 1}], [{"plan_version": 2}]])
        assert wait_until_applied(lambda: next(answers), 2, wait_s=60) == [{"plan_version": 2}]


class TestSlo:
    def test_set_adds_a_class_from_default_and_then_changes_only_what_is_given(self, operator: Trimtab) -> None:
        operator("slo", "set", "chat", "--ttft-ms", "300")
        operator("slo", "set", "chat", "--tpot-ms", "40")
        chat = shown(operator, "slo")["classes"]["chat"]  # type: ignore[index]
        assert (chat["ttft_ms"], chat["tpot_ms"], chat["attainment"]) == (300, 40, 0.9)
        assert "chat" in operator("slo", "show")[1]
        assert operator("slo", "remove", "chat")[0] == 0
        assert "chat" not in shown(operator, "slo")["classes"]  # type: ignore[operator]


class TestFindingTheApi:
    def test_nothing_there_says_what_to_do(self, trimtab: Trimtab, free_port: Callable[[], int]) -> None:
        code, _, err = trimtab("plan", "show", "--admin-url", f"http://127.0.0.1:{free_port()}")
        assert code == 1
        assert "trimtab up" in err
        assert "--admin-url" in err

    def test_a_wrong_token_says_how_to_give_one(self, trimtab: Trimtab, admin_url: str) -> None:
        code, _, err = trimtab("plan", "show", "--admin-url", admin_url, "--admin-token", "wrong")
        assert code == 1
        assert "TRIMTAB_ADMIN_TOKEN" in err

    def test_a_running_stack_is_found_with_its_token(self, stack: RunningStack) -> None:
        with announced(stack, runtime_dir()):
            assert find_target(None, None).url == "http://127.0.0.1:2"
            assert find_target(None, None).token == "stack-token"

    def test_a_stacks_token_goes_to_no_other_address(self, stack: RunningStack) -> None:
        with announced(stack, runtime_dir()):
            assert find_target("http://127.0.0.1:9", None).token is None
            assert find_target("http://127.0.0.1:2/", None).token == "stack-token"

    def test_of_several_stacks_the_operator_must_choose(self, stack: RunningStack) -> None:
        other = msgspec.structs.replace(stack, pid=1, admin_url="http://127.0.0.1:4")
        with (
            announced(stack, runtime_dir()),
            announced(other, runtime_dir()),
            pytest.raises(CliError, match="--admin-url"),
        ):
            find_target(None, None)


class TestTop:
    def test_once_prints_a_view_and_leaves(self, trimtab: Trimtab, redis_server: EmbeddedRedis) -> None:
        code, out, _ = trimtab("top", "--once", "--redis-url", redis_server.url, "--model", "nobody")
        assert code == 0
        assert "No router of model 'nobody' is alive" in out

    def test_without_a_stack_it_says_what_to_give(self, trimtab: Trimtab) -> None:
        code, _, err = trimtab("top", "--once")
        assert code == 1
        assert "--redis-url" in err

    def test_without_redis_it_says_so(self, trimtab: Trimtab, free_port: Callable[[], int]) -> None:
        code, _, err = trimtab("top", "--once", "--redis-url", f"redis://127.0.0.1:{free_port()}/0", "--model", "m")
        assert code == 1
        assert "cannot read redis://" in err


class TestStarting:
    def test_bad_settings_are_a_sentence(self, trimtab: Trimtab) -> None:
        code, _, err = trimtab("router", "--model", "m")
        assert code == 1
        assert "--engine URL" in err

    def test_a_taken_admin_port_is_a_sentence(self, trimtab: Trimtab, admin_url: str) -> None:
        port = admin_url.rsplit(":", 1)[1]
        code, _, err = trimtab("controller", "--model", "m", "--port", port)
        assert code == 1
        assert f"127.0.0.1:{port}" in err

    def test_help_and_the_router_command_import_no_web_framework(self) -> None:
        script = (
            "import sys; from controller.cli.root import app; import controller.cli.serve;"
            "sys.exit(' '.join({'fastapi', 'uvicorn', 'httpx', 'numpy', 'redis'} & set(sys.modules)) or 0)"
        )
        assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0

    def test_version_is_the_installed_one(self, trimtab: Trimtab) -> None:
        code, out, _ = trimtab("version")
        assert (code, out.strip()) == (0, "0.1.0")
