"""`python -m benchmarks NAME [--quick] [--json FILE] [--results DIR]`: prints Markdown, and writes what it is told to.

A missed goal exits 0 too.
"""

import asyncio
from collections.abc import Coroutine
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from benchmarks.report import Report, publish
from benchmarks.router.run import RouterOptions, run_router
from benchmarks.router.scenarios import QUICK, SCENARIOS
from benchmarks.router.targets import TARGETS

app = typer.Typer(no_args_is_help=True, add_completion=False)

Quick = Annotated[bool, typer.Option("--quick", help="A short form that CI can run; more noise.")]
Json = Annotated[Path | None, typer.Option("--json", help="Also write the results as JSON to this file.")]
Results = Annotated[
    Path | None,
    typer.Option(
        file_okay=False,
        help="Also write NAME.md and NAME.json into this folder. README's table is of benchmarks/results.",
    ),
]
Keep = Annotated[Path | None, typer.Option(help="A folder of outcomes: those of the same code are not measured again.")]
Seed = Annotated[int, typer.Option(help="Seed of generated prompts.")]

Model = Annotated[Path, typer.Option(help="Model folder of SGLang engines; `make bench-sglang` prepares one.")]
SMALL_MODEL = Path(".models") / "smollm2-135m"


@app.callback()
def benchmarks() -> None:
    """Trimtab's benchmarks. Each prints Markdown; a missed goal is printed as missed and the command still exits 0."""


@app.command()
def router(
    quick: Quick = False,
    json: Json = None,
    results: Results = None,
    seed: Seed = 1,
    targets: Annotated[str, typer.Option(help="Which to measure, separated by commas.")] = ",".join(TARGETS),
    scenarios: Annotated[str | None, typer.Option(help=f"Some of {','.join(SCENARIOS)}.", show_default="all")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Interleaved rounds.", show_default="3, quick 1")] = None,
    window_s: Annotated[
        float | None, typer.Option(min=0.2, help="Seconds measured.", show_default="3, quick 1")
    ] = None,
) -> None:
    """The router beside its peers over one cheap backend: CPU per request and per chunk, added latency.

    TRIMTAB_BENCH_WRAP is put before the router's command line, e.g. 'py-spy record -o profile.svg --'.
    """
    wanted = scenarios or ",".join(QUICK if quick else SCENARIOS)
    options = RouterOptions(
        targets=_some_of(targets, tuple(TARGETS), "target"),
        scenarios=_some_of(wanted, tuple(SCENARIOS), "scenario"),
        rounds=rounds or (1 if quick else 3),
        window_s=window_s or (1.0 if quick else 3.0),
        seed=seed,
    )
    _publish(asyncio.run(run_router(options)), quick, json, results)


@app.command()
def adapt(
    quick: Quick = False,
    json: Json = None,
    results: Results = None,
    seed: Seed = 1,
    scenarios: Annotated[
        str | None, typer.Option(help="Some files of benchmarks/scenarios, separated by commas.", show_default="all")
    ] = None,
    policies: Annotated[
        str | None, typer.Option(help="Some, separated by commas, such as trimtab,oracle.", show_default="all")
    ] = None,
    keep: Keep = None,
    live: Annotated[bool, typer.Option("--live", help="Over real processes on this machine, in real time.")] = False,
    sglang: Annotated[
        bool, typer.Option("--sglang", help="Over two real SGLang engines, beside sglang-router.")
    ] = False,
    model: Model = SMALL_MODEL,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="With --sglang: so many seeds from --seed on.", show_default="3, quick 1")
    ] = None,
) -> None:
    """Traffic that moves: Trimtab beside fixed plans, a threshold rule and the oracle in hindsight.

    In virtual time, or with --live over real processes with emulated engines, or with --sglang over real engines.
    """
    # Compiled code and optimisers are heavy, and the other benchmarks need none.
    if sglang:
        _publish(_with_engines(_on_sglang(model, quick, seed, seeds)), quick, json, results)
        return
    if live:
        from benchmarks.adapt.live.run import LiveOptions, run_live

        _publish(asyncio.run(run_live(LiveOptions(seed=seed, quick=quick))), quick, json, results)
        return
    from benchmarks.adapt.jobs import POLICIES
    from benchmarks.adapt.run import AdaptOptions, names, run_adapt
    from benchmarks.adapt.scenarios import scenario_names

    options = AdaptOptions(
        scenarios=_some_of(scenarios, tuple(scenario_names()), "scenario") if scenarios else names(quick),
        policies=_some_of(policies, POLICIES, "policy") if policies else POLICIES,
        seed=seed,
        quick=quick,
        kept=keep,
    )
    _publish(run_adapt(options), quick, json, results)


@app.command()
def traces(
    quick: Quick = False,
    json: Json = None,
    results: Results = None,
    seed: Seed = 1,
    folder: Annotated[
        Path | None,
        typer.Option(envvar="TRIMTAB_TRACES", help="Where the traces' files are; without them, load is generated."),
    ] = None,
    keep: Keep = None,
) -> None:
    """Public production traces on 4, 16 and 64 engines: Trimtab beside fixed plans and a threshold rule."""
    from benchmarks.traces.run import QUICK, TracesOptions, all_cells, run_traces

    options = TracesOptions(seed=seed, folder=folder, cells=QUICK if quick else all_cells(), kept=keep)
    _publish(run_traces(options), quick, json, results)


@app.command()
def paper(
    quick: Quick = False,
    json: Json = None,
    results: Results = None,
    seed: Seed = 1,
    plots: Annotated[
        Path | None,
        typer.Option(
            file_okay=False, help="Where the plots go.", show_default="benchmarks/results/paper, quick build/paper"
        ),
    ] = None,
) -> None:
    """Published evaluations of MicroServing and DistServe, simulated again: is each of their claims reproduced?"""
    from dataclasses import replace

    from benchmarks.paper.run import FULL, QUICK, run_paper

    options = QUICK if quick else FULL
    _publish(run_paper(replace(options, seed=seed, plots=plots or options.plots)), quick, json, results)


@app.command()
def twin(quick: Quick = False, json: Json = None, results: Results = None, seed: Seed = 1) -> None:
    """The fast simulator: requests per second of one core, and its errors against the reference simulator."""
    from dataclasses import replace

    from benchmarks.twin.run import FULL, QUICK, run_twin

    _publish(run_twin(replace(QUICK if quick else FULL, seed=seed)), quick, json, results)


@app.command("sglang-transfer")
def sglang_transfer(
    quick: Quick = False,
    json: Json = None,
    results: Results = None,
    seed: Seed = 1,
    model: Model = SMALL_MODEL,
    rounds: Annotated[int | None, typer.Option(min=1, help="Of each size.", show_default="9, quick 3")] = None,
) -> None:
    """KV between two SGLang engines on the CPU, beside NIXL alone and a memory copy of the same bytes."""
    from benchmarks.sglang_transfer.run import QUICK_TOKENS, TOKENS, TransferOptions, run_transfer

    tokens = QUICK_TOKENS if quick else TOKENS
    options = TransferOptions(model=model, tokens=tokens, rounds=rounds or (3 if quick else 9), seed=seed)
    _publish(_with_engines(run_transfer(options)), quick, json, results)


@app.command("sglang-interference")
def sglang_interference(
    quick: Quick = False,
    json: Json = None,
    results: Results = None,
    seed: Seed = 1,
    model: Model = SMALL_MODEL,
    stacks: Annotated[str | None, typer.Option(help="Some, separated by semicolons.", show_default="all")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Of each stack.", show_default="3, quick 1")] = None,
) -> None:
    """A long prompt meets running streams: data parallel, disaggregated, and SGLang's own PD behind sglang-router."""
    from benchmarks.sglang_interference.run import QUICK_STACKS, STACKS, InterferenceOptions, run_interference

    wanted = tuple(stacks.split(";")) if stacks else QUICK_STACKS if quick else STACKS
    unknown = [name for name in wanted if name not in STACKS]
    if unknown:
        raise typer.BadParameter(f"unknown stack {'; '.join(unknown)}: choose from {'; '.join(STACKS)}")
    options = InterferenceOptions(model=model, stacks=wanted, rounds=rounds or (1 if quick else 3), seed=seed)
    _publish(_with_engines(run_interference(options)), quick, json, results)


@app.command()
def fidelity(
    quick: Quick = False,
    json: Json = None,
    results: Results = None,
    seed: Seed = 1,
    model: Model = SMALL_MODEL,
    span_s: Annotated[
        float | None, typer.Option(min=20, help="Seconds of each pattern.", show_default="300, quick 60")
    ] = None,
) -> None:
    """The simulator beside two real SGLang engines that serve the same requests, fitted to their own telemetry."""
    from benchmarks.fidelity.run import QUICK_WAYS, WAYS, FidelityOptions, run_fidelity

    options = FidelityOptions(
        model=model,
        ways=QUICK_WAYS if quick else tuple(WAYS),
        span_s=span_s or (60.0 if quick else 300.0),
        seed=seed,
    )
    _publish(_with_engines(run_fidelity(options)), quick, json, results)


@app.command()
def readme(
    check: Annotated[bool, typer.Option("--check", help="Change nothing; exit 1 if it would change.")] = False,
) -> None:
    """Make README's table of benchmarks from the reports in benchmarks/results."""
    from benchmarks.readme import README, RESULTS, ReadmeError, benchmark_table, told, with_table

    text = README.read_text(encoding="utf-8")
    try:
        made = with_table(text, benchmark_table(told(RESULTS)))
    except ReadmeError as error:
        raise typer.BadParameter(str(error)) from error
    if not check:
        README.write_text(made, encoding="utf-8")
    elif made != text:
        print("README's table of benchmarks is not up to date: python -m benchmarks readme")
        raise typer.Exit(1)


def _publish(report: Report, quick: bool, json: Path | None, results: Path | None) -> None:
    today = datetime.now(UTC).date().isoformat()
    publish(msgspec.structs.replace(report, date=today, quick=quick), json, results)


def _on_sglang(model: Path, quick: bool, seed: int, seeds: int | None) -> Coroutine[None, None, Report]:
    from benchmarks.adapt.sglang.run import POLICIES, QUICK_POLICIES, SglangOptions, run_sglang

    options = SglangOptions(
        model=model,
        policies=QUICK_POLICIES if quick else POLICIES,
        seeds=range(seed, seed + (seeds or (1 if quick else 3))),
        phase_s=25.0 if quick else 120.0,
    )
    return run_sglang(options)


def _with_engines(measuring: Coroutine[None, None, Report]) -> Report:
    from benchmarks.real_engines import NoEngines

    try:
        return asyncio.run(measuring)
    except NoEngines as error:
        raise typer.BadParameter(str(error)) from error


def _some_of(given: str, known: tuple[str, ...], noun: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in given.split(",") if name.strip())
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise typer.BadParameter(f"unknown {noun} {', '.join(unknown) or given!r}: choose from {', '.join(known)}")
    return names


if __name__ == "__main__":
    app(prog_name="python -m benchmarks")
