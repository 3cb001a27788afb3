"""The plugin that SGLang loads, in each of its processes: entry point `sglang.srt.plugins`, see `pyproject.toml`."""

import secrets
import time
from collections.abc import Callable
from typing import Any

import structlog
from prometheus_client import CollectorRegistry

from engines.sglang import internals
from engines.sglang.counters import EngineCollector, SharedMetrics
from engines.sglang.endpoints import Gate, Verbs, add_metrics
from engines.sglang.engine import Engine
from engines.sglang.lifetime import extend_lifespan, running
from engines.sglang.scheduler import Handler
from engines.sglang.settings import BadSettings, SglangSettings, load_settings
from engines.sglang.transport import NixlTransport, NoTransport
from engines.sglang.view import Identity, Transport
from engines.telemetry import Recorder

log = structlog.get_logger(__name__)


def register() -> None:
    """Hook the microserving verbs in. Ends the process when they cannot work: SGLang would start without them."""
    try:
        settings = load_settings()
        internals.check_version(settings.untested_version)
    except (BadSettings, internals.UntestedVersion) as error:
        raise SystemExit(str(error)) from error
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
    registry = CollectorRegistry()
    if frontend.exports_metrics:
        engine.updated = SharedMetrics(engine.counters, registry).update
    else:
        registry.register(EngineCollector(engine.counters))
        add_metrics(frontend.app, registry)
    frontend.app.include_router(Verbs(engine, frontend, settings.max_body_bytes).router())
    frontend.app.add_middleware(Gate, engine=engine)
    extend_lifespan(frontend.app, lambda: running(frontend, engine, recorder, settings))
    return engine.bridge.on_report
