"""Calling the admin API."""

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import httpx

from controller.cli.admin import Target
from controller.cli.errors import CliError

TIMEOUT_S = 10.0


class AdminClient:
    """The admin API as methods. Every failure is a `CliError` with the server's own sentence."""

    def __init__(self, target: Target) -> None:
        headers = {} if target.token is None else {"authorization": f"Bearer {target.token}"}
        self._url = target.url
        self._client = httpx.Client(base_url=target.url, headers=headers, timeout=TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: TracebackType | type[BaseException] | BaseException | None) -> None:
        self._client.close()

    def get(self, path: str) -> dict[str, Any]:
        return self._call("GET", path)

    def put(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return self._call("PUT", path, body)

    def post(self, path: str, body: Mapping[str, Any], timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
        return self._call("POST", path, body, timeout_s)

    def delete(self, path: str) -> dict[str, Any]:
        return self._call("DELETE", path)

    def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, timeout_s: float = TIMEOUT_S
    ) -> dict[str, Any]:
        try:
            answer = self._client.request(method, path, json=body, timeout=timeout_s)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise CliError(
                f"no admin API answers at {self._url} ({error}): start one with `trimtab up`, or give --admin-url"
            ) from error
        if not answer.is_success:
            raise CliError(_sentence(answer))
        return _object(answer)


def _sentence(answer: httpx.Response) -> str:
    detail = str(_object(answer).get("detail", answer.reason_phrase))
    hint = " Give --admin-token or set TRIMTAB_ADMIN_TOKEN." if answer.status_code == httpx.codes.UNAUTHORIZED else ""
    return detail + hint


def _object(answer: httpx.Response) -> dict[str, Any]:
    try:
        content = answer.json()
    except ValueError as error:
        raise CliError(f"{answer.url} answered {answer.status_code} but no JSON: is that the admin API?") from error
    return content if isinstance(content, dict) else {"detail": str(content)}
