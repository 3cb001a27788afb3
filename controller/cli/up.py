"""`trimtab up`: the whole stack on this machine."""

import enum
from pathlib import Path
from typing import Annotated

import typer

from controller.cli.model import SMALL


class LoadName(enum.StrEnum):
    NONE = "none"
    CHAT = "chat"
    MIXED = "mixed"
    SHIFTING = "shifting"


class EngineName(enum.StrEnum):
    EMULATED = "emulated"
    SGLANG = "sglang"


ENGINES = {EngineName.EMULATED: 4, EngineName.SGLANG: 2}


def up(
    engine: Annotated[EngineName, typer.Option(help="What the engines are: modelled, or real")] = EngineName.EMULATED,
    engines: Annotated[
        int | None, typer.Option(min=1, max=64, help="How many engines [default: 4 emulated or 2 SGLang]")
    ] = None,
    profile: Annotated[str, typer.Option(help="What emulated engines are like: a name or a TOML file")] = "laptop",
    model: Annotated[Path, typer.Option(help="Model folder of SGLang engines")] = SMALL,
    device: Annotated[str, typer.Option(help="What SGLang engines run on")] = "cpu",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Of the OpenAI API; 0 takes a free one")] = 8080,
    admin_port: Annotated[int, typer.Option(min=0, max=65535, help="Of the admin API; 0 takes a free one")] = 8081,
    load: Annotated[LoadName, typer.Option(help="Requests to send, so that there is something to see")] = LoadName.NONE,
    load_rate: Annotated[
        float | None, typer.Option(min=0.01, help="Requests a second of --load [default: 1.5 for each engine]")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="TRIMTAB_API_KEY", help="Bearer token that clients must send; none unless given"),
    ] = None,
    admin_token: Annotated[
        str | None,
        typer.Option(envvar="TRIMTAB_ADMIN_TOKEN", help="Bearer token of the admin API; made up unless given"),
    ] = None,
    redis_url: Annotated[
        str | None,
        typer.Option(
            envvar="TRIMTAB_REDIS_URL",
            help="A Redis to use; one is started unless given. With a password in it, rather set TRIMTAB_REDIS_URL",
        ),
    ] = None,
    traces_url: Annotated[str | None, typer.Option(help="Where spans go by OTLP over HTTP; without it nowhere")] = None,
    traces_ratio: Annotated[float | None, typer.Option(help="Share of requests to trace [default: 1]")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error [default: info]")] = None,
) -> None:
    """Run Redis, engines, controller and router on this machine until Ctrl-C.

    Other commands on the same machine find address and token by themselves.

    * `trimtab up`
    * `trimtab up --engines 2 --load mixed`
    * `trimtab up --port 0 --admin-port 0`
    * `trimtab up --engine sglang --model .models/smollm2-135m`
    * `trimtab up --traces-url http://127.0.0.1:4318`
    """
    from controller.cli.errors import CliError
    from controller.settings import StackObservability
    from controller.settings import load as load_settings
    from controller.stack.parts import StackOptions
    from controller.stack.stack import StackFailed, run

    options = StackOptions(
        engines=engines or ENGINES[engine],
        profile=profile,
        port=port,
        admin_port=admin_port,
        model_folder=model if engine is EngineName.SGLANG else None,
        device=device,
        load=None if load is LoadName.NONE else load.value,
        load_rate=load_rate,
        api_key=api_key,
        admin_token=admin_token,
        redis_url=redis_url,
        observability=load_settings(
            StackObservability, traces_url=traces_url, traces_ratio=traces_ratio, log_level=log_level
        ),
    )
    try:
        raise typer.Exit(run(options, typer.echo))
    except StackFailed as error:
        raise CliError(str(error)) from error
