"""The plan: the versioned, immutable document that says how routers use the fleet now.

A bad plan is refused whole, with a sentence that says what is wrong. Routers apply whole plans only.
"""

import enum
from collections.abc import Mapping
from typing import Annotated, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from engines.types import Role

DATA_PARALLEL = "data_parallel"
DISAGGREGATED = "disaggregated"
BALANCED = "balanced"
MIGRATE = "migrate"

Document = TypeVar("Document", bound=BaseModel)

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}$")]


class IssuedBy(enum.StrEnum):
    BOOTSTRAP = "bootstrap"
    TUNER = "tuner"
    OPERATOR = "operator"


class Policy(enum.StrEnum):
    """How `data_parallel` picks its engine, and how every pattern ranks engines that do the decoding."""

    ROUND_ROBIN = "round_robin"
    LEAST_LOAD = "least_load"
    PREFIX_AFFINITY = "prefix_affinity"


class Admission(enum.StrEnum):
    """What a router does with a request that the fleet has no room for."""

    OFF = "off"
    QUEUE = "queue"
    SHED = "shed"


class Knobs(BaseModel):
    """Everything about a pattern that can be turned live."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    policy: Policy = Policy.LEAST_LOAD
    offload_ratio: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Share of the prompt's tail that the decode engine prefills itself",
    )
    min_remote_tokens: int = Field(
        default=0, ge=0, description="Prompts with fewer uncached tokens than this skip the prefill engine"
    )
    bypass_cached_fraction: float = Field(
        default=0.9,
        ge=0,
        le=1,
        description="Prompts cached on D to at least this share skip the prefill engine",
    )
    max_inflight_transfers: int = Field(
        default=8,
        ge=1,
        le=1024,
        description="Transfers to one decode engine at a time; others wait before prefill",
    )
    max_attempts: int = Field(default=3, ge=1, le=10, description="Placements of one request before it fails")
    admission: Admission = Admission.OFF
    max_running_per_engine: int | None = Field(
        default=None,
        ge=1,
        description="Requests of one router in flight on one engine before admission steps in",
    )
    chunked_prefill_tokens: int | None = Field(
        default=None,
        ge=16,
        description="Most prompt tokens in one pass; absent leaves the engines as they are",
    )
    prefill_decode_interval: int | None = Field(
        default=None,
        ge=0,
        le=64,
        description="Decode passes between prefill passes; absent leaves it as it is",
    )


class HotPrefix(BaseModel):
    """A context that the engines named here should hold, so that no single one of them gets all that begin with it.

    It is known by its hash only: the text never leaves the router, which finds it in the requests that pass.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    prefix: str = Field(pattern="^[0-9a-f]{16}$", description="Chained hash of the prompt's first `blocks` blocks")
    blocks: int = Field(ge=1, le=512, description="Blocks of the prompt's bytes; see `tuner.prefix`")
    engines: tuple[Name, ...] = Field(min_length=1, description="Engines that should hold it")

    @property
    def block_hash(self) -> int:
        return int(self.prefix, 16)


MOST_REPLICAS = 16


class Plan(BaseModel):
    """Which pattern, knobs and roles are in force. Engines without an entry in `roles` are `mixed`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: int = Field(ge=0)
    issued_at_s: float = Field(ge=0, description="Unix time")
    issued_by: IssuedBy
    reason: str = Field(min_length=1, max_length=2000)
    pattern: Name
    knobs: Knobs = Knobs()
    roles: Mapping[Name, Role] = Field(default_factory=dict)
    replicas: tuple[HotPrefix, ...] = Field(
        default=(), max_length=MOST_REPLICAS, description="Contexts to be copied to the engines named with each"
    )

    @model_validator(mode="after")
    def _pattern_and_knobs_agree(self) -> Self:
        ratio = self.knobs.offload_ratio
        if self.pattern == MIGRATE:
            raise ValueError("'migrate' moves context between engines and answers no request: it cannot be a plan")
        if self.pattern == BALANCED and ratio == 0:
            raise ValueError("'balanced' needs 0 < offload_ratio < 1; for 0 use 'disaggregated'")
        if self.pattern == DISAGGREGATED and ratio != 0:
            raise ValueError(f"'disaggregated' means offload_ratio 0, not {ratio}; use 'balanced'")
        if self.pattern == DATA_PARALLEL and ratio != 0:
            raise ValueError(f"'data_parallel' has no split, so offload_ratio {ratio} would do nothing: leave it out")
        return self

    def role_of(self, engine_id: str) -> Role:
        return self.roles.get(engine_id, Role.MIXED)


BOOTSTRAP_PLAN = Plan(
    version=0,
    issued_at_s=0,
    issued_by=IssuedBy.BOOTSTRAP,
    reason="no plan has been issued yet: spread requests by load",
    pattern=DATA_PARALLEL,
)
"""What a router does before it has seen any plan."""


class BadDocument(ValueError):
    """A plan or SLO table that was refused whole; the message names each bad key, its value and the remedy."""


def parse(kind: type[Document], raw: bytes | str) -> Document:
    """Decode and validate a document; raises `BadDocument` with one sentence for each fault."""
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        raise BadDocument(explain(error)) from error


def explain(error: ValidationError) -> str:
    """Pydantic's findings as sentences an operator can act on."""
    return "; ".join(_sentence(dict(fault)) for fault in error.errors(include_url=False))


def _sentence(fault: Mapping[str, object]) -> str:
    location = fault.get("loc")
    where = ".".join(str(part) for part in location) if isinstance(location, tuple) else ""
    message = str(fault.get("msg", "")).removeprefix("Value error, ")
    value = fault.get("input")
    shown = f" (got {value!r:.80})" if where and not isinstance(value, dict) else ""
    return f"{where or 'document'}: {message}{shown}"
