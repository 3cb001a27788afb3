"""Settings of the plugin, from the environment: SGLang's own command line stays SGLang's."""

from typing import Any

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from engines.observability import Observability

ENV_PREFIX = "TRIMTAB_SGLANG_"
MIB = 1024 * 1024


class BadSettings(Exception):
    """Settings that cannot work; one sentence for each fault."""


class SglangSettings(Observability, BaseSettings):
    """Each field is `TRIMTAB_SGLANG_` + its upper-case name in the environment."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, frozen=True, extra="ignore")

    engine_id: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")
    """A random one when it is not given."""
    advertise_url: str | None = Field(default=None, pattern=r"^http://")
    """Base URL that routers and other engines are told; else host and port of the server."""
    kind: str | None = Field(default=None, min_length=1)
    """Which latency model applies; else device and model."""
    redis_url: str | None = None
    """Where heartbeats and samples go; without it nowhere."""
    heartbeat_s: float = Field(default=1.0, gt=0)
    transfer_stall_s: float = Field(default=30.0, gt=0)
    """A transfer whose other side says nothing for this long has failed."""
    checksum: bool = False
    """Verify the bytes of every transfer. Costs a pass over them on both sides."""
    max_body_bytes: int = Field(default=32 * MIB, ge=1024)
    untested_version: bool = False
    """Start with a version of SGLang that this was not tested with."""


def load_settings(**given: Any) -> SglangSettings:
    """Settings from arguments over the environment. Raises `BadSettings`."""
    try:
        return SglangSettings(**given)
    except ValidationError as error:
        raise BadSettings(_explain(error)) from error


def _explain(error: ValidationError) -> str:
    faults = [f"{ENV_PREFIX}{str(fault['loc'][0]).upper()}: {fault['msg']}" for fault in error.errors()]
    return "; ".join(faults)
