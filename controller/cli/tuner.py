"""`trimtab mode`, `explain`, `decisions` and `what-if`: what the tuner does, why, and what else would do."""

import enum
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from controller.cli.admin import AdminToken, AdminUrl, admin_api, who
from controller.cli.errors import CliError
from controller.cli.plan import parse_roles
from controller.cli.show import AsJson, at, print_bars, print_json, print_table

FOLLOW_S = 1.0
PREDICT_S = 150.0
"""A prediction waits for the search that is under way, and after a start for the twin to be compiled."""


class ModeName(enum.StrEnum):
    AUTO = "auto"
    ADVISORY = "advisory"
    MANUAL = "manual"
    PAUSED = "paused"


def mode(
    name: Annotated[ModeName | None, typer.Argument(metavar="[MODE]", help="auto, advisory, manual or paused")] = None,
    reason: Annotated[str | None, typer.Option(help="Why; kept with the mode")] = None,
    admin_url: AdminUrl = None,
    admin_token: AdminToken = None,
    as_json: AsJson = False,
) -> None:
    """Print who moves the plan, or say who does from the next tick on.

    * `auto`: the tuner changes the plan
    * `advisory`: the tuner says what it would do, and changes nothing
    * `manual`: the plan in force is pinned; the tuner only watches
    * `paused`: the tuner does not even search

    Examples: `trimtab mode`, `trimtab mode advisory --reason "first week"`
    """
    with admin_api(admin_url, admin_token) as admin:
        if name is None:
            found = admin.get("/v1/mode")
        else:
            given = {} if reason is None else {"reason": reason}
            found = admin.put("/v1/mode", {"mode": name.value, "by": who(), **given})
    if as_json:
        print_json(found)
        return
    when = f" at {at(found['at_s'])}" if found["at_s"] else ""
    typer.echo(f"{found['mode']}, set by {found['by']}{when}: {found['reason']}")


def explain(admin_url: AdminUrl = None, admin_token: AdminToken = None, as_json: AsJson = False) -> None:
    """Say why this plan is in force: what clients get, what was tried, what it was predicted to give."""
    with admin_api(admin_url, admin_token) as admin:
        found = admin.get("/v1/explain")
    if as_json:
        print_json(found)
        return
    for sentence in found["sentences"]:
        typer.echo(sentence)
    search = found["search"]
    if search is not None:
        rows = [_candidate_row(each) for each in search["search"]["ranked"]]
        typer.echo("")
        print_table(f"Candidates of the search at {at(search['at_s'])}, best first", CANDIDATE_COLUMNS, rows)


CANDIDATE_COLUMNS = ("pattern", "ratio", "P / D / mixed", "goodput/s", "of", "short of targets", "gain")


def _candidate_row(prediction: Mapping[str, Any]) -> Sequence[str]:
    candidate = prediction["candidate"]
    roles = (candidate["prefill_engines"], candidate["decode_engines"], candidate["mixed_engines"])
    return (
        candidate["pattern"],
        f"{candidate['knobs']['offload_ratio']:g}",
        " / ".join(str(count) for count in roles),
        f"{prediction['goodput_rps']:.2f}",
        f"{prediction['offered_rps']:.2f}",
        f"{prediction['shortfall']:.1%}",
        f"{prediction['gain']:+.2f} ± {prediction['gain_se']:.2f}",
    )


def decisions(
    count: Annotated[int, typer.Option("--count", "-n", min=1, max=100, help="How many")] = 20,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on printing new ones until Ctrl-C")] = False,
    admin_url: AdminUrl = None,
    admin_token: AdminToken = None,
    as_json: AsJson = False,
) -> None:
    """Print the tuner's last decisions, the newest last; each with its one reason.

    * `trimtab decisions -n 5`
    * `trimtab decisions --follow`
    """
    with admin_api(admin_url, admin_token) as admin:
        found = admin.get(f"/v1/decisions?count={count}")["decisions"]
        if as_json:
            print_json(found)
            return
        if not found and not follow:
            typer.echo("the tuner has decided nothing yet")
        _print_decisions(found)
        while follow:
            time.sleep(FOLLOW_S)
            last = found[0]["id"] if found else None
            found = admin.get("/v1/decisions?count=100")["decisions"]
            _print_decisions(_newer(found, last))


def _print_decisions(newest_first: Sequence[Mapping[str, Any]]) -> None:
    for each in reversed(newest_first):
        put = f" → plan {each['published_version']}" if each["published_version"] is not None else ""
        refused = f" (not put in force: {each['refused']})" if each["refused"] else ""
        typer.echo(f"{at(each['at_s'])}  {each['reason']:<15} {each['sentence']}{put}{refused}")


def _newer(newest_first: Sequence[Mapping[str, Any]], last: str | None) -> Sequence[Mapping[str, Any]]:
    ids = [each["id"] for each in newest_first]
    return newest_first[: ids.index(last)] if last in ids else newest_first


def what_if(
    pattern: Annotated[str | None, typer.Argument(help="data_parallel, disaggregated or balanced")] = None,
    offload_ratio: Annotated[
        list[float] | None, typer.Option(min=0, max=0.99, help="Predict a plan for each; repeat")
    ] = None,
    sweep: Annotated[bool, typer.Option("--sweep", help="Offload ratios from 0 to 0.5 in steps of 0.05")] = False,
    prefill_engines: Annotated[
        int | None, typer.Option(min=1, help="So many engines prefill, the others decode")
    ] = None,
    role: Annotated[list[str] | None, typer.Option(help="ENGINE=prefill|decode|mixed; repeat")] = None,
    knob: Annotated[list[str] | None, typer.Option(help="NAME=VALUE, e.g. min_remote_tokens=512; repeat")] = None,
    slo: Annotated[
        list[str] | None,
        typer.Option(help="CLASS:NAME=VALUE, e.g. default:ttft_ms=500; repeat. The rest of the class stays"),
    ] = None,
    admin_url: AdminUrl = None,
    admin_token: AdminToken = None,
    as_json: AsJson = False,
) -> None:
    """Predict what another plan or other SLOs would have made of the traffic of the last minutes. Changes nothing.

    * `trimtab what-if --sweep --prefill-engines 1`
    * `trimtab what-if data_parallel --knob policy=prefix_affinity`
    * `trimtab what-if --slo default:ttft_ms=500`
    """
    ratios = [*(offload_ratio or ()), *(step / 20 for step in range(11) if sweep)]
    body = {
        "pattern": pattern,
        "prefill_engines": prefill_engines,
        "roles": parse_roles(role) if role else None,
        "knobs": _knobs(knob or ()),
        "offload_ratios": ratios,
    }
    with admin_api(admin_url, admin_token) as admin:
        body["slos"] = _slos(slo or (), admin.get("/v1/slo")["classes"]) if slo else {}
        found = admin.post("/v1/what-if", body, timeout_s=PREDICT_S)
    if as_json:
        print_json(found)
        return
    _print_forecasts(found)


def _print_forecasts(found: Mapping[str, Any]) -> None:
    traffic = found["traffic"]
    title = (
        f"On {traffic['requests']} requests of {traffic['span_s']:.0f} s ({traffic['rate_rps']:.2f}/s, "
        f"{traffic['mean_prompt_tokens']:.0f} → {traffic['mean_output_tokens']:.0f} tokens), {found['engines']} engines"
    )
    plans = [found["in_force"], *found["variants"]]
    columns = ("plan", "pattern", "goodput/s", "attainment", "TTFT p90 s", "TPOT p90 ms", "misses due to")
    print_table(title, columns, [_forecast_row(each) for each in plans])
    print_bars("Predicted goodput, requests/s", [(each["label"], each["forecast"]["goodput_rps"]) for each in plans])


def _forecast_row(predicted: Mapping[str, Any]) -> Sequence[str]:
    forecast = predicted["forecast"]
    seen = {name: each for name, each in forecast["classes"].items() if each["requests"]}
    causes = sorted(forecast["causes"].items(), key=lambda item: item[1], reverse=True)
    return (
        predicted["label"],
        predicted["plan"]["pattern"],
        f"{forecast['goodput_rps']:.2f} of {forecast['offered_rps']:.2f}",
        ", ".join(f"{name} {each['attainment']:.0%}" for name, each in seen.items()),
        ", ".join(f"{each['ttft_s'][1]:.2f}" for each in seen.values() if each["ttft_s"]),
        ", ".join(f"{each['tpot_s'][1] * 1e3:.1f}" for each in seen.values() if each["tpot_s"]),
        ", ".join(f"{cause} {count}" for cause, count in causes) or "-",
    )


def _knobs(given: Sequence[str]) -> dict[str, Any]:
    return dict(_assignment("--knob", entry, "min_remote_tokens=512") for entry in given)


def _slos(given: Sequence[str], classes: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Whole classes: those in force with what was given."""
    changed: dict[str, dict[str, Any]] = {}
    for entry in given:
        name, separator, rest = entry.partition(":")
        if not separator:
            raise CliError(f"--slo {entry!r} is not CLASS:NAME=VALUE: give for example --slo default:ttft_ms=500")
        key, value = _assignment("--slo", rest, "default:ttft_ms=500")
        changed.setdefault(name, dict(classes.get(name, classes["default"])))[key] = value
    return changed


def _assignment(flag: str, entry: str, example: str) -> tuple[str, str]:
    name, separator, value = entry.partition("=")
    if not separator or not name:
        raise CliError(f"{flag} {entry!r} is not NAME=VALUE: give for example {flag} {example}")
    return name, value
