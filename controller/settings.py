"""Settings of the processes in this package: frozen, validated at start, each fault named with its remedy.

Every field can come from the environment (`TRIMTAB_` + upper-case name), from `.env`, or from a command-line flag.
"""

import secrets
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from engines.observability import LogSettings, Observability
from tuner.plan import explain
from tuner.settings import TunerSettings

Settings = TypeVar("Settings", bound=BaseSettings)
MIB = 1024 * 1024
LogRequests = Literal["off", "lines", "prompts"]


class BadSettings(Exception):
    """Settings that cannot work; the message has one sentence for each fault."""


class Timeouts(BaseModel, frozen=True):
    """How long the router waits for each step, seconds."""

    connect_s: float = Field(default=2.0, gt=0)
    verb_s: float = Field(default=5.0, gt=0, description="prep_recv, abort, info, load, config, tokenize")
    transfer_s: float = Field(default=60.0, gt=0, description="remote_send: prefill and transfer")
    first_byte_s: float = Field(default=300.0, gt=0, description="start_generate until the first byte of a stream")
    answer_s: float = Field(default=1800.0, gt=0, description="start_generate until a plain answer is whole")
    idle_s: float = Field(default=120.0, gt=0, description="between two pieces of a generation")


class Limits(BaseModel, frozen=True):
    """Bounds on what one client may make the router hold."""

    header_bytes: int = Field(default=32 * 1024, ge=1024)
    body_bytes: int = Field(default=16 * MIB, ge=1024)
    header_s: float = Field(default=10.0, gt=0, description="from the first byte of a request to its last header")
    body_s: float = Field(default=30.0, gt=0, description="from the last header to the end of the body")
    keep_alive_s: float = Field(default=75.0, gt=0, description="an idle connection is closed after this")
    send_s: float = Field(default=60.0, gt=0, description="a client that takes nothing for this long is dropped")
    connections: int = Field(default=10_000, ge=1)
    queue: int = Field(default=1024, ge=0, description="requests that may wait for room at a time")
    queue_s: float = Field(default=30.0, gt=0, description="longest wait for room before 429")
    resume_bytes: int = Field(
        default=4 * MIB, ge=0, description="bytes of a stream kept so that it can go on elsewhere if its engine dies"
    )


class RouterSettings(Observability, BaseSettings):
    """One router process."""

    model_config = SettingsConfigDict(
        env_prefix="TRIMTAB_", env_nested_delimiter="__", env_file=".env", extra="ignore", frozen=True
    )

    model: str = Field(min_length=1, description="name clients ask for; also names the keys in Redis")
    router_id: str = Field(default_factory=lambda: f"router-{secrets.token_hex(3)}", pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    host: str = "127.0.0.1"
    port: int = Field(default=8080, ge=0, le=65535)
    engines: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(), description="base URLs of engines to use besides those that announce themselves in Redis"
    )
    redis_url: str | None = Field(default=None, description="redis://… ; without it the router runs on its own")
    tokenizer: Path | None = Field(default=None, description="tokenizer.json or model folder; else engines tokenize")
    api_key: SecretStr | None = Field(default=None, description="bearer token that clients must send")
    tls_cert: Path | None = None
    tls_key: Path | None = None
    workers: int = Field(default=1, ge=1, le=64, description="processes that share the port")
    slo_header: str = "x-slo-class"
    heartbeat_s: float = Field(default=1.0, gt=0)
    load_poll_s: float = Field(default=0.5, gt=0, description="how often each engine is asked for its load")
    record_buffer: int = Field(default=10_000, ge=1, description="request records kept while Redis is away")
    drain_s: float = Field(default=30.0, ge=0, description="how long running streams may go on after SIGTERM")
    ready_file: Path | None = Field(default=None, description="written with the address once the router serves")
    log_requests: LogRequests = Field(
        default="off", description="a log line for each request that has ended; 'prompts' has the prompt in it"
    )
    timeouts: Timeouts = Timeouts()
    limits: Limits = Limits()

    @field_validator("engines", mode="before")
    @classmethod
    def _split_and_check(cls, value: object) -> tuple[str, ...]:
        given = value.split(",") if isinstance(value, str) else value
        urls = tuple(str(url).rstrip("/") for url in given) if isinstance(given, list | tuple) else ()
        for url in urls:
            if not url.startswith("http://"):
                raise ValueError(f"{url!r} is not an engine address: give http://host:port")
        return urls

    @model_validator(mode="after")
    def _tls_is_whole(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key belong together: set both for TLS, or neither")
        return self

    @model_validator(mode="after")
    def _has_a_source_of_engines(self) -> Self:
        if not self.engines and self.redis_url is None:
            raise ValueError("no way to find engines: give --engine URL (several times) or --redis-url")
        return self


class StackObservability(Observability, BaseSettings):
    """Logs and traces of everything that `trimtab up` starts."""

    model_config = SettingsConfigDict(env_prefix="TRIMTAB_", env_file=".env", extra="ignore", frozen=True)


class AdminSettings(LogSettings, BaseSettings):
    """One controller process: the admin API, and the tuner beside it."""

    model_config = SettingsConfigDict(
        env_prefix="TRIMTAB_", env_nested_delimiter="__", env_file=".env", extra="ignore", frozen=True
    )

    model: str = Field(min_length=1, description="name of the served model; also names the keys in Redis")
    admin_host: str = "127.0.0.1"
    admin_port: int = Field(default=8081, ge=0, le=65535)
    admin_token: SecretStr | None = Field(default=None, description="bearer token for everything that changes things")
    redis_url: str = Field(default="redis://127.0.0.1:6379/0")
    ready_file: Path | None = Field(default=None, description="written with the address once the API serves")
    controller_id: str = Field(
        default_factory=lambda: f"controller-{secrets.token_hex(3)}",
        pattern=r"^[A-Za-z0-9_.-]{1,64}$",
        description="must be unique: two that share a name would both lead",
    )
    tune: bool = Field(default=True, description="without it this controller serves the admin API only")
    tick_s: float = Field(default=5.0, ge=0.1, le=3600, description="between two decisions")
    lease_s: float = Field(default=6.0, ge=0.5, le=600, description="a leader that dies is replaced within this")
    recovery_s: float = Field(
        default=10.0, ge=0, le=600, description="after Redis was away: until everybody has reported, decide nothing"
    )
    tuner: TunerSettings = Field(default=TunerSettings(), description="as TRIMTAB_TUNER__DWELL_S and so on")


def load(kind: type[Settings], **given: Any) -> Settings:
    """Build settings from flags over the environment; flags that are `None` do not count.

    Raises `BadSettings` that names every bad key, its value and what would be right.
    """
    try:
        return kind(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        raise BadSettings(f"{explain(error)}. Set it with a flag or as TRIMTAB_<NAME> in the environment.") from error
