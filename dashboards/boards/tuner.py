"""What the tuner decided, why, and how right it was."""

import enum
from collections.abc import Sequence

from dashboards.board import Board, Row
from dashboards.panels import MODEL, NO_TUNER, RATE, Panel, Query, Text, lines, number, rows, states
from tuner.plan import Knobs

NO_SEARCH = "No search has run yet"
NO_MODELS = "No latency model has been checked yet"


def _number_knobs() -> Sequence[str]:
    """Words, like the policy, are labels of `trimtab_plan_info`."""
    kinds = {name: field.annotation for name, field in Knobs.model_fields.items()}
    return [name for name, kind in kinds.items() if not (isinstance(kind, type) and issubclass(kind, enum.Enum))]


def _now() -> Sequence[Panel]:
    since = "time() - max(trimtab_tuner_last_{}_timestamp_seconds{{{}}})"
    return (
        number(
            Text("Mode", "Who moves the plan.", NO_TUNER),
            "none",
            Query(f"max by (mode) (trimtab_tuner_mode{{{MODEL}}}) == 1", "{{mode}}"),
            named=True,
        ),
        number(
            Text("Leaders", "Controllers that lead; one per model is right.", "No controller is scraped"),
            "none",
            Query(f"sum(trimtab_controller_leader{{{MODEL}}})", "leaders"),
            bands=((None, "red"), (1, "green"), (2, "red")),
        ),
        number(
            Text("Last reason", "Why the last tick did what it did.", NO_TUNER),
            "none",
            Query(f"max by (reason) (trimtab_tuner_reason{{{MODEL}}}) == 1", "{{reason}}"),
            named=True,
        ),
        number(
            Text("Since the last tick", "Time that has gone by.", NO_TUNER),
            "s",
            Query(since.format("tick", MODEL), "tick"),
        ),
        number(
            Text(
                "Since the last plan",
                "Since the tuner last published one.",
                "None published yet",
                "a plan was published",
            ),
            "s",
            Query(since.format("plan", MODEL), "plan"),
        ),
        number(
            Text("Candidates tried", "Plans that the search simulates, per second.", NO_TUNER),
            "ops",
            Query(f"sum(rate(trimtab_tuner_trials_total{{{MODEL}}}[5m]))", "trials"),
        ),
    )


def _decisions() -> Sequence[Panel]:
    return (
        states(
            Text(
                "Decisions",
                "The reason of each tick. Blue marks above are plan changes, red ones roll-backs.",
                NO_TUNER,
            ),
            Query(f"max by (reason) (trimtab_tuner_reason{{{MODEL}}}) == 1", "{{reason}}"),
            words={1: "decided"},
            width=16,
            wordy=False,
        ),
        lines(
            Text("Ticks by reason", "Per minute, over 5 minutes.", NO_TUNER),
            "none",
            Query(f"60 * sum by (reason) (rate(trimtab_tuner_decisions_total{{{MODEL}}}[5m])) > 0", "{{reason}}"),
            width=8,
            stacked=True,
        ),
    )


def _accuracy() -> Sequence[Panel]:
    measured = f"max(trimtab_tuner_measured_%s_requests_per_second{{{MODEL}}})"
    error = f"max by (engine_kind, latency) (trimtab_tuner_model_error_ratio{{{MODEL}}})"
    return (
        lines(
            Text("Predicted against measured goodput", "Of the plan in force, and of the best plan known.", NO_TUNER),
            "reqps",
            Query(measured % "offered", "offered"),
            Query(measured % "goodput", "measured"),
            Query(f"max by (of) (trimtab_tuner_predicted_goodput_requests_per_second{{{MODEL}}})", "predicted, {{of}}"),
            Query(f"max(trimtab_tuner_promised_goodput_requests_per_second{{{MODEL}}})", "promised", limit=True),
        ),
        lines(
            Text("Prediction error", "Measured less predicted goodput, as a share of the prediction.", NO_SEARCH),
            "percentunit",
            Query(f"max(trimtab_tuner_prediction_error_ratio{{{MODEL}}})", "error"),
            bottom=None,
        ),
        lines(
            Text("Error of latency models", "Median relative error, by engine kind and latency.", NO_MODELS),
            "percentunit",
            Query(error, "{{engine_kind}} {{latency}}"),
        ),
        lines(
            Text("Attainment the tuner saw", "By class, over the window of each tick.", NO_TUNER),
            "percentunit",
            Query(f"max by (slo_class) (trimtab_tuner_measured_attainment_ratio{{{MODEL}}})", "{{slo_class}}"),
            top=1,
        ),
    )


def _candidates() -> Sequence[Panel]:
    predicted = f'max(trimtab_tuner_predicted_goodput_requests_per_second{{{MODEL}, of="%s"}})'
    knobs = " or ".join(
        f'label_replace(max(trimtab_plan_{name}{{{MODEL}}}), "knob", "{name}", "", "")' for name in _number_knobs()
    )
    return (
        lines(
            Text("Best candidate of each pattern", "Predicted goodput in the last search.", NO_SEARCH),
            "reqps",
            Query(f"max by (pattern) (trimtab_tuner_candidate_goodput_requests_per_second{{{MODEL}}})", "{{pattern}}"),
        ),
        lines(
            Text("Their offload ratio", "Of the best candidate of each pattern.", NO_SEARCH),
            "percentunit",
            Query(f"max by (pattern) (trimtab_tuner_candidate_offload_ratio{{{MODEL}}})", "{{pattern}}"),
            top=1,
        ),
        lines(
            Text("Their shortfall", "Weighted share of requests by which classes would miss their targets.", NO_SEARCH),
            "percentunit",
            Query(f"max by (pattern) (trimtab_tuner_candidate_shortfall_ratio{{{MODEL}}})", "{{pattern}}"),
        ),
        lines(
            Text("Gain of the best", "Predicted goodput over the plan in force, and the standard error.", NO_SEARCH),
            "reqps",
            Query(f"{predicted % 'best'} - {predicted % 'incumbent'}", "gain"),
            Query(
                f'max(trimtab_tuner_predicted_gain_stderr_requests_per_second{{{MODEL}, of="best"}})',
                "standard error",
                limit=True,
            ),
            bottom=None,
        ),
        rows(
            Text(
                "Knobs in force", "Every number that the plan turns. Absent knobs leave engines as they are.", NO_TUNER
            ),
            Query(knobs, "{{knob}}"),
            {"knob": "Knob"},
        ),
    )


def _cost() -> Sequence[Panel]:
    seconds = f"sum by (le) (rate(trimtab_tuner_%s_seconds_bucket{{{MODEL}}}[5m]))"
    return (
        lines(
            Text("Seconds per tick", "A whole tick, and the search in it.", NO_TUNER),
            "s",
            *(
                Query(f"histogram_quantile({share}, {seconds % part})", f"{part} p{share * 100:g}")
                for part in ("tick", "search")
                for share in (0.5, 0.99)
            ),
        ),
        lines(
            Text("Records", "Read per second, by stream.", NO_TUNER),
            "ops",
            Query(f"sum by (stream) (rate(trimtab_tuner_records_read_total{{{MODEL}}}{RATE}))", "{{stream}}"),
        ),
        lines(
            Text("Records not used", "By stream and why.", "All were used", "a record is refused"),
            "ops",
            Query(
                f"sum by (stream, why) (rate(trimtab_tuner_records_refused_total{{{MODEL}}}{RATE}))",
                "{{stream}} {{why}}",
            ),
        ),
        lines(
            Text("Age of the newest record", "By stream; grows when telemetry stops.", NO_TUNER),
            "s",
            Query(f"time() - max by (stream) (trimtab_tuner_last_record_timestamp_seconds{{{MODEL}}})", "{{stream}}"),
        ),
        lines(
            Text("Failed ticks", "Ticks that raised or ran out of time.", NO_TUNER),
            "ops",
            Query(f"sum(rate(trimtab_tuner_tick_failures_total{{{MODEL}}}{RATE}))", "failed"),
        ),
        lines(
            Text("Traffic moved", "Changes for drift per second, by feature.", "No drift seen", "the traffic drifts"),
            "ops",
            Query(f"sum by (feature) (rate(trimtab_tuner_drifts_total{{{MODEL}}}{RATE}))", "{{feature}}"),
        ),
    )


TUNER = Board(
    "trimtab-tuner",
    "Trimtab: tuner",
    "What the tuner decided, why, and how right it was.",
    (
        Row("Now", _now()),
        Row("Decisions", _decisions()),
        Row("How right it was", _accuracy()),
        Row("What it considered", _candidates()),
        Row("What it cost, and what it learnt from", _cost()),
    ),
)
