"""Errors as `application/problem+json` (RFC 9457): a status, a title and a sentence that says what to do."""

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from controller.admin.engine_calls import UnknownEngine
from controller.admin.forecasts import CannotPredict
from controller.admin.migrations import SameEngine
from controller.admin.pins import NothingToPin
from controller.admin.plans import UnknownPattern, UnknownVersion
from controller.admin.slos import UnknownClass
from controller.search_worker import WorkerFailed
from controller.store.protocol import StoreUnavailable, VersionConflict
from engines.errors import EngineError
from tuner.plan import BadDocument

STATUS: Mapping[type[Exception], int] = {
    BadDocument: 422,
    UnknownPattern: 422,
    SameEngine: 422,
    UnknownVersion: 404,
    UnknownClass: 404,
    UnknownEngine: 404,
    VersionConflict: 409,
    NothingToPin: 409,
    CannotPredict: 409,
    StoreUnavailable: 503,
    WorkerFailed: 503,
}
"""The one place where what went wrong becomes an HTTP status."""


class Problem(BaseModel):
    """Body of every error answer."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    actual_version: int | None = None
    """With 409: the version in force."""


def problem(
    status: int, detail: str, headers: Mapping[str, str] | None = None, actual_version: int | None = None
) -> JSONResponse:
    """An error answer; `detail` is the sentence."""
    body = Problem(title=HTTPStatus(status).phrase, status=status, detail=detail, actual_version=actual_version)
    return JSONResponse(
        body.model_dump(exclude_none=True), status, dict(headers or {}), media_type="application/problem+json"
    )


def install(app: FastAPI) -> None:
    """Have `app` answer every known exception as a problem."""
    for kind in STATUS:
        app.add_exception_handler(kind, _known)
    app.add_exception_handler(EngineError, _engine)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(Exception, _unexpected)


async def _known(_: Request, error: Exception) -> JSONResponse:
    actual = error.actual if isinstance(error, VersionConflict) else None
    detail = f"{error}. Try again when Redis is back." if isinstance(error, StoreUnavailable) else str(error)
    return problem(STATUS[type(error)], detail, actual_version=actual)


async def _engine(_: Request, error: Exception) -> JSONResponse:
    """An engine's own 4xx is passed on (429 keeps its meaning); everything else is a bad gateway."""
    status = getattr(error, "status", 502)
    return problem(status if 400 <= status < 500 else 502, f"The engine answered: {error}")


async def _http(_: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, HTTPException):
        raise error
    return problem(error.status_code, str(error.detail), error.headers)


async def _invalid(_: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, RequestValidationError):
        raise error
    return problem(422, sentences(error.errors()))


async def _unexpected(_: Request, error: Exception) -> JSONResponse:
    return problem(500, f"This is a fault of the controller ({type(error).__name__}); its log has the details.")


def sentences(faults: Sequence[Mapping[str, Any]]) -> str:
    """One sentence for each fault, each naming the bad key and its value."""
    return "; ".join(_sentence(fault) for fault in faults)


def _sentence(fault: Mapping[str, Any]) -> str:
    where = ".".join(str(part) for part in fault["loc"] if part not in ("body", "path", "query")) or "body"
    message = str(fault["msg"]).removeprefix("Value error, ")
    value = fault.get("input")
    shown = "" if isinstance(value, dict | list | None) else f" (got {value!r:.80})"
    return f"{where}: {message}{shown}"
