"""What can go wrong between a caller and an engine. One class per machine-readable `error.code`.

An engine raises these and its server maps them once to an HTTP answer; `engines.client` turns the answer back into
the same class, so that both sides speak of one thing.
"""

from typing import ClassVar


class EngineError(Exception):
    """Base of everything here. `status` is the HTTP status, `code` goes into `error.code`."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal"
    quotes_clients: ClassVar[bool] = True
    """Whether the message may hold what a client sent: whoever judges a body quotes from it."""

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s

    @property
    def for_logs(self) -> str:
        """The code, and the message where that is about engines only."""
        return self.code if self.quotes_clients else f"{self.code}: {self.message}"


class BadRequest(EngineError):
    """The call itself is wrong; sending it again cannot help."""

    status = 400
    code = "bad_request"


class UnknownModel(EngineError):
    status = 404
    code = "model_not_found"


class ContextTooLong(EngineError):
    status = 400
    code = "context_length_exceeded"


class LayoutMismatch(EngineError):
    """Sender and receiver disagree on model, dtype, layers, heads, page size or parallelism."""

    status = 409
    code = "kv_layout_mismatch"
    quotes_clients = False


class ReservationGone(EngineError):
    """The reservation expired, was aborted, or belongs to another request or another life of the engine."""

    status = 410
    code = "reservation_gone"
    quotes_clients = False


class BodyTooLarge(EngineError):
    status = 413
    code = "body_too_large"


class NoKvRoom(EngineError):
    """No room for a reservation now; `retry_after_s` says when to ask again."""

    status = 429
    code = "no_kv_room"
    quotes_clients = False


class TransferFailed(EngineError):
    """The KV did not arrive whole: cut, corrupt or refused. The reservation is still there to retry into."""

    status = 502
    code = "transfer_failed"
    quotes_clients = False


class Draining(EngineError):
    status = 503
    code = "draining"
    quotes_clients = False


class EngineUnreachable(EngineError):
    """No answer at all: refused, reset, closed half-way or timed out. Raised by the client only."""

    status = 502
    code = "engine_unreachable"
    quotes_clients = False


class EngineTimeout(EngineUnreachable):
    status = 504
    code = "engine_timeout"


def _concrete(root: type[EngineError]) -> dict[str, type[EngineError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found |= _concrete(child)
    return found


BY_CODE = _concrete(EngineError)


def told(error: Exception) -> str:
    """What may be logged of an error that a client's request caused."""
    return error.for_logs if isinstance(error, EngineError) else type(error).__name__


def from_answer(status: int, code: str | None, message: str, retry_after_s: float | None = None) -> EngineError:
    """The exception that an engine's error answer stands for; an unknown code keeps only its message."""
    kind = BY_CODE.get(code or "", BadRequest if 400 <= status < 500 else EngineError)
    return kind(message, retry_after_s=retry_after_s)
