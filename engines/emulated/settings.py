"""Settings of one emulated engine: frozen, validated at start, each fault named with its remedy."""

import secrets
from pathlib import Path
from typing import Any, Self

import msgspec
from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from engines.emulated.profile import Profile, ProfileError, load_profile
from engines.observability import Observability

MIB = 1024 * 1024
ENV_PREFIX = "TRIMTAB_ENGINE_"


class BadSettings(Exception):
    """Settings that cannot work; the message has one sentence for each fault."""


class EmulatedSettings(Observability, BaseSettings):
    """One emulated engine. Each field is a flag, or `TRIMTAB_ENGINE_` + its upper-case name in the environment."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, frozen=True, extra="ignore", cli_kebab_case=True, cli_prog_name="engine"
    )

    profile: str = Field(default="laptop", description="name of a shipped profile, or path of a .toml file")
    engine_id: str = Field(
        default_factory=lambda: f"engine-{secrets.token_hex(3)}", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"
    )
    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535, description="0 picks a free one")
    kv_host: str = "127.0.0.1"
    kv_port: int = Field(default=0, ge=0, le=65535, description="where KV transfers arrive; 0 picks a free one")
    kv_advertise: str | None = Field(
        default=None, pattern=r"^[^:\s]+:\d{1,5}$", description="host:port that senders are told to connect to"
    )
    advertise_url: str | None = Field(
        default=None, pattern=r"^http://", description="base URL that routers are told; else host and port"
    )
    model: str | None = Field(default=None, min_length=1, description="served model name instead of the profile's")
    kv_capacity_tokens: int | None = Field(default=None, ge=1, description="KV room instead of the profile's")
    context_length_tokens: int | None = Field(default=None, ge=2, description="instead of the profile's")
    default_max_tokens: int = Field(default=1024, ge=1, description="when a client names no limit")
    time_scale: float = Field(default=1.0, gt=0, le=1000, description="modelled times are multiplied by this")
    redis_url: str | None = Field(default=None, description="where heartbeats and passes go; without it nowhere")
    heartbeat_s: float = Field(default=1.0, gt=0)
    max_body_bytes: int = Field(default=32 * MIB, ge=1024)
    transfer_stall_s: float = Field(default=30.0, gt=0, description="a transfer that moves nothing this long is cut")
    drain_s: float = Field(default=1.0, ge=0, description="how long running requests may go on after SIGTERM")
    ready_file: Path | None = Field(default=None, description="written with the address once the engine serves")

    @field_validator("profile")
    @classmethod
    def _profile_is_usable(cls, name: str) -> str:
        try:
            load_profile(name)
        except ProfileError as error:
            raise ValueError(str(error)) from error
        return name

    @model_validator(mode="after")
    def _prompt_fits_somewhere(self) -> Self:
        capacity, context = self.kv_capacity_tokens, self.context_length_tokens
        if capacity is not None and context is not None and context > capacity:
            raise ValueError(f"context_length_tokens {context} is more than kv_capacity_tokens {capacity}: lower it")
        return self

    def effective_profile(self) -> Profile:
        """The profile with the overrides of these settings, its times scaled."""
        profile = load_profile(self.profile)
        model = self.model or profile.model
        scale = self.time_scale
        return msgspec.structs.replace(
            profile,
            model=model,
            kv_layout=msgspec.structs.replace(profile.kv_layout, model=model),
            kv_capacity_tokens=self.kv_capacity_tokens or profile.kv_capacity_tokens,
            context_length_tokens=self.context_length_tokens or profile.context_length_tokens,
            bandwidth_bytes_per_s=profile.bandwidth_bytes_per_s / scale,
            **{name: getattr(profile, name) * scale for name in _SECONDS},
        )


_SECONDS = ("a_s", "b_s_per_token", "c_s_per_token2", "d_s", "e_s_per_sequence", "f_s_per_kv_token", "g_s")


def load_settings(**given: Any) -> EmulatedSettings:
    """Settings from arguments over the environment; `None` does not count. Raises `BadSettings`."""
    try:
        return EmulatedSettings(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        raise BadSettings(explain(error)) from error


def explain(error: ValidationError) -> str:
    """Pydantic's findings as sentences: key, value, what is wrong, and where to set it."""
    faults = [_sentence(dict(fault)) for fault in error.errors(include_url=False)]
    return f"{'; '.join(faults)}. Set it with a flag or as {ENV_PREFIX}<NAME> in the environment."


def _sentence(fault: dict[str, Any]) -> str:
    where = ".".join(str(part) for part in fault["loc"]) or "settings"
    message = str(fault["msg"]).removeprefix("Value error, ")
    shown = f" (got {fault['input']!r:.80})" if fault["loc"] else ""
    return f"{where}: {message}{shown}"
