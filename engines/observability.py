"""What every process can be told about its logs and traces; part of its settings."""

from typing import Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, field_validator

LogLevel = Literal["debug", "info", "warning", "error"]
TRACES_PATH = "/v1/traces"


class LogSettings(BaseModel, frozen=True):
    """Logs go to standard error."""

    log_level: LogLevel = Field(default="info", description="least severe events that are logged")

    @field_validator("log_level", mode="before")
    @classmethod
    def _any_case(cls, level: object) -> object:
        return level.lower() if isinstance(level, str) else level


class Observability(LogSettings, frozen=True):
    """Of a process that works on requests: traces go nowhere, unless there is an address for them."""

    traces_url: str | None = Field(
        default=None,
        description="where spans go by OTLP over HTTP, for example http://127.0.0.1:4318; without it nowhere",
    )
    traces_ratio: float = Field(
        default=1.0, ge=0, le=1, description="share of requests to trace, of those whose caller has not decided it"
    )

    @field_validator("traces_url")
    @classmethod
    def _whole_address(cls, url: str | None) -> str | None:
        if not url:
            return None
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("not the address of a collector: give http://host:port")
        if parts.username is not None or parts.password is not None:
            raise ValueError("addresses are logged: give credentials in OTEL_EXPORTER_OTLP_HEADERS instead")
        return parts._replace(path=TRACES_PATH).geturl() if parts.path in ("", "/") else url
