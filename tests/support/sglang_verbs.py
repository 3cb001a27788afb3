"""The SGLang engine's endpoints around a scheduler without SGLang."""

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from prometheus_client import CollectorRegistry

from engines.metrics import EngineCollector
from engines.sglang.endpoints import Gate, Verbs, add_metrics
from engines.sglang.engine import Engine
from engines.telemetry import Recorder
from engines.types import EngineInfo


class Alphabet:
    """Serves as SGLang's endpoints do: one id a character, and every answer goes on in the alphabet."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.aborted: list[str] = []
        self.pause_s = 0.0

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def abort(self, rid: str) -> None:
        self.aborted.append(rid)

    async def prefill(self, rid: str, ids: list[int]) -> None:
        packed = b"".join(token.to_bytes(4, "little") for token in ids)
        for _ in self._engine.prefill(rid, packed, 8):
            await asyncio.sleep(0.01)

    async def serve(self, api: str, body: Any, rid: str, observer: Any, raw_request: Any) -> Any:
        if "prompt" not in body:
            raise ValueError("there is no prompt")
        params = {"max_new_tokens": body.get("max_tokens", 3), "stop": body.get("stop"), "n": body.get("n", 1)}
        obj = SimpleNamespace(rid=rid, text=body["prompt"], input_ids=None, sampling_params=params)

        async def original(part: Any, _: Any) -> Any:
            for index in range(part.sampling_params["n"]):
                async for content in self._generate(part, index, observer):
                    yield content

        contents = observer.generate(original, obj, raw_request)
        if body.get("stream"):
            return StreamingResponse(self._events(contents, body), media_type="text/event-stream")
        found = [content async for content in contents if content["meta_info"]["finish_reason"]]
        document = {"id": rid, "choices": [{"index": content["index"], "text": content["text"]} for content in found]}
        return SimpleNamespace(model_dump_json=lambda by_alias: json.dumps(document))

    async def _generate(self, part: Any, index: int, observer: Any) -> Any:
        rid = part.rid
        observer.on_requests([rid])
        own = self.encode(part.text)
        ids = observer.on_tokenized(rid, own) or own
        text = ""
        for number in range(1, part.sampling_params["max_new_tokens"] + 1):
            await asyncio.sleep(self.pause_s)
            text += chr(ids[-1] + number + index)
            last = number == part.sampling_params["max_new_tokens"]
            meta = {
                "id": rid,
                "finish_reason": {"type": "length"} if last else None,
                "prompt_tokens": len(ids),
                "completion_tokens": number,
                "cached_tokens": len(ids) - 1,
            }
            yield {"index": index, "text": text, "meta_info": meta}

    async def _events(self, contents: Any, body: Any) -> Any:
        offsets: dict[int, int] = {}
        async for content in contents:
            index, text = content["index"], content["text"]
            choice = {
                "index": index,
                "text": text[offsets.get(index, 0) :],
                "finish_reason": (content["meta_info"]["finish_reason"] or {}).get("type"),
            }
            offsets[index] = len(text)
            event = {"id": content["meta_info"]["id"], "choices": [choice]}
            yield f"data: {json.dumps(event, separators=(',', ':'))}\n\n"
        yield "data: [DONE]\n\n"


@dataclass
class Served:
    url: str
    http: httpx.AsyncClient
    engine: Engine
    serving: Alphabet
    scheduler: Any
    server: uvicorn.Server

    async def post(self, verb: str, **body: object) -> httpx.Response:
        return await self.http.post(f"{self.url}/microserving/{verb}", json=body)

    async def load(self) -> dict[str, Any]:
        found: dict[str, Any] = (await self.http.get(f"{self.url}/microserving/load")).json()
        return found

    async def generate(self, **call: Any) -> httpx.Response:
        body = {"prompt": "abc", **call.pop("body", {})}
        return await self.post("start_generate", **{"request_id": "q", "api": "completions", "body": body, **call})


@asynccontextmanager
async def served(scheduler: Any, clock: Any, port: int) -> Any:
    serving = Alphabet(scheduler)
    engine = Engine(serving, scheduler.handler.on_call, Recorder(), clock, clock)
    scheduler.view.on_report = engine.bridge.on_report
    registry = CollectorRegistry()
    app = FastAPI()
    add_metrics(app, registry, engine.load)
    app.include_router(Verbs(engine, serving, 100_000).router())
    app.add_api_route("/v1/completions", lambda: "own", methods=["POST"])
    app.add_api_route("/ready", lambda: "ready", methods=["GET"])
    app.add_middleware(Gate, engine=engine)
    server = uvicorn.Server(
        uvicorn.Config(app, port=port, log_config=None, lifespan="off", timeout_graceful_shutdown=1)
    )
    url = f"http://127.0.0.1:{port}"
    async with asyncio.TaskGroup() as group, httpx.AsyncClient(timeout=20) as http:
        running = group.create_task(server.serve())
        polling = group.create_task(poll(scheduler))
        await engine.open(lambda found: info(found, url))
        registry.register(EngineCollector(engine.info, engine.counters, engine.last_load))
        while not server.started:
            await asyncio.sleep(0.01)
        try:
            yield Served(url, http, engine, serving, scheduler, server)
        finally:
            await engine.aclose()
            polling.cancel()
            server.should_exit = True
            await running


async def poll(scheduler: Any) -> None:
    while True:
        scheduler.handler.poll(busy=False)
        await asyncio.sleep(0.002)


def info(found: Any, url: str) -> EngineInfo:
    return EngineInfo(
        engine_id=found.peer.agent,
        url=url,
        kind="k",
        model="m",
        context_length_tokens=found.context_length_tokens,
        kv_capacity_tokens=found.kv_capacity_tokens,
        kv_layout=found.peer.layout,
        transports=found.transports,
        epoch=found.peer.epoch,
    )
