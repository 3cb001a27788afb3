"""The tree of commands, and what every operator's error looks like."""

import sys
from importlib.metadata import version as installed_version

import typer

from controller.cli import load, model, plan, serve, slo, top, tuner, up
from controller.cli.errors import CliError
from controller.settings import BadSettings

HELP = """Steer a fleet of LLM engines for the most goodput.

Start everything on this machine, say what clients are promised, and see how the plan follows the traffic:

* `trimtab up`
* `trimtab slo set default --ttft-ms 500 --tpot-ms 50`
* `trimtab top`
* `trimtab explain`
"""

app = typer.Typer(
    name="trimtab",
    help=HELP,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
app.command("up")(up.up)
app.command("router")(serve.router)
app.command("controller")(serve.controller)
app.command("load")(load.load)
app.add_typer(serve.engine_app, name="engine")
app.add_typer(model.app, name="model")
app.add_typer(plan.app, name="plan")
app.add_typer(slo.app, name="slo")
app.command("mode")(tuner.mode)
app.command("explain")(tuner.explain)
app.command("decisions")(tuner.decisions)
app.command("what-if")(tuner.what_if)
app.command("top")(top.top)


@app.command("version")
def version() -> None:
    """Print the version."""
    typer.echo(installed_version("trimtab"))


def main() -> None:
    """Run a command. What an operator did wrong ends in one sentence on stderr, never in a traceback."""
    try:
        app()
    except (CliError, BadSettings) as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(1)
