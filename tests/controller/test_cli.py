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
from controller.cli.admin import find_target, who
from controller.cli.errors import CliError
from controller.cli.plan import wait_until_applied
from controller.cli.tuner import ModeName
from controller.decisions import DecisionRecord
from controller.heartbeats import RouterBeat
from controller.stack.embedded import EmbeddedRedis
from controller.stack.running import RunningStack, announced, runtime_dir
from controller.store import Keys
from tuner.plan import Knobs
from tuner.twin.types import Cause, Forecast
from tuner.types import Candidate, Mode, Prediction, Reason, SearchResult

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
    command = [sys.executable, "-m", "controller.cli", "controller", "--model", MODEL, "--port", "0", "--no-tune"]
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


def decide(redis_url: str, **given: object) -> None:
    """Write down a decision as a leader would."""
    said = {"at_s": 1.7e9, "controller_id": "c", "mode": Mode.AUTO, "plan_version": 1, "tick_s": 1.0}
    record = DecisionRecord.model_validate(said | given)
    with Redis.from_url(redis_url) as client:
        client.xadd(Keys(MODEL).decisions, {"value": record.model_dump_json()})


def searched() -> SearchResult:
    candidate = Candidate("balanced", Knobs(offload_ratio=0.1), 1, 2, 0)
    forecast = Forecast(10.0, 9.0, 9.0, 0.0, {}, {}, {Cause.QUEUE: 3})
    prediction = Prediction(candidate, forecast, 9.0, 10.0, 0.01, 9.0, 2.0, 0.1)
    return SearchResult([prediction], prediction, prediction, trials=42, seconds=1.0)


@pytest.mark.usefixtures("redis_url")
class TestTuner:
    @pytest.mark.parametrize("mode", list(ModeName))
    def test_a_mode_that_was_set_is_shown_with_who_and_why(self, operator: Trimtab, mode: ModeName) -> None:
        code, out, _ = operator("mode", mode.value, "--reason", "to see")
        assert code == 0
        assert out.startswith(f"{mode.value}, set by {who()} at ")
        assert out.rstrip().endswith(": to see")
        assert operator("mode")[1] == out
        assert json.loads(operator("mode", "--json")[1])["mode"] == mode.value

    def test_the_modes_of_the_command_are_those_of_the_tuner(self) -> None:
        assert {mode.value for mode in ModeName} == {mode.value for mode in Mode}

    def test_a_plan_is_pinned_and_unpinned(self, operator: Trimtab) -> None:
        operator("mode", "auto")
        code, _, err = operator("plan", "set", "disaggregated")
        assert code == 0
        assert "pin it to keep it" in err
        code, out, err = operator("plan", "pin", "--reason", "load test")
        assert (code, err) == (0, "")
        assert "mode is manual until `trimtab plan unpin`" in out
        assert "load test" in operator("mode")[1]
        assert operator("plan", "set", "disaggregated")[2] == ""
        version = int(str(shown(operator, "plan")["version"]))
        assert operator("plan", "pin", str(version - 1))[0] == 0
        assert shown(operator, "plan")["version"] == version + 1
        assert "mode is auto" in operator("plan", "unpin")[1]

    def test_decisions_are_printed_with_the_newest_last(self, operator: Trimtab, redis_url: str) -> None:
        assert "nothing yet" in operator("decisions")[1]
        decide(redis_url, reason=Reason.BETTER_PLAN, sentence="balanced is better", published_version=2)
        decide(redis_url, reason=Reason.DRIFT, sentence="rate moved", refused="somebody has put plan 3 in force")
        first, second = operator("decisions")[1].splitlines()
        assert "better_plan" in first
        assert first.endswith("balanced is better → plan 2")
        assert second.endswith("rate moved (not put in force: somebody has put plan 3 in force)")
        assert [each["reason"] for each in json.loads(operator("decisions", "-n", "1", "--json")[1])] == ["drift"]

    def test_an_explanation_is_sentences_and_a_table_of_candidates(self, operator: Trimtab, redis_url: str) -> None:
        operator("plan", "set", "balanced", "--offload-ratio", "0.1")
        decide(redis_url, reason=Reason.STEADY, sentence="it is the best", search=searched())
        code, out, _ = operator("explain")
        assert code == 0
        assert "Its last word was steady: it is the best." in out
        assert "Of 42 plans tried" in out
        assert "1 / 2 / 0" in out
        assert json.loads(operator("explain", "--json")[1])["last"]["reason"] == "steady"

    def test_what_if_draws_a_table_and_a_bar_for_each_plan(
        self, trimtab: Trimtab, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[dict[str, object]] = []

        class Admin:
            def __enter__(self) -> "Admin":
                return self

            def __exit__(self, *_: object) -> None:
                pass

            def get(self, path: str) -> dict[str, object]:
                assert path == "/v1/slo"
                return {"classes": {"default": {"ttft_ms": 2000, "tpot_ms": 100, "attainment": 0.9, "weight": 1}}}

            def post(self, path: str, body: dict[str, object], timeout_s: float) -> dict[str, object]:
                asked.append(body)
                return PREDICTED

        monkeypatch.setattr("controller.cli.tuner.admin_api", lambda *_: Admin())
        code, out, _ = trimtab(
            "what-if", "--offload-ratio", "0.1", "--prefill-engines", "1", "--knob", "min_remote_tokens=512",
            "--slo", "default:ttft_ms=500", "--role", "e0=prefill",
        )  # fmt: skip
        assert code == 0
        assert asked == [
            {
                "pattern": None,
                "prefill_engines": 1,
                "roles": {"e0": "prefill"},
                "knobs": {"min_remote_tokens": "512"},
                "offload_ratios": [0.1],
                "slos": {"default": {"ttft_ms": "500", "tpot_ms": 100, "attainment": 0.9, "weight": 1}},
            }
        ]
        assert "7.00 of 10.00" in out
        assert "default 70%" in out
        bars = [line.count("█") for line in out.splitlines() if "█" in line]
        assert len(bars) == 2
        assert bars[1] == 2 * bars[0]

    @pytest.mark.parametrize(
        ("arguments", "code", "says"),
        [
            (("mode", "fast"), 2, "advisory"),
            (("plan", "pin", "9999"), 1, "no plan of version 9999"),
            (("what-if",), 1, "does not tune"),
            (("what-if", "--knob", "fast"), 1, "NAME=VALUE"),
            (("what-if", "--slo", "ttft_ms=5"), 1, "CLASS:NAME=VALUE"),
            (("what-if", "--role", "e0"), 1, "ENGINE=ROLE"),
            (("what-if", "--offload-ratio", "2"), 2, "--offload-ratio"),
        ],
    )
    def test_mistakes_end_in_a_sentence_and_a_code(
        self, operator: Trimtab, arguments: tuple[str, ...], code: int, says: str
    ) -> None:
        found, _, err = operator(*arguments)
        assert found == code
        assert says in err
        assert "Traceback" not in err


def predicted(label: str, goodput_rps: float) -> dict[str, object]:
    seen = {"requests": 10, "attainment": goodput_rps / 10, "ttft_s": [0.1, 0.2, 0.3], "tpot_s": None}
    forecast = {
        "offered_rps": 10.0,
        "goodput_rps": goodput_rps,
        "classes": {"default": seen, "idle": {"requests": 0, "attainment": None, "ttft_s": None, "tpot_s": None}},
        "causes": {"queue": 3},
    }
    return {"label": label, "plan": {"pattern": "balanced"}, "forecast": forecast}


PREDICTED = {
    "traffic": {
        "requests": 10, "span_s": 30.0, "rate_rps": 10.0, "mean_prompt_tokens": 600.0, "mean_output_tokens": 60.0
    },
    "engines": 3,
    "in_force": predicted("in force", 3.5),
    "variants": [predicted("offload ratio 0.1", 7.0)],
}  # fmt: skip


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
