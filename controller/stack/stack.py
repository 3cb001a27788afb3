"""The embedded stack of `trimtab up`: Redis, engines, controller, router and a load, on this machine."""

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
from tenacity import AsyncRetrying, RetryError, retry_if_result, stop_after_delay, wait_fixed

from controller.settings import BadSettings
from controller.stack.checks import check, check_redis
from controller.stack.embedded import RedisDidNotStart, embedded_redis
from controller.stack.parts import Parts, StackOptions
from controller.stack.running import RunningStack, announced, runtime_dir
from controller.stack.supervise import ChildSpec, DiedAtStart, Say, Supervisor
from controller.stack.text import welcome
from engines.emulated.profile import ProfileError, load_profile

ENGINES_SEEN_S = 15.0


class StackFailed(Exception):
    """A part did not start; the message says which, and why. By then nothing runs any more."""


def run(options: StackOptions, say: Say) -> int:
    """Run the stack until Ctrl-C or SIGTERM; the exit code.

    Raises `BadSettings` before anything is started (a port that is taken, an unknown profile), `StackFailed` later.
    """
    model = _model(options)
    check(options)
    return asyncio.run(_until_stopped(options, model, say))


def _model(options: StackOptions) -> str:
    """The name that clients ask for."""
    if options.model_folder is not None:
        return options.model_folder.resolve().name
    try:
        return load_profile(options.profile).model
    except ProfileError as error:
        raise BadSettings(f"{error}. Choose one with --profile.") from error


async def _until_stopped(options: StackOptions, model: str, say: Say) -> int:
    """Run until the first signal, which stops the stack in order; the second does not wait for that."""
    if options.redis_url is not None:
        await check_redis(options.redis_url)
    stack = _Stack(options, model, say)

    def stop() -> None:
        if serving.cancelling():
            stack.kill()
            return
        say("Stopping (once more: at once) ...")
        serving.cancel()

    serving = asyncio.create_task(stack.serve())
    with _on_signals(stop):
        await asyncio.wait([serving])
    stack.tidy_up(keep_logs=not serving.cancelled())
    if not serving.cancelled():
        serving.result()
    say("Stopped.")
    return 0


class _Stack:
    """One life of a stack. Everything it starts it ends, in reverse order, however it is left."""

    def __init__(self, options: StackOptions, model: str, say: Say) -> None:
        self._options = options
        self._model = model
        self._say = say
        self._folder = Path(tempfile.mkdtemp(prefix="trimtab-up-"))
        self._children = Supervisor(self._folder, say)

    def kill(self) -> None:
        """End every child at once."""
        self._children.kill_all()

    def tidy_up(self, keep_logs: bool) -> None:
        """Remove the logs unless they may be wanted."""
        if keep_logs or self._children.deaths:
            self._say(f"The logs are kept in {self._folder}.")
        else:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def serve(self) -> None:
        """Start everything in order of need, then wait to be cancelled."""
        try:
            async with contextlib.AsyncExitStack() as held:
                await self._start(held)
                await asyncio.Event().wait()
        except (DiedAtStart, RedisDidNotStart) as error:
            raise StackFailed(str(error)) from error

    async def _start(self, held: contextlib.AsyncExitStack) -> None:
        redis_url = await self._redis(held)
        children = await held.enter_async_context(self._children)
        admin_token = self._options.admin_token or secrets.token_urlsafe(24)
        parts = Parts(self._options, self._model, admin_token, redis_url)
        self._say(f"Starting {_what_engines(self._options)} ...")
        await children.start(*parts.engines())
        stack = RunningStack(
            pid=os.getpid(),
            model=self._model,
            admin_url=await self._one("controller", parts.controller()),
            url=await self._one("router", parts.router()),
            admin_token=admin_token,
            redis_url=redis_url,
            log_dir=str(self._folder),
        )
        await self._until_engines_are_seen(stack.url)
        self._say(welcome(stack, self._announce(held, stack), self._options.api_key is not None))
        if self._options.load is not None:
            await children.start(parts.load(self._options.load, stack.url))

    async def _redis(self, held: contextlib.AsyncExitStack) -> str:
        if self._options.redis_url is not None:
            return self._options.redis_url
        redis = await held.enter_async_context(embedded_redis())
        self._say(redis.source)
        return redis.url

    async def _one(self, what: str, spec: ChildSpec) -> str:
        self._say(f"Starting the {what} ...")
        (child,) = await self._children.start(spec)
        if child.url is None:
            raise DiedAtStart(f"the {what} does not say where it listens. {child.log_tail()}")
        return child.url

    async def _until_engines_are_seen(self, url: str) -> None:
        """The router serves before it has met the engines; whoever follows the printed advice should not notice."""
        patiently = AsyncRetrying(
            retry=retry_if_result(lambda ready: not ready), wait=wait_fixed(0.1), stop=stop_after_delay(ENGINES_SEEN_S)
        )
        try:
            async with httpx.AsyncClient() as client:
                await patiently(_is_ready, client, f"{url}/ready")
        except RetryError:
            self._say("The router has not met any engine yet; its log says why.")

    def _announce(self, held: contextlib.AsyncExitStack, stack: RunningStack) -> Path | None:
        try:
            return held.enter_context(announced(stack, runtime_dir()))
        except OSError as error:
            self._say(f"Cannot write {error.filename} ({error.strerror}): other commands need --admin-url and token.")
            return None


def _what_engines(options: StackOptions) -> str:
    if options.model_folder is None:
        return f"{options.engines} emulated engines, profile {options.profile}"
    return f"{options.engines} SGLang engines on {options.device}, model {options.model_folder} (takes a minute)"


async def _is_ready(client: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await client.get(url)).is_success
    except httpx.TransportError:
        return False


@contextlib.contextmanager
def _on_signals(act: Callable[[], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in signals:
        loop.add_signal_handler(number, act)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
