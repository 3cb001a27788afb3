"""`trimtab load`: requests for a router, so that there is something to see."""

import enum
from typing import Annotated

import typer


class Mix(enum.StrEnum):
    CHAT = "chat"
    MIXED = "mixed"
    SHIFTING = "shifting"


def load(
    url: Annotated[str, typer.Option(help="Address of the router")] = "http://127.0.0.1:8080",
    model: Annotated[str, typer.Option(envvar="TRIMTAB_MODEL", help="Model to ask for")] = "trimtab-demo",
    mix: Annotated[Mix, typer.Option(help="What to send; shifting changes its kind every three minutes")] = Mix.MIXED,
    rate: Annotated[float, typer.Option(min=0.01, help="Requests a second")] = 2.0,
    seed: Annotated[int, typer.Option(help="The same seed sends the same requests")] = 0,
) -> None:
    """Send requests to a router until Ctrl-C, whether or not earlier ones are done.

    The API key comes from TRIMTAB_API_KEY.

    * `trimtab load --mix shifting --rate 3`
    """
    from controller.stack.demo_load import run

    run(url, model, mix.value, rate, seed)
