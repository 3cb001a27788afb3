"""The Dockerfile beside the code, docker-compose.yml and the locks."""

import json
import re
import tomllib

import pytest

from tests.compose.compose_file import CHECKOUT, DEFAULTS, OURS, SERVICES, command_of, engines, parsed

DOCKERFILE = (CHECKOUT / "Dockerfile").read_text().replace("\\\n", " ")
STAGES = {
    name: (base, body)
    for base, name, body in re.findall(r"^FROM (\S+) AS (\S+)\n((?:(?!FROM ).*\n?)*)", DOCKERFILE, re.M)
}
TARGETS = [name for name in STAGES if name != "wheel"]
each_target = pytest.mark.parametrize("target", TARGETS)


def test_compose_builds_every_target_and_no_other() -> None:
    assert {SERVICES[service]["build"]["target"] for service in OURS} == set(TARGETS)
    assert all(SERVICES[service]["build"]["context"] == "." for service in OURS)
    # A build that names none gets the last.
    assert list(STAGES)[-1] == "trimtab"


def test_base_images_are_arguments_with_the_defaults_of_the_compose_file() -> None:
    arguments = dict(re.findall(r"^ARG (\w+_IMAGE)=(\S+)$", DOCKERFILE, re.M))
    assert arguments == {name: DEFAULTS[name] for name in arguments}
    assert {base for base, _ in STAGES.values()} == {f"${{{name}}}" for name in arguments}
    for service in OURS:
        build = SERVICES[service]["build"]
        base, body = STAGES[build["target"]]
        assert {base.strip("${}"), "PYTHON_IMAGE"} <= set(build["args"])
        for name, value in build["args"].items():
            assert value == f"${{{name}:-{DEFAULTS[name]}}}"
            assert name in arguments or f"ARG {name}=" in body


@each_target
def test_an_image_runs_the_command_line_as_nobody_in_particular(target: str) -> None:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    _, body = STAGES[target]
    (entry,) = re.findall(r"^ENTRYPOINT (.*)$", body, re.M)
    assert json.loads(entry)[0] in project["scripts"]
    assert int(re.findall(r"^USER (\d+)", body, re.M)[-1]) > 0
    (words,) = re.findall(r"^CMD (.*)$", body, re.M)
    assert json.loads(words)[-1] == "--help"


def test_all_that_is_copied_is_there_and_in_the_context() -> None:
    copied = [source for line in re.findall(r"^COPY (.*)$", DOCKERFILE, re.M) for source in line.split()[:-1]]
    context = re.findall(r"^!(.*)$", (CHECKOUT / ".dockerignore").read_text(), re.M)
    assert set(copied) == set(context)
    assert all((CHECKOUT / source).exists() for source in copied)


def test_what_the_plugin_adds_to_sglangs_image_is_in_the_lock() -> None:
    (names,) = re.findall(r'^ARG PLUGIN_NEEDS="(.*)"$', DOCKERFILE, re.M)
    lock = (CHECKOUT / "requirements" / "sglang-cpu.lock").read_text()
    assert names.split()
    assert [name for name in names.split() if not re.search(rf"^{name}==", lock, re.M | re.I)] == []


def test_the_cuda_image_is_of_the_version_that_the_plugin_is_tested_with() -> None:
    lock = (CHECKOUT / "requirements" / "sglang-cpu.lock").read_text()
    (version,) = re.findall(r"^sglang==(\S+)$", lock, re.M)
    assert DEFAULTS["SGLANG_IMAGE"].endswith(f":v{version}")


def test_cpu_engines_serve_the_model_that_is_in_their_image() -> None:
    (folder,) = re.findall(r"engines\.sglang\.model_folder (\S+)", STAGES["sglang-cpu"][1])
    assert {parsed(command_of(service))["model"] for service in engines("cpu").values()} == {folder}


def test_volumes_lie_where_the_image_lets_its_user_write() -> None:
    for service in OURS:
        for mount in SERVICES[service].get("volumes", ()):
            assert re.search(
                rf"(install|useradd) .*{mount.split(':')[1]}", STAGES[SERVICES[service]["build"]["target"]][1]
            )
