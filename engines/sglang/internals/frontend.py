"""SGLang's HTTP process: what it can be asked, and how one request is looked on at."""

import array
import contextlib
import copy
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Protocol

from sglang.srt.managers.io_struct import AbortReq, GenerateReqInput

from engines.sglang.internals.carried import TrimtabCall


class Observer(Protocol):
    """Looks on, and takes part, while SGLang serves one request."""

    def generate(
        self, original: Callable[..., AsyncGenerator[Any, None]], obj: Any, request: Any
    ) -> AsyncGenerator[Any, None]: ...
    def on_requests(self, rids: Sequence[str]) -> None: ...
    def on_tokenized(self, rid: str, ids: Any) -> Any:
        """The ids to serve instead, or `None`."""
        ...


class _Observing:
    """Mixed into SGLang's tokenizer manager, one light object a request over the state of the real one."""

    __slots__ = ()
    observer: Observer

    async def generate_request(self, obj: Any, request: Any = None) -> AsyncGenerator[Any, None]:
        original = super().generate_request  # type: ignore[misc]
        async with contextlib.aclosing(self.observer.generate(original, obj, request)) as answers:
            async for answer in answers:
                yield answer

    def _init_req_state(self, obj: Any, request: Any = None) -> None:
        super()._init_req_state(obj, request)  # type: ignore[misc]
        self.observer.on_requests([obj.rid] if isinstance(obj.rid, str) else obj.rid)

    async def _tokenize_one_request(self, obj: Any) -> Any:
        tokenized = await super()._tokenize_one_request(obj)  # type: ignore[misc]
        ids = self.observer.on_tokenized(obj.rid, tokenized.input_ids)
        if ids is not None:
            tokenized.input_ids = array.array("q", ids)
        return tokenized


class Frontend:
    """SGLang's HTTP process."""

    def __init__(self, tokenizer_manager: Any, app: Any) -> None:
        self._manager = tokenizer_manager
        self.app = app
        self.on_abort: Callable[[], None] = lambda: None
        """Called when a generation that is none of ours is aborted."""
        bases = (_Observing, type(tokenizer_manager))
        self._observing = type("ObservedTokenizerManager", bases, {"__slots__": ("observer",)})

    @property
    def model(self) -> str:
        return str(self._manager.served_model_name)

    @property
    def host_port(self) -> tuple[str, int]:
        return str(self._manager.server_args.host), int(self._manager.server_args.port)

    @property
    def exports_metrics(self) -> bool:
        return bool(self._manager.server_args.enable_metrics)

    def start(self) -> None:
        """Take answers from the scheduler; from the event loop."""
        self._manager.auto_create_handle_loop()

    def send(self, payload: bytes) -> None:
        self._manager._dispatch_to_scheduler(TrimtabCall(payload=payload))

    def encode(self, text: str) -> list[int]:
        """Token ids of text that goes on where other text ended."""
        return list(self._manager.tokenizer.encode(text, add_special_tokens=False))

    def abort(self, rid: str) -> None:
        self._manager.abort_request(rid)

    def dispatch_abort(self, rid: str) -> None:
        """Abort in the scheduler what this process has no state of."""
        self._manager._dispatch_to_scheduler(AbortReq(rid=rid))

    async def prefill(self, rid: str, ids: list[int]) -> None:
        """Compute a prompt into the context cache. Raises `ValueError`; cancelling it aborts it."""
        params = {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True}
        request = GenerateReqInput(rid=rid, input_ids=ids, sampling_params=params, log_metrics=False)
        async with contextlib.aclosing(self._manager.generate_request(request)) as answers:
            async for _ in answers:
                pass

    async def serve(self, api: str, body: Any, rid: str, observer: Observer, raw_request: Any) -> Any:
        """What SGLang's own endpoint answers to `body`. Raises `pydantic.ValidationError`, `ValueError`."""
        from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest

        kind = ChatCompletionRequest if api == "chat" else CompletionRequest
        request = kind.model_validate(body)
        request.rid = rid
        state = self.app.state
        endpoint = copy.copy(state.openai_serving_chat if api == "chat" else state.openai_serving_completion)
        endpoint.tokenizer_manager = self._observed(observer)
        return await endpoint.handle_request(request, raw_request)

    def _observed(self, observer: Observer) -> Any:
        observed: Any = object.__new__(self._observing)
        observed.__dict__ = self._manager.__dict__
        observed.observer = observer
        return observed
