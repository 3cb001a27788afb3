"""What clients were promised: a bound on TTFT and on TPOT for each request class, and how often they must hold."""

from collections.abc import Mapping
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator

DEFAULT_CLASS = "default"

ClassName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_.-]{0,31}$")]
"""Lower case and short: class names become metric labels."""


class Slo(BaseModel):
    """Bounds for one request of a class. A request is good when it meets both."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ttft_ms: float = Field(gt=0, le=3_600_000, description="Bound on the time to first token, milliseconds")
    tpot_ms: float = Field(gt=0, le=60_000, description="Bound on the time per further output token, milliseconds")
    attainment: float = Field(default=0.9, gt=0, le=1, description="Share of requests that must meet both bounds")
    weight: float = Field(default=1.0, gt=0, le=1000, description="Worth of one good request of this class")

    def met(self, ttft_s: float | None, tpot_s: float | None) -> bool:
        """Whether a finished request met both bounds; TPOT is undefined for one token and then counts as met."""
        if ttft_s is None or ttft_s * 1e3 > self.ttft_ms:
            return False
        return tpot_s is None or tpot_s * 1e3 <= self.tpot_ms


class SloTable(BaseModel):
    """All classes, versioned as one document. Always holds `default`, which unnamed and unknown classes get."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: int = Field(default=0, ge=0)
    classes: Mapping[ClassName, Slo] = Field(min_length=1, max_length=16)

    @field_validator("classes")
    @classmethod
    def _has_default(cls, classes: Mapping[str, Slo]) -> Mapping[str, Slo]:
        if DEFAULT_CLASS not in classes:
            raise ValueError(f"there must be a class '{DEFAULT_CLASS}': requests without x-slo-class get it")
        return classes

    def resolve(self, name: str | None) -> str:
        """The class that a request's header value stands for."""
        return name if name is not None and name in self.classes else DEFAULT_CLASS


BOOTSTRAP_SLOS = SloTable(version=0, classes={DEFAULT_CLASS: Slo(ttft_ms=2000, tpot_ms=100)})
"""In force until an operator says otherwise."""
