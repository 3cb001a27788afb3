"""KV on its way between engines."""

from collections.abc import Sequence

from dashboards.board import Board, Row
from dashboards.panels import MODEL, NO_ENGINES, OF_CLASS, OF_ENGINE, RATE, Panel, Query, Text, lines, number

NONE = "No transfers: the pattern in force moves no KV"
NO_ROUTER = "No router is scraped"


def _now() -> Sequence[Panel]:
    lacking = f'trimtab_waiting_requests{{{MODEL}, lack=~"transfer_slot|kv_room"}}'
    return (
        number(
            Text("On their way", "Transfers between reservation and arrival.", NO_ROUTER),
            "none",
            Query(f"sum(trimtab_inflight_transfers{{{MODEL}}})", "transfers"),
            width=6,
        ),
        number(
            Text("Waiting", "Requests that wait for a transfer slot or for KV room, before any prefill.", NO_ROUTER),
            "none",
            Query(f"sum({lacking})", "requests"),
            width=6,
        ),
        number(
            Text("Share that failed", "Of all tries over 5 minutes. Clients see failures as latency only.", NONE),
            "percentunit",
            Query(f"max(model:trimtab_kv_transfers_failed:ratio_rate5m{{{MODEL}}})", "failed"),
            width=6,
        ),
        number(
            Text("Slots per decode engine", "Most transfers to one engine at a time, by plan.", NO_ROUTER),
            "none",
            Query(f"max(trimtab_plan_max_inflight_transfers{{{MODEL}}})", "slots"),
            width=6,
        ),
    )


def _flow() -> Sequence[Panel]:
    seconds = f"sum by (le) (rate(trimtab_kv_transfer_seconds_bucket{{{MODEL}}}{RATE}))"
    speed = (
        f"sum by (engine) (rate(trimtab_engine_transfer_bytes_total{{{OF_ENGINE}}}{RATE}))"
        f" / (sum by (engine) (rate(trimtab_engine_transfer_seconds_total{{{OF_ENGINE}}}{RATE})) > 0)"
    )
    return (
        lines(
            Text("Bytes per second", "KV sent, as routers count it.", NONE),
            "Bps",
            Query(f"sum(rate(trimtab_kv_transferred_bytes_total{{{MODEL}}}{RATE}))", "all"),
        ),
        lines(
            Text("Bytes per second, by receiver", "KV that arrived at each engine.", NO_ENGINES),
            "Bps",
            Query(f"sum by (engine) (rate(trimtab_engine_transfer_bytes_total{{{OF_ENGINE}}}{RATE}))", "{{engine}}"),
            stacked=True,
        ),
        lines(
            Text("Seconds per transfer", "From the end of prefill until the receiver holds the KV.", NONE),
            "s",
            *(
                Query(f"histogram_quantile({share}, {seconds})", f"p{share * 100:g}", exemplars=share == 0.99)
                for share in (0.5, 0.9, 0.99)
            ),
        ),
        lines(
            Text(
                "Speed of one transfer", "Bytes over seconds of what arrived: falls when transfers share a link.", NONE
            ),
            "Bps",
            Query(speed, "{{engine}}"),
        ),
    )


def _trouble() -> Sequence[Panel]:
    refused = f'sum by (engine, outcome) (rate(trimtab_engine_transfers_total{{{OF_ENGINE}, outcome!="ok"}}{RATE}))'
    return (
        lines(
            Text("Transfers per second", "Those that arrived, failed tries, and tries that were repeated.", NO_ROUTER),
            "ops",
            Query(f"sum(rate(trimtab_kv_transfers_total{{{MODEL}}}{RATE}))", "arrived"),
            Query(f"sum(rate(trimtab_kv_transfer_failures_total{{{MODEL}}}{RATE}))", "failed"),
            Query(f"sum(rate(trimtab_kv_transfer_retries_total{{{MODEL}}}{RATE}))", "tried again"),
        ),
        lines(
            Text("Refused, by receiver", "What receivers found wrong.", "No transfer was refused", "a transfer fails"),
            "ops",
            Query(refused, "{{engine}} {{outcome}}"),
        ),
        lines(
            Text(
                "Waiting, by what is lacking", "Requests held back in routers before any prefill is spent.", NO_ROUTER
            ),
            "none",
            Query(f"sum by (lack) (trimtab_waiting_requests{{{MODEL}}})", "{{lack}}"),
            stacked=True,
        ),
        lines(
            Text("Arriving now, by receiver", "Transfers that share an engine's link.", NO_ENGINES),
            "none",
            Query(f"trimtab_engine_inbound_transfers{{{OF_ENGINE}}}", "{{engine}}"),
            stacked=True,
        ),
    )


def _worth() -> Sequence[Panel]:
    return (
        lines(
            Text("Prompt tokens by source", "Found in the decode engine's cache, sent there, or computed there."),
            "short",
            Query(f"sum by (source) (rate(trimtab_prompt_tokens_total{{{OF_CLASS}}}{RATE}))", "{{source}}"),
            stacked=True,
        ),
        lines(
            Text("When a prompt is not sent", "Uncached tokens below which a prompt stays whole, by plan.", NO_ROUTER),
            "short",
            Query(f"max by (model) (trimtab_plan_min_remote_tokens{{{MODEL}}})", "{{model}}"),
            steps=True,
        ),
        lines(
            Text(
                "Copies of hot contexts",
                "What much of the traffic begins with, sent to more engines because the plan says so.",
                "Nothing was copied",
                "a plan names hot contexts",
            ),
            "ops",
            Query(f"sum by (outcome) (rate(trimtab_replications_total{{{MODEL}}}{RATE}))", "{{outcome}}"),
        ),
    )


TRANSFERS = Board(
    "trimtab-transfers",
    "Trimtab: KV transfers",
    "KV on its way between engines: how much, how fast, and what goes wrong.",
    (Row("Now", _now()), Row("Flow", _flow()), Row("Trouble", _trouble()), Row("Worth", _worth())),
)
