"""The first screen: do clients get what they were promised, and if not, why."""

from collections.abc import Sequence

from dashboards.board import Board, Row
from dashboards.panels import (
    MODEL,
    OF_CLASS,
    RATE,
    WRONG_ABOVE_ZERO,
    WRONG_BELOW_ZERO,
    Panel,
    Query,
    Text,
    lines,
    number,
    states,
)

MET = "Offered and good requests per second. The gap is requests that were refused, failed or came too late."
BOUND = "Percentiles of what clients saw, with the bound of each class dashed. Points are single requests with a trace."
UNFINISHED = "Requests that ended without an answer, by how."


def _now() -> Sequence[Panel]:
    good, offered = (f"sum(model_class:trimtab_{name}_requests:rate1m{{{OF_CLASS}}})" for name in ("good", "received"))
    firing = f'ALERTS{{alertname=~"Trimtab.*", alertstate="firing", {MODEL}}}'
    return (
        number(
            Text("Goodput", "Requests per second that met both bounds, over the last minute."),
            "reqps",
            Query(good, "good"),
        ),
        number(
            Text("Offered", "Requests per second that arrived, over the last minute."),
            "reqps",
            Query(offered, "offered"),
        ),
        number(
            Text("Worst class", "Attainment of the class that is furthest below its target, less that target."),
            "percentunit",
            Query(
                f"min(model_class:trimtab_attainment:ratio_rate5m{{{OF_CLASS}}}"
                " - on (model, slo_class) model_class:trimtab_attainment_target:ratio)",
                "margin",
            ),
            bands=WRONG_BELOW_ZERO,
        ),
        number(
            Text("Pattern", "The orchestration pattern of the plan in force.", "No router is scraped"),
            "none",
            Query(f"max by (pattern) (trimtab_plan_info{{{MODEL}}})", "{{pattern}}"),
            named=True,
        ),
        number(
            Text("Plan", "Version of the plan in force.", "No router is scraped"),
            "none",
            Query(f"max(trimtab_plan_version{{{MODEL}}})", "version"),
        ),
        number(
            Text("Alerts", "How many alerts fire; each says what to do.", "No alerts"),
            "none",
            Query(f"count({firing}) or vector(0)", "firing"),
            bands=WRONG_ABOVE_ZERO,
        ),
    )


def _promises() -> Sequence[Panel]:
    return (
        lines(
            Text("Goodput against offered load", MET),
            "reqps",
            Query(f"sum(model_class:trimtab_received_requests:rate1m{{{OF_CLASS}}})", "offered"),
            Query(f"sum(model_class:trimtab_good_requests:rate1m{{{OF_CLASS}}})", "good"),
        ),
        lines(
            Text("Attainment by class", "Share of requests that met both bounds over 5 minutes; targets are dashed."),
            "percentunit",
            Query(f"model_class:trimtab_attainment:ratio_rate5m{{{OF_CLASS}}}", "{{slo_class}}"),
            Query(f"model_class:trimtab_attainment_target:ratio{{{OF_CLASS}}}", "{{slo_class}} target", limit=True),
            top=1,
        ),
    )


def _latencies() -> Sequence[Panel]:
    return (
        _percentiles("TTFT against its bound", "ttft", f"trimtab_slo_ttft_bound_seconds{{{OF_CLASS}}}"),
        _percentiles("TPOT against its bound", "tpot", f"trimtab_slo_tpot_bound_seconds{{{OF_CLASS}}}"),
    )


def _percentiles(title: str, name: str, bound: str) -> Panel:
    buckets = f"sum by (le, slo_class) (rate(trimtab_{name}_seconds_bucket{{{OF_CLASS}}}{RATE}))"
    percentiles = (
        Query(f"histogram_quantile({share}, {buckets})", f"{{{{slo_class}}}} p{share * 100:g}", exemplars=share == 0.99)
        for share in (0.5, 0.9, 0.99)
    )
    limit = Query(f"max by (slo_class) ({bound})", "{{slo_class}} bound", limit=True)
    return lines(Text(title, BOUND), "s", *percentiles, limit)


def _causes() -> Sequence[Panel]:
    misses = f"sum by (cause) (rate(trimtab_slo_violations_total{{{OF_CLASS}, bound=%s}}{RATE}))"
    parts = f"sum by (part) (rate(trimtab_request_part_seconds_total{{{OF_CLASS}}}{RATE}))"
    answered = f'scalar(sum(rate(trimtab_requests_total{{{OF_CLASS}, outcome="ok"}}{RATE})) > 0)'
    return (
        lines(
            Text(
                "Missed TTFT by cause",
                "The largest part of the time that was too long; failed requests count as error.",
            ),
            "reqps",
            Query(misses % '"ttft"', "{{cause}}"),
            stacked=True,
            width=8,
        ),
        lines(
            Text(
                "Missed TPOT by cause", "Late output is put down to decoding, unless the request failed or was resumed."
            ),
            "reqps",
            Query(misses % '"tpot"', "{{cause}}"),
            stacked=True,
            width=8,
        ),
        lines(
            Text("Where the time goes", "Mean seconds of an answered request in each of its parts."),
            "s",
            Query(f"{parts} / {answered}", "{{part}}"),
            stacked=True,
            width=8,
        ),
    )


def _plans() -> Sequence[Panel]:
    return (
        states(
            Text("Pattern over time", "Which pattern the plan in force names.", "No router is scraped"),
            Query(f"max by (pattern) (trimtab_plan_info{{{MODEL}}})", "{{pattern}}"),
            words={1: "in force"},
            wordy=False,
        ),
        lines(
            Text(
                "Offload ratio",
                "Share of a prompt's tail that the decode engine prefills itself.",
                "No router is scraped",
            ),
            "percentunit",
            Query(f"max by (model) (trimtab_plan_offload_ratio{{{MODEL}}})", "{{model}}"),
            top=1,
            steps=True,
        ),
        lines(
            Text("Goodput by pattern", "Good requests by the pattern that they ran under."),
            "reqps",
            Query(f"sum by (pattern) (rate(trimtab_good_requests_total{{{OF_CLASS}}}{RATE}))", "{{pattern}}"),
            stacked=True,
        ),
        lines(
            Text("Without an answer", UNFINISHED, "Every request was answered"),
            "reqps",
            Query(f'sum by (outcome) (rate(trimtab_requests_total{{{OF_CLASS}, outcome!="ok"}}{RATE}))', "{{outcome}}"),
            stacked=True,
        ),
    )


GOODPUT = Board(
    "trimtab-goodput",
    "Trimtab: goodput",
    "Whether clients get what they were promised, why not, and what the plan was.",
    (
        Row("Now", _now()),
        Row("Promises", _promises()),
        Row("Latency", _latencies()),
        Row("What was too long", _causes()),
        Row("What the routers did", _plans()),
    ),
)
