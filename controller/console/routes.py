"""Serving the console's files."""

from collections.abc import Mapping
from pathlib import Path

from fastapi import FastAPI
from starlette.datastructures import MutableHeaders
from starlette.responses import RedirectResponse
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

STATIC = Path(__file__).parent / "static"
PATH = "/console"

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    )
)
"""Nothing inline, nothing from elsewhere, no frames; text never becomes markup."""

HEADERS: Mapping[str, str] = {
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    # Browsers ask each time (and mostly hear 304), so that page and API are never of different versions.
    "cache-control": "no-cache",
}


def install(app: FastAPI) -> None:
    """Serve the console at `/console/`, and lead there from `/`. The files hold no secrets, so they need no token."""
    app.mount(PATH, _with_headers(StaticFiles(directory=STATIC, html=True)), name="console")

    @app.get("/", include_in_schema=False)
    async def home() -> RedirectResponse:
        return RedirectResponse(f"{PATH}/")


def _with_headers(files: ASGIApp) -> ASGIApp:
    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await files(scope, receive, send_with_headers)

    return serve
