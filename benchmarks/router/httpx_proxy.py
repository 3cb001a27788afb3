"""The proxy that one writes first: FastAPI on one side, httpx on the other. A peer of the router, nothing more.

Served by `uvicorn --factory benchmarks.router.httpx_proxy:app`; `BENCHMARK_ENGINES` holds the engines' addresses.
"""

import itertools
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
from fastapi import FastAPI, Request
from starlette.background import BackgroundTask
from starlette.responses import StreamingResponse

ENGINES_VARIABLE = "BENCHMARK_ENGINES"


def app() -> FastAPI:
    # A client for each engine: the work of httpx's pool grows with the square of its connections.
    clients = [_client(engine) for engine in os.environ[ENGINES_VARIABLE].split(",")]
    turns = itertools.cycle(clients)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for client in clients:
                await stack.enter_async_context(client)
            yield

    proxy = FastAPI(lifespan=lifespan)

    @proxy.get("/ready")
    async def ready() -> dict[str, bool]:
        return {"ready": True}

    @proxy.post("/{path:path}")
    async def forward(path: str, request: Request) -> StreamingResponse:
        return await _forward(next(turns), path, request)

    return proxy


def _client(engine: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    # No time-out: streams last as long as they last.
    return httpx.AsyncClient(base_url=engine, timeout=None, limits=limits, trust_env=False)  # noqa: S113


async def _forward(client: httpx.AsyncClient, path: str, request: Request) -> StreamingResponse:
    headers = {"content-type": request.headers.get("content-type", "application/json")}
    upstream = client.build_request("POST", f"/{path}", content=await request.body(), headers=headers)
    answer = await client.send(upstream, stream=True)
    return StreamingResponse(
        answer.aiter_raw(),
        status_code=answer.status_code,
        media_type=answer.headers.get("content-type"),
        background=BackgroundTask(answer.aclose),
    )
