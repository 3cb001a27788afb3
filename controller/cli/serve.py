"""Commands that run one process each: `router`, `engine emulated`, `engine sglang` and `controller`."""

import os
from pathlib import Path
from typing import Annotated

import typer

from controller.cli.errors import CliError

Model = Annotated[str | None, typer.Option(help="Name that clients ask for; also names the keys in Redis")]
RedisUrl = Annotated[str | None, typer.Option(help="redis://host:port/0")]
Host = Annotated[str | None, typer.Option(help="Address to listen on; loopback unless given")]
TracesUrl = Annotated[
    str | None, typer.Option(help="Where spans go by OTLP over HTTP, for example http://127.0.0.1:4318")
]
TracesRatio = Annotated[
    float | None, typer.Option(help="Share of requests to trace, unless the caller decided it [default: 1]")
]
LogLevel = Annotated[str | None, typer.Option(help="debug, info, warning or error [default: info]")]
ReadyFile = Annotated[Path | None, typer.Option(help="Written with the address, as JSON, once the process serves")]

engine_app = typer.Typer(help="Run an engine.", no_args_is_help=True)


def router(
    model: Model = None,
    host: Host = None,
    port: Annotated[int | None, typer.Option(help="0 takes a free one [default: 8080]")] = None,
    engine: Annotated[
        list[str] | None, typer.Option(help="Address of an engine, besides those in Redis; repeat")
    ] = None,
    redis_url: RedisUrl = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="tokenizer.json or model folder; without it engines count tokens")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(help="Bearer token of clients. Arguments are public: rather set TRIMTAB_API_KEY")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="PEM file; with --tls-key")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM file; with --tls-cert")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes that share the port [default: 1]")] = None,
    router_id: Annotated[str | None, typer.Option(help="Made up unless given")] = None,
    drain_s: Annotated[
        float | None, typer.Option(help="How long streams may go on after SIGTERM [default: 30]")
    ] = None,
    log_requests: Annotated[
        str | None,
        typer.Option(help="A log line for each request: off, lines, or prompts with the prompt in it [default: off]"),
    ] = None,
    log_level: LogLevel = None,
    traces_url: TracesUrl = None,
    traces_ratio: TracesRatio = None,
    ready_file: ReadyFile = None,
) -> None:
    """Serve the OpenAI API over a fleet of engines.

    Every option may come from the environment instead: TRIMTAB_MODEL, TRIMTAB_REDIS_URL, TRIMTAB_API_KEY, …

    * `trimtab router --model llama --redis-url redis://127.0.0.1:6379/0`
    """
    from controller.router.app import run
    from controller.settings import RouterSettings, load

    settings = load(
        RouterSettings,
        model=model,
        host=host,
        port=port,
        engines=tuple(engine) if engine else None,
        redis_url=redis_url,
        tokenizer=tokenizer,
        api_key=api_key,
        tls_cert=tls_cert,
        tls_key=tls_key,
        workers=workers,
        router_id=router_id,
        drain_s=drain_s,
        log_requests=log_requests,
        log_level=log_level,
        traces_url=traces_url,
        traces_ratio=traces_ratio,
        ready_file=ready_file,
    )
    try:
        code = run(settings)
    except OSError as error:
        raise CliError(f"the router cannot serve on {settings.host}:{settings.port}: {error}") from error
    raise typer.Exit(code)


def controller(
    model: Model = None,
    host: Host = None,
    port: Annotated[int | None, typer.Option(help="0 takes a free one [default: 8081]")] = None,
    admin_token: Annotated[
        str | None, typer.Option(help="Bearer token of operators. Arguments are public: rather set TRIMTAB_ADMIN_TOKEN")
    ] = None,
    redis_url: RedisUrl = None,
    tick_s: Annotated[float | None, typer.Option(help="Seconds between two decisions [default: 5]")] = None,
    lease_s: Annotated[
        float | None, typer.Option(help="Another controller takes over within this if the leader dies [default: 6]")
    ] = None,
    controller_id: Annotated[str | None, typer.Option(help="Unique; made up unless given")] = None,
    tune: Annotated[
        bool | None, typer.Option("--tune/--no-tune", help="Whether to change plans besides serving the API")
    ] = None,
    log_level: LogLevel = None,
    ready_file: ReadyFile = None,
) -> None:
    """Serve the admin API, and keep choosing the plan with the most goodput.

    Run as many as you like: one leads and decides, the others stand by and answer the API too.

    Every option may come from the environment instead: TRIMTAB_MODEL, TRIMTAB_ADMIN_PORT, TRIMTAB_ADMIN_TOKEN, …;
    the tuner's own settings too: TRIMTAB_TUNER__DWELL_S, TRIMTAB_TUNER__MIN_GAIN, …

    * `TRIMTAB_ADMIN_TOKEN=… trimtab controller --model llama --redis-url redis://127.0.0.1:6379/0`
    """
    from controller.admin.process import run
    from controller.settings import AdminSettings, load

    settings = load(
        AdminSettings,
        model=model,
        admin_host=host,
        admin_port=port,
        admin_token=admin_token,
        redis_url=redis_url,
        tick_s=tick_s,
        lease_s=lease_s,
        controller_id=controller_id,
        tune=tune,
        log_level=log_level,
        ready_file=ready_file,
    )
    raise typer.Exit(run(settings))


@engine_app.command("emulated")
def emulated(
    profile: Annotated[
        str | None, typer.Option(help="What it is like: a name or a TOML file [default: laptop]")
    ] = None,
    engine_id: Annotated[str | None, typer.Option(help="Made up unless given")] = None,
    host: Host = None,
    port: Annotated[int | None, typer.Option(help="0 takes a free one [default: 0]")] = None,
    kv_host: Annotated[str | None, typer.Option(help="Address that KV transfers arrive at")] = None,
    kv_port: Annotated[
        int | None, typer.Option(help="Port that KV transfers arrive at [default: any free one]")
    ] = None,
    kv_advertise: Annotated[str | None, typer.Option(help="host:port that senders are told instead")] = None,
    advertise_url: Annotated[str | None, typer.Option(help="Address that routers are told instead")] = None,
    model: Annotated[str | None, typer.Option(help="Served model name instead of the profile's")] = None,
    kv_capacity_tokens: Annotated[int | None, typer.Option(help="KV room instead of the profile's")] = None,
    context_length_tokens: Annotated[int | None, typer.Option(help="Longest context instead of the profile's")] = None,
    time_scale: Annotated[float | None, typer.Option(help="Modelled times are multiplied by this [default: 1]")] = None,
    redis_url: RedisUrl = None,
    log_level: LogLevel = None,
    traces_url: TracesUrl = None,
    traces_ratio: TracesRatio = None,
    ready_file: ReadyFile = None,
) -> None:
    """Run an engine whose answers are made up and whose time is modelled, over the same HTTP as a real one.

    Every option may come from the environment instead: TRIMTAB_ENGINE_PROFILE, TRIMTAB_ENGINE_REDIS_URL, …

    * `trimtab engine emulated --profile laptop --redis-url redis://127.0.0.1:6379/0`
    """
    from engines.emulated.process import run
    from engines.emulated.settings import BadSettings, load_settings

    try:
        settings = load_settings(
            profile=profile,
            engine_id=engine_id,
            host=host,
            port=port,
            kv_host=kv_host,
            kv_port=kv_port,
            kv_advertise=kv_advertise,
            advertise_url=advertise_url,
            model=model,
            kv_capacity_tokens=kv_capacity_tokens,
            context_length_tokens=context_length_tokens,
            time_scale=time_scale,
            redis_url=redis_url,
            log_level=log_level,
            traces_url=traces_url,
            traces_ratio=traces_ratio,
            ready_file=ready_file,
        )
        code = run(settings)
    except BadSettings as error:
        raise CliError(str(error)) from error
    except OSError as error:
        raise CliError(f"the engine cannot serve: {error}") from error
    raise typer.Exit(code)


@engine_app.command("sglang", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def sglang(
    context: typer.Context,
    model: Annotated[str, typer.Option("--model", "--model-path", help="Model folder, or a name SGLang can download")],
    device: Annotated[str | None, typer.Option(help="cpu, cuda, … [default: what SGLang finds]")] = None,
    engine_id: Annotated[str | None, typer.Option(help="Made up unless given")] = None,
    host: Host = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one")] = 0,
    kind: Annotated[str | None, typer.Option(help="Which latency model applies [default: device and model]")] = None,
    advertise_url: Annotated[str | None, typer.Option(help="Address that routers are told instead")] = None,
    cores: Annotated[str | None, typer.Option(help="CPU cores to stay on, for example 0 or 0-3,8")] = None,
    redis_url: RedisUrl = None,
    traces_url: TracesUrl = None,
    traces_ratio: TracesRatio = None,
    ready_file: ReadyFile = None,
) -> None:
    """Run SGLang with the microserving verbs. Flags that are not listed here are SGLang's own and passed on.

    SGLang is looked for in this Python; TRIMTAB_SGLANG_PYTHON names another one that has it.

    * `trimtab engine sglang --model meta-llama/Llama-3.1-8B-Instruct --tp-size 2 --redis-url redis://127.0.0.1:6379/0`
    * `trimtab engine sglang --model .models/smollm2-135m --device cpu --cores 0`
    """
    from engines.sglang.launcher import CannotLaunch, LaunchOptions, new_engine_id, start

    settings = {
        "ENGINE_ID": engine_id or os.environ.get("TRIMTAB_SGLANG_ENGINE_ID") or new_engine_id(),
        "KIND": kind,
        "ADVERTISE_URL": advertise_url,
        "REDIS_URL": redis_url,
        "TRACES_URL": traces_url,
        "TRACES_RATIO": None if traces_ratio is None else str(traces_ratio),
    }
    options = LaunchOptions(
        model=model,
        device=device,
        host=host or "127.0.0.1",
        port=port,
        cores=None if cores is None else _cores(cores),
        ready_file=ready_file,
        plugin_settings={f"TRIMTAB_SGLANG_{name}": value for name, value in settings.items() if value is not None},
        flags=tuple(context.args),
    )
    try:
        start(options)
    except (CannotLaunch, OSError) as error:
        raise CliError(f"the engine cannot start: {error}") from error


def _cores(text: str) -> frozenset[int]:
    """`0-3,8` as numbers."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        try:
            found.update(range(int(first), int(last or first) + 1))
        except ValueError as error:
            raise CliError(f"--cores {text!r} is not a list of cores: give for example 0 or 0-3,8") from error
    return frozenset(found)
