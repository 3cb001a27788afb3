"""The router's work: one request from its arrival to its record."""

import asyncio
import hmac
import secrets
from collections.abc import Callable, Coroutine, Mapping

import structlog

from controller.metrics import RouterMetrics
from controller.router import spans
from controller.router.board import Board
from controller.router.call import Call, Desk, Generate
from controller.router.ending import record_of, request_log
from controller.router.fleet import Engine, Lease
from controller.router.http import ClientConnection, Headers, Request
from controller.router.openai import APIS, ApiError, models_page, no_such_page, parse
from controller.router.patterns import data_parallel
from controller.router.records import Recorder
from controller.router.relay import Delivery, PlainRelay, Refused, StreamRelay
from controller.router.replicate import Replicator
from controller.router.tokens import NO_TOKENS
from controller.settings import RouterSettings
from engines.errors import EngineError, EngineTimeout, EngineUnreachable, told
from engines.http1 import Exchange
from engines.records import Outcome
from engines.tracing import Span, Trace, Tracer
from tuner.plan import DATA_PARALLEL

log = structlog.get_logger()

Exposition = Callable[[str | None], tuple[bytes, str]]
"""What a scrape gets that accepts these content types: content and its type."""

EVENT_STREAM = b"text/event-stream"
RETRY_ELSEWHERE = frozenset({429, 500, 502, 503, 504})
FULL = frozenset({429, 503})
OUTCOMES = {"shed": Outcome.SHED, "no_room": Outcome.NO_ROOM}


class EngineFull(EngineUnreachable):
    """An engine had no room for the request. If no other has, the client should hear that, and when to come back."""

    def __init__(self, message: str, refusal: EngineError) -> None:
        super().__init__(message)
        self.refusal = refusal


class Service:
    """Answers clients. Collaborators are given and closed by whoever made them."""

    def __init__(
        self,
        settings: RouterSettings,
        desk: Desk,
        board: Board,
        recorder: Recorder,
        replicator: Replicator,
        metrics: RouterMetrics,
        exposition: Exposition,
        background: Callable[[Coroutine[None, None, None]], object],
        wall_clock_s: Callable[[], float],
        tracer: Tracer | None = None,
    ) -> None:
        self._model = settings.model
        self._router_id = settings.router_id
        self._resume_bytes = settings.limits.resume_bytes
        self._class_header = settings.slo_header.lower().encode()
        key = settings.api_key
        self._authorization = f"Bearer {key.get_secret_value()}".encode() if key is not None else None
        self._desk = desk
        self._board = board
        self._recorder = recorder
        self._replicator = replicator
        self._metrics = metrics
        self._exposition = exposition
        self._background = background
        self._wall_clock_s = wall_clock_s
        self._begin_span = spans.beginner(tracer)
        self._request_log = request_log(settings.log_requests)
        self._loop = desk.loop
        self._served = 0
        # Not the router's id, which may be the same after a restart: engines and readers of records tell requests apart
        # by this.
        self._id_prefix = secrets.token_hex(4)
        self._idle = asyncio.Event()
        self._idle.set()
        self.inflight = 0
        self.draining = False
        self._pages: dict[bytes, Callable[[Request, ClientConnection], None]] = {
            b"/v1/models": self._models,
            b"/health": lambda _, client: client.respond(200, b'{"status":"ok"}'),
            b"/ready": self._ready,
            b"/metrics": self._measurements,
        }

    def __call__(self, request: Request, client: ClientConnection) -> asyncio.Task[None] | None:
        """Handle one request: small pages at once, completions as a task."""
        path = request.path
        try:
            if path in APIS and request.method == b"POST":
                return self._loop.create_task(self._serve(request, client))
            page = self._pages.get(path)
            if page is None or request.method not in (b"GET", b"HEAD"):
                raise no_such_page(path, request.method, known=page is not None or path in APIS)
            page(request, client)
        except ApiError as error:
            client.respond(error.status, error.body(), extra=error.headers())
        return None

    def gate(self, target: bytes, headers: Mapping[bytes, bytes]) -> tuple[int, str] | None:
        """Refuse who may not come in, before any of the body is taken."""
        if not target.startswith(b"/v1/"):
            if headers.get(b"content-length", b"0") == b"0" and b"transfer-encoding" not in headers:
                return None
            return 400, "only pages under /v1/ take a body"
        if self._authorization is None:
            return None
        if hmac.compare_digest(headers.get(b"authorization", b""), self._authorization):
            return None
        return 401, "wrong or missing API key: send 'Authorization: Bearer …'"

    async def drained(self) -> None:
        """Return once nothing is in flight."""
        await self._idle.wait()

    async def _serve(self, request: Request, client: ClientConnection) -> None:
        """One request's life: understand, place, answer; release and record whatever happens."""
        delivery = Delivery(self._resume_bytes)
        span = self._begin_span(request)
        call: Call | None = None
        self._began()
        try:
            call = self._understand(request, span)
            self._note_arrival(call, request)
            await self._place(call)
            await self._answer(call, client, delivery)
        except (ApiError, Refused, EngineError) as error:
            self._apologise(error, client, delivery)
        except asyncio.CancelledError:
            if not delivery.complete:
                delivery.outcome, delivery.status = self._departure(call, request, delivery), 499
            raise
        except Exception:  # the edge of a request: a defect must not leave its client without an answer
            log.exception("request_failed", **(call.ids if call is not None else {}))
            self._apologise(ApiError(500, "the router failed", code="internal"), client, delivery)
        finally:
            self._end(call, request, span, delivery)

    def _understand(self, request: Request, span: Span) -> Call:
        asked = parse(request.path, request.body, self._model)
        header = request.headers.get(self._class_header)
        slos, plan = self._board.slos, self._board.plan
        slo_class = slos.resolve(header.decode("latin-1") if header is not None else None)
        self._served += 1
        request_id = f"{self._id_prefix}-{self._served:x}"
        slo = slos.classes[slo_class]
        return Call(request_id, asked, plan, self._board.pattern, slo_class, slo, span, self._desk)

    def _note_arrival(self, call: Call, request: Request) -> None:
        """Demand is counted before anything is done for it: what waits or fails is demand as well."""
        size = len(call.asked.content)
        arrived_s, version = request.arrived_s, call.plan.version
        self._metrics.arrived(call.slo_class)
        self._recorder.arrived(
            (call.request_id, arrived_s, call.prompt_tokens, size, call.slo_class, version, call.hashes)
        )

    async def _place(self, call: Call) -> None:
        """Tokenize if the pattern splits prompts, rank the engines, and pass admission."""
        if call.plan.pattern != DATA_PARALLEL and call.asked.splittable:
            try:
                await call.tokenize()
            except NO_TOKENS as error:
                # The engine that gets the whole body says what is wrong with it, if anything is.
                call.log.info("prompt_kept_whole", error=told(error))
                call.keep_whole = True
        call.replace()
        await call.admit()

    async def _answer(self, call: Call, client: ClientConnection, delivery: Delivery) -> None:
        """Run the pattern until an engine has completed the answer; place again when one fails."""
        full: EngineFull | None = None
        while True:
            if not call.placement.decode:
                raise full or ApiError(503, "no engine is available", code="no_engine", retry_after_s=1)
            call.attempts += 1
            try:
                return await self._attempt(call, client, delivery)
            except EngineUnreachable as error:
                call.log.warning("placement_failed", error=error.for_logs)
                if call.attempts >= call.plan.knobs.max_attempts or _would_last_again(call, error):
                    raise
                full = error if isinstance(error, EngineFull) else full
                self._metrics.retried.inc()
            except EngineError as error:
                if call.keep_whole or delivery.first_s is not None:
                    raise
                call.log.info("split_refused", error=error.for_logs)
                call.keep_whole = True
            call.release()
            call.replace()

    async def _attempt(self, call: Call, client: ClientConnection, delivery: Delivery) -> None:
        """Place the request once. What is left of a broken stream needs no pattern, only another engine."""
        if delivery.first_s is not None:
            self._resume(call, delivery)
        elif call.pattern is not data_parallel:
            return await self._run_pattern(call, client, delivery)
        return await self._generate(call, Generate(call.placement.decode[0]), client, delivery)

    async def _run_pattern(self, call: Call, client: ClientConnection, delivery: Delivery) -> None:
        steps = call.pattern(call)
        try:
            async for step in steps:
                return await self._generate(call, step, client, delivery)
        finally:
            await steps.aclose()
        raise ApiError(500, f"the pattern '{call.plan.pattern}' generated nothing", code="bad_pattern")

    def _resume(self, call: Call, delivery: Delivery) -> None:
        call.resume = delivery.resume()
        if call.resume is None:
            raise EngineError("the stream broke off and cannot be continued elsewhere")
        call.resumed += 1
        self._metrics.resumed.inc()

    def _generate(
        self, call: Call, step: Generate, client: ClientConnection, delivery: Delivery
    ) -> Coroutine[None, None, None]:
        """Have one engine generate, and pass its answer on. Every request comes by here, so no span means no cost."""
        if call.span.is_kept:
            return self._generate_traced(call, step, client, delivery)
        return self._generate_on(call, step, client, delivery, call.span.trace)

    async def _generate_traced(self, call: Call, step: Generate, client: ClientConnection, delivery: Delivery) -> None:
        with call.span.call("start_generate", step.engine_id) as span:
            await self._generate_on(call, step, client, delivery, span.trace)

    async def _generate_on(
        self, call: Call, step: Generate, client: ClientConnection, delivery: Delivery, trace: Trace | None
    ) -> None:
        engine = self._desk.fleet.get(step.engine_id)
        if engine is None:
            raise EngineUnreachable(f"engine {step.engine_id} left")
        call.decode_engine = engine.engine_id
        self._desk.prefixes.add(call.hashes, engine.engine_id)
        lease = call.hold(engine, max(1, call.prompt_tokens - step.begin))
        try:
            if call.asked.stream:
                await self._stream(call, step, engine, self._stream_relay(call, client, delivery, lease), trace)
                delivery.ended = True
                delivery.settle()
                client.end()
            else:
                engine.unreported.append(lease)
                await self._plain(call, step, engine, client, delivery, trace)
            call.done_with(engine.engine_id)
        except Refused as refused:
            if refused.status not in RETRY_ELSEWHERE:
                raise
            call.avoid(engine.engine_id)
            said = f"engine {engine.engine_id}: {refused.error.for_logs}"
            raise (EngineFull(said, refused.error) if refused.status in FULL else EngineUnreachable(said)) from refused
        except EngineUnreachable as error:
            call.avoid(engine.engine_id)
            if not isinstance(error, EngineTimeout):
                engine.failed()
            raise
        finally:
            lease.release()

    def _stream_relay(self, call: Call, client: ClientConnection, delivery: Delivery, lease: Lease) -> StreamRelay:
        done = self._loop.create_future()
        return StreamRelay(client, delivery, done, self._desk.now_s, lease.prefilled, _named(call))

    async def _stream(
        self, call: Call, step: Generate, engine: Engine, relay: StreamRelay, trace: Trace | None
    ) -> None:
        exchange = relay.exchange = self._start(call, step, engine, relay, trace)
        relay.follow()
        try:
            await relay.done
        finally:
            exchange.abort()

    async def _plain(
        self,
        call: Call,
        step: Generate,
        engine: Engine,
        client: ClientConnection,
        delivery: Delivery,
        trace: Trace | None,
    ) -> None:
        relay = PlainRelay(self._loop.create_future())
        exchange = self._start(call, step, engine, relay, trace)
        try:
            await relay.done
        finally:
            exchange.abort()
        delivery.timings = relay.timings
        delivery.first_s = delivery.last_s = self._desk.now_s()
        delivery.ended = True
        client.respond(200, relay.content, relay.content_type, _named(call))

    def _start(
        self, call: Call, step: Generate, engine: Engine, relay: StreamRelay | PlainRelay, trace: Trace | None
    ) -> Exchange:
        return engine.client.start_generate(
            call.request_id,
            call.asked.api,
            call.asked.raw,
            relay,
            call.prompt,
            step.begin,
            call.resume,
            trace,
            stream=call.asked.stream,
        )

    # edges

    def _apologise(self, error: ApiError | Refused | EngineError, client: ClientConnection, delivery: Delivery) -> None:
        """Turn what went wrong into an answer, or into the last event of a stream that has begun."""
        if isinstance(error, Refused) and delivery.first_s is None:
            delivery.status, delivery.outcome = error.status, Outcome.REJECTED
            delivery.error_code = error.error.code
            client.respond(error.status, error.content)
            return
        shown = (
            error if isinstance(error, ApiError) else _for_client(error.error if isinstance(error, Refused) else error)
        )
        delivery.status, delivery.error_code = shown.status, shown.code
        delivery.outcome = OUTCOMES.get(shown.code or "", Outcome.REJECTED if shown.status < 500 else Outcome.FAILED)
        if isinstance(error, EngineTimeout):
            delivery.outcome = Outcome.TIMEOUT
        if delivery.ended:
            return
        if delivery.first_s is None:
            client.respond(shown.status, shown.body(), extra=shown.headers())
        else:
            client.write(b"data: %b\n\n" % shown.body())
            client.end()

    def _departure(self, call: Call | None, request: Request, delivery: Delivery) -> Outcome:
        """Who leaves after waiting longer than was promised has seen the promise broken."""
        now_s = self._desk.now_s() if delivery.first_s is None else delivery.first_s
        late = call is not None and (now_s - request.arrived_s) * 1e3 > call.slo.ttft_ms
        return Outcome.GAVE_UP if late else Outcome.CLIENT_LEFT

    def _began(self) -> None:
        self.inflight += 1
        self._idle.clear()

    def _end(self, call: Call | None, request: Request, span: Span, delivery: Delivery) -> None:
        """Release everything, stop what may still run on engines, and report."""
        self.inflight -= 1
        if not self.inflight:
            self._idle.set()
        if call is None:
            self._metrics.refused(delivery.outcome)
            spans.end_refused(span, delivery.status, delivery.error_code)
            return
        call.release()
        for engine_id in call.touched:
            self._background(self._abort(engine_id, call))
        if self._replicator.wanted and delivery.outcome is Outcome.OK:
            self._replicator.passed(call)
        now_s, wall_clock_s = self._desk.now_s(), self._wall_clock_s()
        record = record_of(call, request, delivery, self._router_id, now_s, wall_clock_s)
        trace = span.trace
        self._metrics.finished(record, call.slo, trace.traceparent if trace is not None else None)
        self._recorder.put(record)
        if span.is_kept:
            spans.end(span, call, record)
        if self._request_log is not None:
            self._request_log(call, record)

    async def _abort(self, engine_id: str, call: Call) -> None:
        """Free what a request may have left on an engine. One that is gone has nothing left to free."""
        if call.reserving is not None:
            await asyncio.gather(call.reserving, return_exceptions=True)
        engine = self._desk.fleet.get(engine_id)
        if engine is None:
            return
        try:
            with call.span.call("abort", engine_id) as step:
                await engine.client.abort(call.request_id, step.trace)
        except EngineError as error:
            if engine.view.available:
                self._metrics.leaks.inc()
                call.log.warning("abort_failed", engine=engine_id, error=error.for_logs)

    def _measurements(self, request: Request, client: ClientConnection) -> None:
        self._metrics.fold()
        content, content_type = self._exposition(request.headers.get(b"accept", b"").decode("latin-1"))
        client.respond(200, content, content_type.encode())

    def _models(self, _: Request, client: ClientConnection) -> None:
        client.respond(200, models_page(self._model))

    def _ready(self, _: Request, client: ClientConnection) -> None:
        if self.draining or not self._desk.fleet.available:
            why = "draining" if self.draining else "no engine is available"
            raise ApiError(503, why, code="not_ready")
        client.respond(200, b'{"status":"ready"}')


def _would_last_again(call: Call, error: EngineUnreachable) -> bool:
    """A plain answer that took too long was being made all the while; another engine would need as long."""
    return isinstance(error, EngineTimeout) and not call.asked.stream


def _for_client(error: EngineError) -> ApiError:
    """Engines' troubles as the client should see them."""
    if isinstance(error, EngineTimeout):
        return ApiError(504, "the engine took too long", code="engine_timeout")
    if isinstance(error, EngineFull):
        retry_after_s = error.refusal.retry_after_s or 1
        return ApiError(error.refusal.status, error.refusal.message, code="no_room", retry_after_s=retry_after_s)
    if isinstance(error, EngineUnreachable):
        return ApiError(502, "every engine that was tried failed", code="engine_failed")
    return ApiError(error.status, error.message, code=error.code, retry_after_s=error.retry_after_s)


def _named(call: Call) -> Headers:
    return b"x-request-id: %b\r\n" % call.request_id.encode()
