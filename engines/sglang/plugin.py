"""The plugin that SGLang loads, in each of its processes: entry point `sglang.srt.plugins`, see `pyproject.toml`."""

import os
import secrets
import time
from collections.abc import Callable
from typing import Any

import structlog
from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector

from engines import logs
from engines.metrics import Mirror
from engines.sglang import internals
from engines.sglang.endpoints import Gate, Verbs, add_metrics
from engines.sglang.engine import Engine
from engines.sglang.lifetime import Export, extend_lifespan, running
from engines.sglang.scheduler import Handler
from engines.sglang.settings import BadSettings, SglangSettings, load_settings
from engines.sglang.transport import NixlTransport, NoTransport
from engines.sglang.view import Identity, Transport
from engines.telemetry import Recorder
from engines.tracing import closing, make_tracer
from engines.verb_spans import Traced

log = structlog.get_logger(__name__)


def register() -> None:
    """Hook the microserving verbs in. Ends the process when they cannot work: SGLang would start without them."""
    try:
        settings = load_settings()
        internals.check_version(settings.untested_version)
    except (BadSettings, internals.UntestedVersion) as error:
        raise SystemExit(str(error)) from error
    logs.configure(settings.log_level, libraries=False)
    log.info("trimtab's microserving verbs", tested_with=internals.TESTED_VERSIONS)
    internals.register_messages()
    internals.SchedulerHooks(lambda scheduler: make_handler(scheduler, settings)).register()
    internals.FrontendHooks(lambda frontend: attach(frontend, settings)).register()


def make_handler(scheduler: Any, settings: SglangSettings) -> Handler:
    """The plugin's part in the scheduler process, over a scheduler that has its pools already."""
    model = str(scheduler.server_args.served_model_name)
    view = internals.SchedulerView(scheduler, model)
    epoch = secrets.token_hex(8)
    engine_id = settings.engine_id or f"sglang-{epoch[:6]}"
    agent = f"{engine_id}.{epoch}"
    transport, transports = open_transport(agent, view)
    return Handler(
        view,
        transport,
        Identity(
            engine_id=engine_id,
            kind=settings.kind or f"sglang-{view.device}-{model}",
            agent=agent,
            epoch=epoch,
            transports=transports,
        ),
        clock=time.monotonic,
        wall=time.time,
        new_nonce=lambda: secrets.token_hex(8),
        stall_s=settings.transfer_stall_s,
        with_checksums=settings.checksum,
    )


def open_transport(agent: str, view: internals.SchedulerView) -> tuple[Transport, tuple[str, ...]]:
    """NIXL over the pool, or a stand-in that says why there is none."""
    obstacle = view.obstacle
    if obstacle is None:
        try:
            return NixlTransport(agent, view.memory, view.device_id, view.buffers), ("nixl",)
        except ImportError as error:
            obstacle = f"NIXL cannot be imported: {error}"
    log.warning("this engine exchanges no KV", reason=obstacle)
    return NoTransport(obstacle), ()


def attach(frontend: internals.Frontend, settings: SglangSettings) -> Callable[[bytes], None]:
    """The plugin's part in the HTTP process, before the server runs; what takes the scheduler's reports."""
    recorder = Recorder()
    engine = Engine(frontend, frontend.send, recorder, clock=time.monotonic, wall=time.time)
    frontend.on_abort = engine.count_abort
    export = exporting(frontend, engine)
    frontend.app.include_router(Verbs(engine, frontend, settings.max_body_bytes).router())
    frontend.app.add_middleware(Gate, engine=engine)
    engine_id = settings.engine_id or f"sglang-{os.getpid()}"
    tracer = make_tracer(settings, "trimtab-engine", engine_id, engine.counters.lost_spans)
    if tracer is not None:
        frontend.app.add_middleware(Traced, tracer=tracer, now_s=engine.now_s)
        extend_lifespan(frontend.app, lambda: closing(tracer))
    extend_lifespan(frontend.app, lambda: running(frontend, engine, recorder, settings, export))
    return engine.bridge.on_report


def exporting(frontend: internals.Frontend, engine: Engine) -> Export:
    """The engine's metrics go among SGLang's own, or have a page where SGLang shows none."""
    registry = CollectorRegistry()
    if not frontend.exports_metrics:
        add_metrics(frontend.app, registry, engine.load)
        return registry.register

    def among_others(collector: Collector) -> None:
        mirror = Mirror(collector, registry)
        mirror.update()
        engine.updated = mirror.update

    return among_others
