"""`python -m benchmarks NAME [--quick] [--json FILE]`: prints Markdown, writes JSON; a missed goal exits 0 too."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.report import publish
from benchmarks.router.run import RouterOptions, run_router
from benchmarks.router.scenarios import QUICK, SCENARIOS
from benchmarks.router.targets import TARGETS

app = typer.Typer(no_args_is_help=True, add_completion=False)

Quick = Annotated[bool, typer.Option("--quick", help="A short form that CI can run; more noise.")]
Json = Annotated[Path | None, typer.Option("--json", help="Also write the results as JSON to this file.")]
Seed = Annotated[int, typer.Option(help="Seed of generated prompts.")]


@app.callback()
def benchmarks() -> None:
    """Trimtab's benchmarks. Each prints Markdown; a missed goal is printed as missed and the command still exits 0."""


@app.command()
def router(
    quick: Quick = False,
    json: Json = None,
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
    publish(asyncio.run(run_router(options)), json)


def _some_of(given: str, known: tuple[str, ...], noun: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in given.split(",") if name.strip())
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise typer.BadParameter(f"unknown {noun} {', '.join(unknown) or given!r}: choose from {', '.join(known)}")
    return names


if __name__ == "__main__":
    app(prog_name="python -m benchmarks")
