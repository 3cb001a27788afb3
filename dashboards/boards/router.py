"""The routers themselves: their load, what they go by, and what they lose."""

from collections.abc import Sequence

from dashboards.board import Board, Row
from dashboards.panels import MODEL, OF_CLASS, RATE, Panel, Query, Text, lines, states

NO_ROUTER = "No router is scraped: see prometheus/targets"
ROUTERS = f'{MODEL}, job="trimtab-router"'
OURS = f'{MODEL}, job=~"trimtab-.*"'


def _load() -> Sequence[Panel]:
    return (
        lines(
            Text("Requests per second, by outcome", "Finished requests of all routers."),
            "reqps",
            Query(f"sum by (outcome) (rate(trimtab_requests_total{{{OF_CLASS}}}{RATE}))", "{{outcome}}"),
            stacked=True,
        ),
        lines(
            Text("Arrivals, by router", "Requests that were understood."),
            "reqps",
            Query(f"sum by (instance) (rate(trimtab_received_requests_total{{{OF_CLASS}}}{RATE}))", "{{instance}}"),
            stacked=True,
        ),
        lines(
            Text("In flight and waiting", "Requests being worked on, and those held back in the queue.", NO_ROUTER),
            "none",
            Query(f"sum by (instance) (trimtab_inflight_requests{{{MODEL}}})", "{{instance}} in flight"),
            Query(f"sum by (instance) (trimtab_waiting_requests{{{MODEL}}})", "{{instance}} waiting"),
        ),
        lines(
            Text("Client connections", "Open connections.", NO_ROUTER),
            "none",
            Query(f"trimtab_client_connections{{{MODEL}}}", "{{instance}}"),
        ),
        lines(
            Text("Whole requests", "Percentiles of the time from a request's first byte to the end of its answer."),
            "s",
            *(
                Query(
                    f"histogram_quantile({share}, sum by (le) (rate(trimtab_e2e_seconds_bucket{{{OF_CLASS}}}{RATE})))",
                    f"p{share * 100:g}",
                    exemplars=share == 0.99,
                )
                for share in (0.5, 0.9, 0.99)
            ),
        ),
        lines(
            Text("Tokens per second", "Prompt tokens of answered requests, and tokens sent to clients."),
            "short",
            Query(f"sum(rate(trimtab_prompt_tokens_total{{{OF_CLASS}}}{RATE}))", "prompt"),
            Query(f"sum(rate(trimtab_output_tokens_total{{{OF_CLASS}}}{RATE}))", "output"),
        ),
    )


def _recovery() -> Sequence[Panel]:
    return (
        lines(
            Text("Rescued", "Placements after a failed one, and streams continued on another engine.", NO_ROUTER),
            "ops",
            Query(f"sum(rate(trimtab_placements_retried_total{{{MODEL}}}{RATE}))", "placed again"),
            Query(f"sum(rate(trimtab_streams_resumed_total{{{MODEL}}}{RATE}))", "resumed"),
        ),
        lines(
            Text("Aborts not confirmed", "What an engine may still hold for a request that is over.", NO_ROUTER),
            "ops",
            Query(f"sum(rate(trimtab_aborts_failed_total{{{MODEL}}}{RATE}))", "unconfirmed"),
        ),
    )


def _in_force() -> Sequence[Panel]:
    return (
        lines(
            Text("Plan version, by router", "All should be the same; the store's own is dashed.", NO_ROUTER),
            "none",
            Query(f"trimtab_plan_version{{{MODEL}}}", "{{instance}}"),
            Query(f"model:trimtab_plan_version:newest{{{MODEL}}}", "newest", limit=True),
            steps=True,
        ),
        lines(
            Text("Usable engines, by router", "A router that sees fewer has trouble to reach them.", NO_ROUTER),
            "none",
            Query(f"sum by (instance) (trimtab_pool_engines{{{MODEL}}})", "{{instance}}"),
            steps=True,
        ),
        lines(
            Text(
                "Documents refused",
                "Plans and SLO tables that a router would not apply; its log says why.",
                "None was refused",
                "a bad plan or SLO table was published",
            ),
            "none",
            Query(f"sum by (instance, kind) (trimtab_documents_refused_total{{{MODEL}}})", "{{instance}} {{kind}}"),
        ),
        lines(
            Text("SLO version, by router", "All should be the same.", NO_ROUTER),
            "none",
            Query(f"trimtab_slo_version{{{MODEL}}}", "{{instance}}"),
            steps=True,
        ),
    )


def _telemetry() -> Sequence[Panel]:
    return (
        states(
            Text("Store", "Whether each process reaches it.", "No process uses a store"),
            Query(f"min by (job, instance) (trimtab_store_up{{{OURS}}})", "{{job}} {{instance}}"),
            words={0: "away", 1: "answers"},
        ),
        lines(
            Text("Records that wait for the store", "They are kept up to a limit while it is away.", NO_ROUTER),
            "none",
            Query(f"trimtab_records_buffered{{{MODEL}}}", "{{instance}}"),
        ),
        lines(
            Text("Telemetry lost", "Records that the store, and spans that the collector, was away for.", NO_ROUTER),
            "ops",
            Query(f"sum by (instance) (rate(trimtab_records_lost_total{{{MODEL}}}{RATE}))", "{{instance}} requests"),
            Query(f"sum by (instance) (rate(trimtab_arrivals_lost_total{{{MODEL}}}{RATE}))", "{{instance}} arrivals"),
            Query(f"sum by (engine) (rate(trimtab_engine_records_lost_total{{{MODEL}}}{RATE}))", "{{engine}} passes"),
            Query(f"sum by (instance) (rate(trimtab_spans_lost_total{{{MODEL}}}{RATE}))", "{{instance}} spans"),
            Query(f"sum by (engine) (rate(trimtab_engine_spans_lost_total{{{MODEL}}}{RATE}))", "{{engine}} spans"),
        ),
    )


def _process() -> Sequence[Panel]:
    alone = "Not shown for a router with several workers, of which each scrape meets another."
    return (
        lines(
            Text("CPU", f"Cores in use, by process. A router near 1 is at its limit: use workers. {alone}", NO_ROUTER),
            "none",
            Query(f"rate(process_cpu_seconds_total{{{OURS}}}{RATE})", "{{job}} {{instance}}"),
        ),
        lines(
            Text("Memory", "Resident bytes, by process.", NO_ROUTER),
            "bytes",
            Query(f"process_resident_memory_bytes{{{OURS}}}", "{{job}} {{instance}}"),
        ),
        lines(
            Text("Open files", "File descriptors of routers; the limit is dashed.", NO_ROUTER),
            "none",
            Query(f"process_open_fds{{{ROUTERS}}}", "{{instance}}"),
            Query(f"process_max_fds{{{ROUTERS}}}", "{{instance}} limit", limit=True),
        ),
    )


ROUTER = Board(
    "trimtab-router",
    "Trimtab: router",
    "The routers themselves: their load, what they go by, and what they lose.",
    (
        Row("Load", _load()),
        Row("Recovery", _recovery()),
        Row("In force", _in_force()),
        Row("Telemetry", _telemetry()),
        Row("Processes", _process()),
    ),
)
