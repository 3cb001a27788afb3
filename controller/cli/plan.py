"""`trimtab plan`: what is in force, putting something else in force, going back, having the tuner keep off."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from controller.cli.admin import AdminToken, AdminUrl, admin_api, who
from controller.cli.errors import CliError
from controller.cli.show import AsJson, at, knob_rows, plan_summary, print_json, print_table
from tuner.plan import BALANCED, Admission, Policy

if TYPE_CHECKING:
    from controller.cli.admin_client import AdminClient

POLL_S = 0.1

app = typer.Typer(help="Show and change the plan: pattern, knobs and roles.", no_args_is_help=True)

Wait = Annotated[float, typer.Option("--wait-s", min=0, help="How long to wait for the routers to apply it")]


@app.command()
def show(admin_url: AdminUrl = None, admin_token: AdminToken = None, as_json: AsJson = False) -> None:
    """Print the plan in force and which routers have applied it."""
    with admin_api(admin_url, admin_token) as admin:
        plan, routers = admin.get("/v1/plan"), admin.get("/v1/routers")
    if as_json:
        print_json(plan)
        return
    print_table(plan_summary(plan), ("knob", "value"), knob_rows(plan))
    typer.echo(_applied(plan["version"], routers["routers"]))


@app.command("set")
def set_plan(
    pattern: Annotated[str, typer.Argument(help="data_parallel, disaggregated, balanced, or one of your own")],
    offload_ratio: Annotated[
        float | None, typer.Option(help="Share of the prompt that the decode engine prefills itself (balanced)")
    ] = None,
    policy: Annotated[Policy | None, typer.Option(help="How engines that decode are ranked")] = None,
    min_remote_tokens: Annotated[
        int | None, typer.Option(help="Prompts with fewer uncached tokens skip the prefill engine")
    ] = None,
    bypass_cached_fraction: Annotated[
        float | None, typer.Option(help="Prompts cached to at least this share skip the prefill engine")
    ] = None,
    max_inflight_transfers: Annotated[int | None, typer.Option(help="Transfers to one decode engine at a time")] = None,
    max_attempts: Annotated[int | None, typer.Option(help="Placements of one request before it fails")] = None,
    admission: Annotated[Admission | None, typer.Option(help="What happens to what there is no room for")] = None,
    max_running_per_engine: Annotated[
        int | None, typer.Option(help="Requests on one engine before admission steps in")
    ] = None,
    chunked_prefill_tokens: Annotated[
        int | None, typer.Option(help="Most prompt tokens in one pass of an engine")
    ] = None,
    prefill_decode_interval: Annotated[
        int | None, typer.Option(help="Decode passes of an engine between prefill passes")
    ] = None,
    role: Annotated[
        list[str] | None, typer.Option(help="ENGINE=prefill|decode|mixed; repeat. Others are mixed")
    ] = None,
    reason: Annotated[str | None, typer.Option(help="Why; kept in the history")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Start from the plan in force, not from the defaults")] = False,
    wait_s: Wait = 5.0,
    admin_url: AdminUrl = None,
    admin_token: AdminToken = None,
) -> None:
    """Put a plan in force and wait until the routers have applied it. The next request follows it.

    * `trimtab plan set balanced --offload-ratio 0.1`
    * `trimtab plan set disaggregated --role e0=prefill --role e1=decode --reason "long prompts"`
    * `trimtab plan set data_parallel --policy prefix_affinity`
    """
    knobs = {
        "offload_ratio": offload_ratio,
        "policy": policy,
        "min_remote_tokens": min_remote_tokens,
        "bypass_cached_fraction": bypass_cached_fraction,
        "max_inflight_transfers": max_inflight_transfers,
        "max_attempts": max_attempts,
        "admission": admission,
        "max_running_per_engine": max_running_per_engine,
        "chunked_prefill_tokens": chunked_prefill_tokens,
        "prefill_decode_interval": prefill_decode_interval,
    }
    given = {name: value for name, value in knobs.items() if value is not None}
    with admin_api(admin_url, admin_token) as admin:
        start = _start(admin.get("/v1/plan"), pattern) if keep else {"knobs": {}, "roles": {}}
        body = {
            **start,
            "pattern": pattern,
            "knobs": start["knobs"] | given,
            "roles": start["roles"] | parse_roles(role or ()),
            **({} if reason is None else {"reason": reason}),
        }
        _report(admin, admin.put("/v1/plan", body), wait_s)


@app.command()
def history(
    count: Annotated[int, typer.Option(min=1, max=100, help="How many")] = 20,
    admin_url: AdminUrl = None,
    admin_token: AdminToken = None,
    as_json: AsJson = False,
) -> None:
    """Print the last plans, newest first."""
    with admin_api(admin_url, admin_token) as admin:
        plans = admin.get(f"/v1/plan/history?count={count}")["plans"]
    if as_json:
        print_json(plans)
        return
    rows = [(str(p["version"]), at(p["issued_at_s"]), p["issued_by"], p["pattern"], p["reason"]) for p in plans]
    print_table("Plans, newest first", ("version", "issued", "by", "pattern", "reason"), rows)


@app.command()
def rollback(
    version: Annotated[int, typer.Argument(min=1, help="A version from `trimtab plan history`")],
    wait_s: Wait = 5.0,
    admin_url: AdminUrl = None,
    admin_token: AdminToken = None,
) -> None:
    """Put an earlier plan in force again, as a new version."""
    with admin_api(admin_url, admin_token) as admin:
        _report(admin, admin.post("/v1/plan/rollback", {"version": version}), wait_s)


@app.command()
def pin(
    version: Annotated[int | None, typer.Argument(min=1, help="A version from `trimtab plan history`")] = None,
    reason: Annotated[str | None, typer.Option(help="Why; kept with the mode")] = None,
    wait_s: Wait = 5.0,
    admin_url: AdminUrl = None,
    admin_token: AdminToken = None,
) -> None:
    """Have the tuner leave the plan alone: the one in force, or an earlier one that is put in force again.

    Pinned means mode `manual`. To pin a plan of your own: `trimtab plan set …`, then `trimtab plan pin`.

    * `trimtab plan pin --reason "load test"`
    * `trimtab plan pin 7`
    """
    given = {"version": version, "reason": reason, "by": who()}
    with admin_api(admin_url, admin_token) as admin:
        pinned = admin.post("/v1/plan/pin", {name: value for name, value in given.items() if value is not None})
        _report(admin, pinned, wait_s)
    typer.echo(f"pinned: mode is {pinned['mode']['mode']} until `trimtab plan unpin`")


@app.command()
def unpin(
    reason: Annotated[str | None, typer.Option(help="Why; kept with the mode")] = None,
    admin_url: AdminUrl = None,
    admin_token: AdminToken = None,
) -> None:
    """Give the plan back to the tuner. What is in force stays until it finds a better one."""
    given = {"by": who()} | ({} if reason is None else {"reason": reason})
    with admin_api(admin_url, admin_token) as admin:
        typer.echo(f"unpinned: mode is {admin.post('/v1/plan/unpin', given)['mode']}")


def _start(plan: Mapping[str, Any], pattern: str) -> dict[str, Any]:
    """What `--keep` keeps. Only `balanced` has an offload ratio, so another pattern starts without it."""
    knobs = {name: value for name, value in plan["knobs"].items() if name != "offload_ratio" or pattern == BALANCED}
    return {"knobs": knobs, "roles": plan["roles"], "expected_version": plan["version"]}


def parse_roles(given: Sequence[str]) -> dict[str, str]:
    """`e0=prefill` and so on, as engine → role; raises `CliError` for anything else."""
    roles = {}
    for entry in given:
        engine_id, separator, role = entry.partition("=")
        if not separator or not engine_id or not role:
            raise CliError(f"--role {entry!r} is not ENGINE=ROLE: give for example --role e0=prefill")
        roles[engine_id] = role
    return roles


def _report(admin: "AdminClient", issued: Mapping[str, Any], wait_s: float) -> None:
    for warning in issued["warnings"]:
        typer.echo(f"warning: {warning}", err=True)
    version = issued["plan"]["version"]
    routers = wait_until_applied(lambda: admin.get("/v1/routers")["routers"], version, wait_s)
    behind = [router["router_id"] for router in routers if router["plan_version"] < version]
    if behind:
        raise CliError(
            f"{_applied(version, routers)} after {wait_s:g} s; not by {', '.join(behind)}: "
            "their logs say why, and they go on trying"
        )
    typer.echo(_applied(version, routers))


def wait_until_applied(
    routers: Callable[[], Sequence[Mapping[str, Any]]], version: int, wait_s: float
) -> Sequence[Mapping[str, Any]]:
    """Ask until all live routers are at `version` or `wait_s` is over; what was answered last."""
    deadline_s = time.monotonic() + wait_s
    found = routers()
    while any(router["plan_version"] < version for router in found) and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
        found = routers()
    return found


def _applied(version: int, routers: Sequence[Mapping[str, Any]]) -> str:
    if not routers:
        return f"version {version} is in force; no router is alive to apply it"
    applied = sum(router["plan_version"] >= version for router in routers)
    return f"version {version} applied by {applied} of {len(routers)} routers"
