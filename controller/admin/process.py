"""The controller process: the admin API, and beside it the tuner and the upkeep of engines and documents."""

import asyncio
import contextlib
import ipaddress
import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import structlog
import uvicorn
from prometheus_client import CollectorRegistry

from controller.admin.app import create_app
from controller.admin.forecasts import Forecaster
from controller.admin.services import Services
from controller.controller_metrics import ControllerMetrics
from controller.settings import AdminSettings, BadSettings
from controller.store import StoreUnavailable, open_store
from controller.tuning import Tuning
from engines import logs
from tuner.plan import BadDocument

SHUTDOWN_S = 5
BOOTSTRAP_S = 1.0

log = structlog.get_logger(__name__)


def run(settings: AdminSettings) -> int:
    """Serve until SIGTERM or SIGINT; the exit code. Raises `BadSettings` for what cannot work."""
    _refuse_exposure(settings)
    with _listener(settings.admin_host, settings.admin_port) as listener, _signals_end_quietly():
        logs.configure(settings.log_level)
        if settings.admin_token is None:
            log.warning("no admin token: every process on this machine may change the plan; set TRIMTAB_ADMIN_TOKEN")
        asyncio.run(_serve(settings, listener))
    return 0


async def _serve(settings: AdminSettings, listener: socket.socket) -> None:
    async with contextlib.aclosing(open_store(settings.redis_url)) as store, asyncio.TaskGroup() as tasks:
        services = Services.wire(store, settings.model)
        registry = CollectorRegistry()
        await _bootstrap(services)
        upkeep = [tasks.create_task(_keep_up(services))]
        forecaster = None
        if settings.tune:
            tuning = Tuning(services, settings, ControllerMetrics(registry))
            upkeep.append(tasks.create_task(tuning.run()))
            forecaster = Forecaster(tuning, services.plans.check)
        config = uvicorn.Config(
            create_app(services, settings.admin_token, forecaster, registry),
            log_config=None,
            timeout_graceful_shutdown=SHUTDOWN_S,
        )
        await _Server(config, lambda: _say_ready(settings.ready_file, listener)).serve(sockets=[listener])
        for task in upkeep:
            task.cancel()


async def _keep_up(services: Services) -> None:
    """Have documents where there are none, after a store lost its data too, and keep engines in line with the plan."""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(services.applier.run())
        while True:
            await asyncio.sleep(BOOTSTRAP_S)
            try:
                await _bootstrap(services)
            except Exception:  # one bad round must take neither the API nor the next round with it
                log.exception("documents could not be put in place")


async def _bootstrap(services: Services) -> None:
    try:
        await services.bootstrap()
    except StoreUnavailable as error:
        log.warning("waiting for the store", error=str(error))
    except BadDocument as error:
        log.error("a document in the store is none; put another", error=str(error))


class _Server(uvicorn.Server):
    """Calls back once it serves."""

    def __init__(self, config: uvicorn.Config, serves: Callable[[], None]) -> None:
        super().__init__(config)
        self._serves = serves

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._serves()


def _say_ready(ready_file: Path | None, listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    log.info("admin API serves", url=url)
    if ready_file is not None:
        _write_whole(ready_file, json.dumps({"url": url, "pid": os.getpid()}))


def _write_whole(path: Path, text: str) -> None:
    """Write at once or not at all: whoever waits for the file never reads half of it."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    partial.replace(path)


def _refuse_exposure(settings: AdminSettings) -> None:
    if settings.admin_token is None and not _is_loopback(settings.admin_host):
        raise BadSettings(
            f"the admin API on {settings.admin_host} could be used by anybody who reaches it: "
            "set TRIMTAB_ADMIN_TOKEN, or listen on 127.0.0.1"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _listener(host: str, port: int) -> socket.socket:
    """A bound socket (port 0: any free one); raises `BadSettings` when the address cannot be had."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise BadSettings(
            f"cannot listen on {host}:{port} ({error.strerror}): choose another with --port or TRIMTAB_ADMIN_PORT"
        ) from error


@contextlib.contextmanager
def _signals_end_quietly() -> Iterator[None]:
    """uvicorn raises the signal that ended it once more when it is done; by then there is nothing left to end."""
    kept = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
