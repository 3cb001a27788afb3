"""docker-compose.yml and .env.example beside the code: names, addresses, paths, commands, limits."""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from pydantic_settings import BaseSettings

from controller.settings import AdminSettings, RouterSettings, load
from engines.emulated.settings import EmulatedSettings, load_settings
from engines.observability import TRACES_PATH
from engines.sglang.settings import SglangSettings
from tests.compose.compose_file import (
    CHECKOUT,
    DEFAULTS,
    DOCUMENT,
    EXAMPLE,
    MODEL,
    OURS,
    SECRETS,
    SERVICES,
    TEXT,
    command_of,
    engines,
    environment_of,
    interpolated,
    parsed,
)

PROFILES = ("demo", "cpu", "gpu")
SETTINGS: Mapping[str, type[BaseSettings]] = {
    "router": RouterSettings,
    "controller": AdminSettings,
    "demo-engine-0": EmulatedSettings,
    "demo-engine-1": EmulatedSettings,
    "cpu-engine-0": SglangSettings,
    "cpu-engine-1": SglangSettings,
    "gpu-engine-0": SglangSettings,
    "gpu-engine-1": SglangSettings,
}
OF_OTHERS = {"NUMBA_CACHE_DIR", "CUDA_VISIBLE_DEVICES", "HF_TOKEN"}
"""Variables that libraries read."""
PUBLISHED = {
    "router": ("API_BIND", "ROUTER_PORT"),
    "controller": ("ADMIN_BIND", "ADMIN_PORT"),
    "prometheus": ("BOARDS_BIND", "PROMETHEUS_PORT"),
    "grafana": ("BOARDS_BIND", "GRAFANA_PORT"),
    "jaeger": ("BOARDS_BIND", "TRACES_PORT"),
}
GRAFANA = CHECKOUT / "dashboards" / "grafana"
PROMETHEUS = CHECKOUT / "dashboards" / "prometheus"


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], Any]:
    """The settings that a service's flags and environment amount to."""
    monkeypatch.chdir(tmp_path)

    def settings(service: str) -> Any:
        for name in [name for name in os.environ if name.startswith("TRIMTAB_")]:
            monkeypatch.delenv(name)
        for name, value in environment_of(service).items():
            monkeypatch.setenv(name, value)
        given = parsed(command_of(service))
        given.pop("more")
        if SETTINGS[service] is EmulatedSettings:
            return load_settings(**given)
        if SETTINGS[service] is AdminSettings:
            given |= {"admin_host": given.pop("host"), "admin_port": given.pop("port")}
        return load(SETTINGS[service], **given)

    return settings


@pytest.mark.parametrize("service", SETTINGS)
def test_every_environment_variable_is_a_setting_of_that_process(service: str) -> None:
    kind = SETTINGS[service]
    prefix = kind.model_config["env_prefix"]
    for name in environment_of(service).keys() - OF_OTHERS:
        assert name.startswith(prefix)
        assert name.removeprefix(prefix).lower() in kind.model_fields


def test_every_process_of_ours_is_looked_at() -> None:
    assert set(OURS) == {*SETTINGS, "demo-load"}


@pytest.mark.parametrize("profile", PROFILES)
def test_each_profile_has_two_engines_that_go_by_the_same_names(profile: str) -> None:
    assert list(engines(profile)) == ["engine-0", "engine-1"]
    commands = [parsed(command_of(service)) for service in engines(profile).values()]
    assert [given["engine_id"] for given in commands] == ["e0", "e1"]
    for name, given in zip(engines(profile), commands, strict=True):
        assert (given["host"], given["port"], given["advertise_url"]) == ("0.0.0.0", 8000, f"http://{name}:8000")


def test_the_example_of_settings_starts_the_demo() -> None:
    (profiles,) = re.findall(r"^COMPOSE_PROFILES=(.*)$", EXAMPLE, re.MULTILINE)
    assert profiles == "demo"


def test_emulated_engines_are_told_where_kv_arrives(settings: Callable[[str], Any]) -> None:
    for name, service in engines("demo").items():
        engine = settings(service)
        assert (engine.kv_host, engine.profile) == ("0.0.0.0", "laptop")
        assert engine.kv_advertise == f"{name}:{engine.kv_port}"


def test_everybody_serves_one_model_by_one_name(settings: Callable[[str], Any]) -> None:
    assert {settings(name).model for name in ("router", "controller", *engines("demo").values())} == {MODEL}
    for service in (*engines("cpu").values(), *engines("gpu").values()):
        more = parsed(command_of(service))["more"]
        assert more[more.index("--served-model-name") + 1] == MODEL
    assert environment_of("demo-load")["TRIMTAB_MODEL"] == environment_of("prometheus")["MODEL_NAME"] == MODEL


def test_sglang_engines_have_what_tells_them_apart() -> None:
    assert len({parsed(command_of(service))["cores"] for service in engines("cpu").values()}) == 2
    assert len({environment_of(service)["CUDA_VISIBLE_DEVICES"] for service in engines("gpu").values()}) == 2
    for service in engines("gpu").values():
        assert "--tp-size" in parsed(command_of(service))["more"]
        (device,) = SERVICES[service]["deploy"]["resources"]["reservations"]["devices"]
        assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}


def test_sglang_is_not_process_number_one() -> None:
    """Its processes take a parent of that number for the one that adopts orphans, and end themselves."""
    for service in (*engines("cpu").values(), *engines("gpu").values()):
        assert SERVICES[service]["init"] is True


@pytest.mark.parametrize("service", SETTINGS)
def test_redis_is_found_by_name_and_password(service: str) -> None:
    (url,) = [value for name, value in environment_of(service).items() if name.endswith("REDIS_URL")]
    redis = urlsplit(url)
    assert (redis.hostname, redis.password) == ("redis", SECRETS["REDIS_PASSWORD"])
    assert f"--port {redis.port} " in SERVICES["redis"]["command"][2]


@pytest.mark.parametrize("service", [name for name in SETTINGS if name != "controller"])
def test_spans_go_to_the_trace_viewer(service: str) -> None:
    (url,) = [value for name, value in environment_of(service).items() if name.endswith("TRACES_URL")]
    assert urlsplit(url).hostname in SERVICES
    assert (urlsplit(url).port, urlsplit(url).path) == (4318, "")
    assert TRACES_PATH == "/v1/traces"


def test_the_load_is_sent_to_the_router_with_the_clients_key(settings: Callable[[str], Any]) -> None:
    load_of = parsed(command_of("demo-load"))
    assert load_of["url"] == f"http://router:{settings('router').port}"
    assert load_of["mix"].value == "shifting"
    assert environment_of("demo-load")["TRIMTAB_API_KEY"] == SECRETS["API_KEY"]


def test_clients_and_operators_have_secrets_of_their_own(settings: Callable[[str], Any]) -> None:
    assert settings("router").api_key.get_secret_value() == SECRETS["API_KEY"]
    assert settings("controller").admin_token.get_secret_value() == SECRETS["ADMIN_TOKEN"]


def test_only_what_people_use_is_published_and_on_loopback_unless_told_otherwise(
    settings: Callable[[str], Any],
) -> None:
    router, controller = settings("router"), settings("controller")
    inside = {"router": router.port, "controller": controller.admin_port}
    inside |= {"prometheus": 9090, "grafana": 3000, "jaeger": 16686}
    for name, (bind, port) in PUBLISHED.items():
        assert DEFAULTS[bind] == "127.0.0.1"
        (published,) = SERVICES[name]["ports"]
        assert published == f"${{{bind}:-127.0.0.1}}:${{{port}:-{DEFAULTS[port]}}}:{inside[name]}"
    assert {name for name, said in SERVICES.items() if "ports" in said} == set(PUBLISHED)
    assert (router.host, controller.admin_host) == ("0.0.0.0", "0.0.0.0")


def test_the_router_is_not_killed_while_it_drains(settings: Callable[[str], Any]) -> None:
    assert int(SERVICES["router"]["stop_grace_period"].removesuffix("s")) > settings("router").drain_s


@pytest.mark.parametrize("service", SERVICES)
def test_every_service_is_hardened_pinned_limited_and_restarted(service: str) -> None:
    said = SERVICES[service]
    assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+[\w.-]*", interpolated(said["image"]))
    assert said["read_only"] is True
    assert said["cap_drop"] == ["ALL"]
    assert said["security_opt"] == ["no-new-privileges:true"]
    assert said["restart"] == "unless-stopped"
    assert said["pids_limit"] > 0
    assert service in engines("gpu").values() or said["mem_limit"]
    assert service in OURS or not str(said["user"]).startswith(("root", "0"))


@pytest.mark.parametrize("service", [name for name in SERVICES if name != "demo-load"])
def test_every_server_says_whether_it_is_well(service: str) -> None:
    kind, *words = SERVICES[service]["healthcheck"]["test"]
    assert kind in {"CMD", "CMD-SHELL"}
    assert words


def test_whoever_is_waited_for_is_there_in_every_profile_of_who_waits() -> None:
    for said in SERVICES.values():
        for name, wanted in said.get("depends_on", {}).items():
            assert wanted == {"condition": "service_healthy"}
            assert "healthcheck" in SERVICES[name]
            assert "profiles" not in SERVICES[name]


def test_no_secret_is_an_argument_or_part_of_a_health_check() -> None:
    for said in SERVICES.values():
        words = [*said.get("command", ()), *said.get("healthcheck", {}).get("test", ())]
        assert not [word for word in words if re.search(r"(?<!\$)\$\{(" + "|".join(SECRETS) + ")", word)]


def test_the_example_of_settings_names_exactly_those_asked_for_with_their_defaults() -> None:
    secrets = re.findall(r"^(\w+)=$", EXAMPLE, re.MULTILINE)
    optional = dict(re.findall(r"^#(\w+)=(.*)$", EXAMPLE, re.MULTILINE))
    assert set(re.findall(r"\$\{(\w+):\?", TEXT)) == set(secrets) == set(SECRETS)
    assert optional == DEFAULTS
    # Where a default stands twice, it is the same one.
    assert len(set(re.findall(r"\$\{(\w+):-([^}]*)\}", TEXT))) == len(DEFAULTS)
    # Processes read `.env` in their folder too: a name of theirs there would change a `make up` in the checkout.
    assert not [name for name in (*secrets, *optional) if name.startswith("TRIMTAB_")]
    assert ".env" in (CHECKOUT / ".gitignore").read_text().split()


def test_every_mounted_folder_is_in_the_checkout_and_every_volume_is_declared() -> None:
    mounts = [mount.split(":") for said in SERVICES.values() for mount in said.get("volumes", ())]
    for source, _, *options in mounts:
        if source.startswith("."):
            assert (CHECKOUT / source).is_dir()
            assert options == ["ro"]
    assert {source for source, *_ in mounts if not source.startswith(".")} == set(DOCUMENT["volumes"])


def test_prometheus_reads_our_configuration_with_the_models_name_in_it() -> None:
    said = SERVICES["prometheus"]
    (script,) = said["command"]
    assert "./dashboards/prometheus:/etc/trimtab:ro" in said["volumes"]
    assert "cp -R /etc/trimtab /tmp/trimtab " in script
    assert "--config.file=/tmp/trimtab/prometheus.yml " in script
    assert "--enable-feature=exemplar-storage" in script
    assert 's|trimtab-demo|$$MODEL_NAME|" /tmp/trimtab/targets/*.yml' in script
    for file in (PROMETHEUS / "targets").glob("*.yml"):
        assert all(group["labels"] == {"model": "trimtab-demo"} for group in yaml.safe_load(file.read_text()))


def test_grafana_is_provisioned_from_the_checkout_and_shows_goodput_first() -> None:
    said, environment = SERVICES["grafana"], environment_of("grafana")
    (provider,) = yaml.safe_load((GRAFANA / "provisioning/dashboards/trimtab.yml").read_text())["providers"]
    boards = provider["options"]["path"]
    assert f"./dashboards/grafana:{boards}:ro" in said["volumes"]
    assert "./dashboards/grafana/provisioning:/etc/grafana/provisioning:ro" in said["volumes"]
    home = Path(environment["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert str(home.parent) == boards
    assert (GRAFANA / home.name).is_file()
    source = (GRAFANA / "provisioning/datasources/prometheus.yml").read_text()
    assert set(re.findall(r"(?<!\$)\$([A-Z]\w+)", source)) == {"PROMETHEUS_URL", "TRACES_URL"} <= set(environment)


def test_grafana_lets_everybody_look_and_nobody_change() -> None:
    environment = environment_of("grafana")
    assert environment["GF_AUTH_ANONYMOUS_ENABLED"] == "true"
    assert environment["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    assert environment["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"


def test_links_lead_to_where_the_trace_viewer_is_published() -> None:
    assert DEFAULTS["TRACES_URL"] == f"http://{DEFAULTS['BOARDS_BIND']}:{DEFAULTS['TRACES_PORT']}"
