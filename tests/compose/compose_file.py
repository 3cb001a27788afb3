"""What docker-compose.yml says, with the defaults of .env.example and made-up secrets."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer.main
import yaml

from controller.cli.root import app

CHECKOUT = Path(__file__).parents[2]
TEXT = (CHECKOUT / "docker-compose.yml").read_text()
EXAMPLE = (CHECKOUT / ".env.example").read_text()
DOCUMENT: Mapping[str, Any] = yaml.safe_load(TEXT)
SERVICES: Mapping[str, Mapping[str, Any]] = DOCUMENT["services"]
OURS = [name for name, said in SERVICES.items() if "build" in said]
SECRETS = {"REDIS_PASSWORD": "redis-secret", "API_KEY": "client-secret", "ADMIN_TOKEN": "operator-secret"}
DEFAULTS: Mapping[str, str] = dict(re.findall(r"\$\{(\w+):-([^}]*)\}", TEXT))
MODEL = DEFAULTS["MODEL_NAME"]


def interpolated(value: str) -> str:
    """What compose makes of a value."""
    value = re.sub(r"\$\{(\w+):\?[^}]*\}", lambda found: SECRETS[found[1]], value)
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value).replace("$$", "$")


def environment_of(service: str) -> dict[str, str]:
    return {name: interpolated(value) for name, value in SERVICES[service].get("environment", {}).items()}


def command_of(service: str) -> list[str]:
    return [interpolated(part) for part in SERVICES[service]["command"]]


def names_of(service: str) -> Sequence[str]:
    """What other containers can call it."""
    networks: Mapping[str, Mapping[str, Any]] = SERVICES[service].get("networks", {})
    return [service, *(alias for said in networks.values() for alias in said.get("aliases", ()))]


def engines(profile: str) -> Mapping[str, str]:
    """The engine services of a profile, by the name that they go by on the network."""
    found = [name for name, said in SERVICES.items() if said.get("profiles") == [profile] and "engine" in name]
    return {names_of(service)[1]: service for service in found}


def parsed(arguments: list[str]) -> dict[str, Any]:
    """The parameters that the command line makes of them, without running anything."""
    command = typer.main.get_command(app)
    while hasattr(command, "commands"):
        command = command.commands[arguments[0]]
        arguments = arguments[1:]
    with command.make_context("trimtab", list(arguments)) as context:
        return {**context.params, "more": context.args}
