"""`trimtab top`: a live view of what clients get and what the engines do."""

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Annotated

import typer

from controller.cli.admin import one_stack
from controller.cli.errors import CliError

if TYPE_CHECKING:
    from controller.top import Observer

REFRESH_S = 1.0


def top(
    redis_url: Annotated[
        str | None, typer.Option(envvar="TRIMTAB_REDIS_URL", help="Redis of the fleet [default: that of `trimtab up`]")
    ] = None,
    model: Annotated[
        str | None, typer.Option(envvar="TRIMTAB_MODEL", help="Served model [default: that of `trimtab up`]")
    ] = None,
    window_s: Annotated[float, typer.Option(min=1, max=600, help="Seconds that figures are taken over")] = 30.0,
    once: Annotated[bool, typer.Option("--once", help="Print one view and leave")] = False,
) -> None:
    """Watch goodput, attainment, latencies, the plan and the load of every engine. Ctrl-C leaves.

    * `trimtab top`
    * `trimtab top --once --window-s 60`
    """
    if redis_url is None or model is None:
        redis_url, model = _of_running_stack(redis_url, model)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_watch(redis_url, model, window_s, once))


def _of_running_stack(redis_url: str | None, model: str | None) -> tuple[str, str]:
    stack = one_stack()
    if stack is None:
        raise CliError("no stack runs here: start one with `trimtab up`, or give both --redis-url and --model")
    return redis_url or stack.redis_url, model or stack.model


async def _watch(redis_url: str, model: str, window_s: float, once: bool) -> None:
    from controller.store import StoreUnavailable, open_store
    from controller.top import Observer

    try:
        async with contextlib.aclosing(open_store(redis_url)) as store:
            observer = Observer(store, model, window_s)
            await (_print_once(observer) if once else _refresh(observer))
    except (StoreUnavailable, ValueError) as error:
        raise CliError(f"cannot read {redis_url}: {error}") from error


async def _print_once(observer: "Observer") -> None:
    from rich.console import Console

    from controller.cli.top_drawing import draw

    Console(highlight=False).print(draw(await observer.view(time.time())))


async def _refresh(observer: "Observer") -> None:
    from rich.live import Live
    from rich.text import Text

    from controller.cli.top_drawing import draw
    from controller.store import StoreUnavailable

    with Live(auto_refresh=False, screen=True) as live:
        while True:
            try:
                live.update(draw(await observer.view(time.time())), refresh=True)
            except StoreUnavailable as error:
                live.update(Text(f"Redis does not answer ({error}); waiting for it."), refresh=True)
            await asyncio.sleep(REFRESH_S)
