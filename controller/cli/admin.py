"""Finding the admin API: options that name it, and the running stack."""

import getpass
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from controller.cli.errors import CliError
from controller.stack.running import RunningStack, find_running, runtime_dir

if TYPE_CHECKING:
    from controller.cli.admin_client import AdminClient

DEFAULT_URL = "http://127.0.0.1:8081"

AdminUrl = Annotated[
    str | None,
    typer.Option(envvar="TRIMTAB_ADMIN_URL", help=f"Admin API [default: that of `trimtab up`, else {DEFAULT_URL}]"),
]
AdminToken = Annotated[
    str | None,
    typer.Option(envvar="TRIMTAB_ADMIN_TOKEN", help="Its bearer token [default: that of `trimtab up`]"),
]


@dataclass(frozen=True, slots=True)
class Target:
    """Which admin API to call."""

    url: str
    token: str | None = field(repr=False)


def one_stack() -> RunningStack | None:
    """The `trimtab up` of this user; raises `CliError` if several run."""
    stacks = find_running(runtime_dir())
    if len(stacks) > 1:
        urls = ", ".join(stack.admin_url for stack in stacks)
        raise CliError(f"several stacks run here ({urls}): say which with --admin-url")
    return stacks[0] if stacks else None


def find_target(url: str | None, token: str | None) -> Target:
    """What was given, else the running stack, else the default address.

    A stack's token goes to that stack's own address only.
    """
    if url is not None:
        known = {stack.admin_url: stack.admin_token for stack in find_running(runtime_dir())}
        return Target(url.rstrip("/"), token or known.get(url.rstrip("/")))
    stack = one_stack()
    if stack is None:
        return Target(DEFAULT_URL, token)
    return Target(stack.admin_url, token or stack.admin_token)


def admin_api(url: str | None, token: str | None) -> "AdminClient":
    """A client of the API that `find_target` finds; use it as a context manager."""
    from controller.cli.admin_client import AdminClient

    return AdminClient(find_target(url, token))


def who() -> str:
    """The user of this machine, to be written down beside what they change."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "operator"
