"""Drawing a `controller.top.View` for a terminal. Nothing is computed here."""

from collections.abc import Mapping

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from controller.top import ClassView, Percentiles, View
from engines.telemetry import Heartbeat
from tuner.plan import Knobs, Plan

BAR_CELLS = 8
ABSENT = "–"


def draw(view: View) -> RenderableType:
    """The whole screen."""
    parts: list[RenderableType] = [_headline(view), _plan(view.plan)]
    if view.why_empty is not None:
        parts.append(Text(view.why_empty, style="yellow"))
    parts += [_classes(view), _counts("Outcomes", view.outcomes), _counts("Served by", view.patterns)]
    parts += [_routers(view), _engines(view)]
    return Group(*parts)


def _headline(view: View) -> Text:
    return Text.assemble(
        (f"{view.model}  ", "bold"),
        ("goodput ", "dim"),
        (f"{view.goodput:.2f}/s  ", "bold green"),
        ("offered ", "dim"),
        f"{view.offered_rate:.2f}/s  ",
        ("in flight ", "dim"),
        f"{view.inflight}  ",
        (f"last {view.window_s:g} s", "dim"),
    )


def _plan(plan: Plan | None) -> Text:
    if plan is None:
        return Text("No plan has been issued: start a controller with `trimtab controller`.", style="yellow")
    return Text.assemble(
        ("plan ", "dim"), (f"v{plan.version} {plan.pattern}", "bold"), f"  {_knobs(plan.knobs)}  ", (plan.reason, "dim")
    )


def _knobs(knobs: Knobs) -> str:
    """Those that are not at their default."""
    turned = knobs.model_dump(mode="json", exclude_defaults=True)
    return " ".join(f"{name}={value}" for name, value in turned.items()) or "all knobs at their defaults"


def _table(*columns: str) -> Table:
    return Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))


def _classes(view: View) -> Table:
    table = _table("class", "good", "target", "requests", "TTFT p50/95/99", "≤ ms", "TPOT p50/95/99", "≤ ms")
    for one in view.classes:
        table.add_row(
            one.name,
            _attainment(one),
            f"{one.target:.0%}",
            str(one.finished),
            _ms(one.ttft_s),
            f"{one.ttft_bound_s * 1e3:g}",
            _ms(one.tpot_s),
            f"{one.tpot_bound_s * 1e3:g}",
        )
    return table


def _attainment(one: ClassView) -> Text:
    if one.attainment is None:
        return Text(ABSENT)
    return Text(f"{one.attainment:.1%}", style="green" if one.attainment >= one.target else "red")


def _ms(found: Percentiles) -> str:
    return "/".join(ABSENT if value is None else f"{value * 1e3:.0f}" for value in (found.p50, found.p95, found.p99))


def _counts(title: str, counts: Mapping[str, int]) -> Text:
    shown = "  ".join(f"{name} {count}" for name, count in sorted(counts.items())) or ABSENT
    return Text.assemble((f"{title}: ", "dim"), shown)


def _routers(view: View) -> RenderableType:
    if not view.routers:
        return Text("No router is alive.", style="yellow")
    table = _table("router", "address", "plan", "in flight", "state")
    current = 0 if view.plan is None else view.plan.version
    for router in view.routers:
        applied = Text(f"v{router.plan_version}", style="green" if router.plan_version >= current else "red")
        state = "draining" if router.draining else "serving"
        table.add_row(router.router_id, router.url, applied, str(router.inflight), state)
    return table


def _engines(view: View) -> RenderableType:
    if not view.engines:
        return Text("No engine is alive.", style="yellow")
    table = _table("engine", "role", "running", "queued", "to prefill", "inbound", "KV", "state")
    for engine in view.engines:
        load = engine.load
        table.add_row(
            engine.info.engine_id,
            _role(engine, view.plan),
            str(load.running),
            str(load.queued),
            f"{load.pending_prefill_tokens:,} tok",
            str(load.inbound_transfers),
            kv_bar(load.kv_used_tokens, load.kv_reserved_tokens, load.kv_capacity_tokens),
            "draining" if load.draining else "serving",
        )
    return table


def _role(engine: Heartbeat, plan: Plan | None) -> str:
    return "mixed" if plan is None else plan.role_of(engine.info.engine_id).value


def kv_bar(used_tokens: int, reserved_tokens: int, capacity_tokens: int) -> Text:
    """Used solid, reserved shaded, then the used share in figures."""
    if capacity_tokens <= 0:
        return Text(ABSENT)
    used = min(BAR_CELLS, round(BAR_CELLS * used_tokens / capacity_tokens))
    reserved = min(BAR_CELLS - used, round(BAR_CELLS * reserved_tokens / capacity_tokens))
    free = BAR_CELLS - used - reserved
    return Text.assemble(
        ("█" * used, "cyan"), ("▒" * reserved, "cyan"), ("·" * free, "dim"), f" {used_tokens / capacity_tokens:.0%}"
    )
