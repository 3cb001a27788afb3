"""The command lines of a stack."""

import os
from dataclasses import replace
from pathlib import Path

from controller.stack.parts import Parts, StackOptions
from engines.observability import Observability

REDIS = "redis://:redis-secret@127.0.0.1:6379/0"
SECRETS = ("client-secret", "admin-secret", "redis-secret")
OPTIONS = StackOptions(
    engines=2,
    profile="laptop",
    port=0,
    admin_port=0,
    api_key="client-secret",
    admin_token="admin-secret",
    redis_url=REDIS,
)
PARTS = Parts(OPTIONS, "m", "admin-secret", REDIS)


def test_no_secret_is_an_argument() -> None:
    specs = [*PARTS.engines(), PARTS.controller(), PARTS.router(), PARTS.load("chat", "http://127.0.0.1:1")]
    arguments = [part for spec in specs for part in spec.arguments(0, Path("ready"))]
    assert not [part for part in arguments if any(secret in part for secret in SECRETS)]


def test_each_part_is_given_the_secrets_it_needs_and_no_others() -> None:
    assert [dict(spec.env) for spec in PARTS.engines()] == [{"TRIMTAB_ENGINE_REDIS_URL": REDIS}] * 2
    assert PARTS.controller().env == {"TRIMTAB_REDIS_URL": REDIS, "TRIMTAB_ADMIN_TOKEN": "admin-secret"}
    assert PARTS.router().env == {"TRIMTAB_REDIS_URL": REDIS, "TRIMTAB_API_KEY": "client-secret"}
    assert PARTS.load("chat", "http://127.0.0.1:1").env == {"TRIMTAB_API_KEY": "client-secret"}


def test_logs_and_traces_are_set_for_every_part_and_by_default_for_none() -> None:
    given = Observability(traces_url="http://127.0.0.1:4318", log_level="warning")
    for folder, prefix in ((None, "TRIMTAB_ENGINE_"), (Path("model"), "TRIMTAB_SGLANG_")):
        parts = Parts(replace(OPTIONS, observability=given, model_folder=folder), "m", "admin-secret", REDIS)
        told = {"TRACES_URL": "http://127.0.0.1:4318/v1/traces", "LOG_LEVEL": "warning"}
        for spec in parts.engines():
            assert spec.env.items() >= {f"{prefix}{name}": value for name, value in told.items()}.items()
        for spec in (parts.router(), parts.controller()):
            assert spec.env.items() >= {f"TRIMTAB_{name}": value for name, value in told.items()}.items()


def test_secrets_are_not_shown_with_the_options() -> None:
    assert not [secret for secret in SECRETS if secret in repr(OPTIONS) + repr(PARTS)]


def test_sglang_engines_have_a_core_each_and_the_router_their_tokenizer(tmp_path: Path) -> None:
    parts = Parts(replace(OPTIONS, model_folder=tmp_path), "small", "admin-secret", REDIS)
    commands = [list(spec.arguments(0, Path("ready"))) for spec in parts.engines()]
    cores = [command[command.index("--cores") + 1] for command in commands]
    assert len(set(cores)) == min(2, len(os.sched_getaffinity(0)))
    assert all(command[command.index("--served-model-name") + 1] == "small" for command in commands)
    assert [dict(spec.env) for spec in parts.engines()] == [{"TRIMTAB_SGLANG_REDIS_URL": REDIS}] * 2
    router = list(parts.router().arguments(0, Path("ready")))
    assert router[router.index("--tokenizer") + 1] == str(tmp_path)
