"""How to talk to an engine: the verbs as methods, over pooled connections, each with its own time-out."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar
from urllib.parse import urlsplit

import msgspec

from engines import errors
from engines.http1 import Exchange, Pool, Sink
from engines.protocol import Config, PrepRecvAnswer, RemoteSendAnswer, ResumedChoice, Tokenize, Tokens
from engines.tracing import Trace
from engines.types import EngineInfo, EngineLoad

Answer = TypeVar("Answer")
Api = Literal["completions", "chat"]


@dataclass(frozen=True, slots=True)
class VerbTimeouts:
    """Seconds. `verb_s` is for everything that answers at once."""

    connect_s: float = 2.0
    verb_s: float = 5.0
    transfer_s: float = 60.0
    first_byte_s: float = 300.0
    """Of a stream."""
    answer_s: float = 1800.0
    """A whole answer that is not streamed: its first byte is its end."""
    idle_s: float = 120.0


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, JSON-encoded once for all the calls of one request."""

    ids_json: bytes
    tokens: int

    @classmethod
    def of(cls, ids: list[int]) -> "Prompt":
        return cls(msgspec.json.encode(ids), len(ids))


class _Raised(msgspec.Struct):
    message: str = ""
    code: str | int | None = None


class _ErrorAnswer(msgspec.Struct):
    error: _Raised


class _Collected:
    """A sink that gathers a whole answer into a future."""

    def __init__(self, done: asyncio.Future[tuple[int, Mapping[bytes, bytes], bytes]]) -> None:
        self._done = done
        self._status = 0
        self._headers: Mapping[bytes, bytes] = {}
        self._body: list[bytes] = []

    def on_head(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        self._status = status
        self._headers = headers

    def on_body(self, data: bytes) -> None:
        self._body.append(data)

    def on_end(self) -> None:
        if not self._done.done():
            self._done.set_result((self._status, self._headers, b"".join(self._body)))

    def on_lost(self, error: errors.EngineUnreachable) -> None:
        if not self._done.done():
            self._done.set_exception(error)


class EngineClient:
    """One engine. Owns its connections; close it with `aclose()`.

    Every method raises an `engines.errors.EngineError`: what the engine answered, or `EngineUnreachable` /
    `EngineTimeout` when it did not. Cancelling a call closes its connection, which the engine notices.
    """

    def __init__(self, url: str, timeouts: VerbTimeouts | None = None, token: str | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname is None:
            raise ValueError(f"{url!r} is not an engine address: give http://host:port")
        self.url = url
        self._timeouts = timeouts or VerbTimeouts()
        self._pool = Pool(parts.hostname, parts.port or 80, self._timeouts.connect_s)
        auth = f"authorization: Bearer {token}\r\n" if token else ""
        self._headers = f"host: {parts.netloc}\r\ncontent-type: application/json\r\n{auth}".encode()

    async def prep_recv(
        self, request_id: str, prompt: Prompt, end: int, ttl_s: float, trace: Trace | None = None
    ) -> PrepRecvAnswer:
        """Reserve room for `prompt[:end]`; raises `NoKvRoom` at once when there is none."""
        body = {"request_id": request_id, "prompt": msgspec.Raw(prompt.ids_json), "end": end, "ttl_s": ttl_s}
        return await self._post("prep_recv", body, PrepRecvAnswer, self._timeouts.verb_s, trace)

    async def remote_send(
        self, request_id: str, prompt: Prompt, kv_addr_info: str, begin: int, end: int, trace: Trace | None = None
    ) -> RemoteSendAnswer:
        """Have this engine prefill `prompt[begin:end]` and write the KV into the receiver's reservation."""
        body = {
            "request_id": request_id,
            "prompt": msgspec.Raw(prompt.ids_json),
            "kv_addr_info": kv_addr_info,
            "begin": begin,
            "end": end,
        }
        return await self._post("remote_send", body, RemoteSendAnswer, self._timeouts.transfer_s, trace)

    def start_generate(
        self,
        request_id: str,
        api: Api,
        client_body: bytes,
        sink: Sink,
        prompt: Prompt | None = None,
        begin: int = 0,
        resume: list[ResumedChoice] | None = None,
        trace: Trace | None = None,
        *,
        stream: bool = True,
    ) -> Exchange:
        """Start a generation whose answer goes to `sink`. The client's body, which says `stream`, goes in as it came.

        `client_body` must be a valid JSON document; it is not encoded again.
        """
        parts = [f'{{"request_id":"{request_id}","api":"{api}","begin":{begin}'.encode()]
        if prompt is not None:
            parts += (b',"prompt":', prompt.ids_json)
        if resume is not None:
            parts += (b',"resume":', msgspec.json.encode(resume))
        parts += (b',"body":', client_body, b"}")
        request = self._request(b"POST /microserving/start_generate HTTP/1.1\r\n", b"".join(parts), trace)
        first_byte_s = self._timeouts.first_byte_s if stream else self._timeouts.answer_s
        return Exchange(self._pool, request, sink, first_byte_s, self._timeouts.idle_s).start()

    async def abort(self, request_id: str, trace: Trace | None = None) -> None:
        """Free a reservation or stop a generation; fine if there is none."""
        await self._post("abort", {"request_id": request_id}, None, self._timeouts.verb_s, trace)

    async def info(self) -> EngineInfo:
        return await self._get("info", EngineInfo)

    async def load(self) -> EngineLoad:
        return await self._get("load", EngineLoad)

    async def config(self, config: Config) -> Config:
        """Turn live knobs; the values now in force."""
        return await self._post("config", config, Config, self._timeouts.verb_s)

    async def drain(self, on: bool) -> None:
        await self._post("drain", {"on": on}, None, self._timeouts.verb_s)

    async def tokenize(self, asked: Tokenize, trace: Trace | None = None) -> Tokens:
        body = {name: value for name in asked.__struct_fields__ if (value := getattr(asked, name)) is not None}
        return await self._call(b"POST /tokenize HTTP/1.1\r\n", body, Tokens, self._timeouts.verb_s, trace)

    async def aclose(self) -> None:
        await self._pool.aclose()

    async def _get(self, verb: str, kind: type[Answer]) -> Answer:
        return await self._call(f"GET /microserving/{verb} HTTP/1.1\r\n".encode(), None, kind, self._timeouts.verb_s)

    async def _post(
        self, verb: str, body: object, kind: type[Answer] | None, timeout_s: float, trace: Trace | None = None
    ) -> Answer:
        line = f"POST /microserving/{verb} HTTP/1.1\r\n".encode()
        return await self._call(line, body, kind, timeout_s, trace)

    async def _call(
        self, line: bytes, body: object, kind: type[Answer] | None, timeout_s: float, trace: Trace | None = None
    ) -> Answer:
        done = self._pool.loop.create_future()
        encoded = b"" if body is None else msgspec.json.encode(body)
        exchange = Exchange(self._pool, self._request(line, encoded, trace), _Collected(done), timeout_s, timeout_s)
        exchange.start()
        try:
            status, headers, content = await done
        except asyncio.CancelledError:
            exchange.abort()
            raise
        if status >= 400:
            raise answered_error(status, headers, content)
        return _decode(content, kind)

    def _request(self, line: bytes, body: bytes, trace: Trace | None) -> bytes:
        traced = trace.as_headers() if trace is not None else b""
        return b"%b%b%bcontent-length: %d\r\n\r\n%b" % (line, self._headers, traced, len(body), body)


def answered_error(status: int, headers: Mapping[bytes, bytes], content: bytes) -> errors.EngineError:
    """The exception that an engine's error answer stands for, whatever shape its body has."""
    try:
        raised = msgspec.json.decode(content, type=_ErrorAnswer).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        raised = _Raised(message=content[:200].decode(errors="replace"))
    code = raised.code if isinstance(raised.code, str) else None
    return errors.from_answer(status, code, raised.message, retry_after_s(headers))


def retry_after_s(headers: Mapping[bytes, bytes]) -> float | None:
    try:
        return float(headers[b"retry-after"])
    except (KeyError, ValueError):
        return None


def _decode(content: bytes, kind: type[Answer] | None) -> Answer:
    if kind is None:
        return None  # type: ignore[return-value]
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise errors.EngineUnreachable(f"the engine's answer is not a {kind.__name__}: {error}") from error
