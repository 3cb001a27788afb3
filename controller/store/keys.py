"""Names of everything Trimtab keeps in Redis, for one model."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Keys:
    """`Keys("llama").plan == "trimtab:llama:plan"`."""

    model: str

    @property
    def prefix(self) -> str:
        return f"trimtab:{self.model}:"

    @property
    def slo(self) -> str:
        return self.prefix + "slo"

    @property
    def plan(self) -> str:
        return self.prefix + "plan"

    @property
    def arrivals(self) -> str:
        return self.prefix + "arrivals"

    @property
    def requests(self) -> str:
        return self.prefix + "requests"

    @property
    def passes(self) -> str:
        return self.prefix + "passes"

    @property
    def transfers(self) -> str:
        return self.prefix + "transfers"

    @property
    def decisions(self) -> str:
        return self.prefix + "decisions"

    @property
    def plans(self) -> str:
        """Stream of the plans issued so far."""
        return self.prefix + "plans"

    @property
    def migrations(self) -> str:
        """Stream of the context-cache migrations that operators asked for."""
        return self.prefix + "migrations"

    @property
    def leader(self) -> str:
        """Lease of the one controller that tunes."""
        return self.prefix + "leader"

    @property
    def mode(self) -> str:
        """Document that says who moves the plan."""
        return self.prefix + "mode"

    @property
    def study(self) -> str:
        """Document of what the tuner has learnt about plans; the leader's, passed on to the next."""
        return self.prefix + "study"

    @property
    def models(self) -> str:
        """Document of the fitted latency models; the leader's, passed on to the next."""
        return self.prefix + "models"

    @property
    def engines(self) -> str:
        """Prefix of all engine heartbeats."""
        return self.prefix + "engine:"

    @property
    def routers(self) -> str:
        """Prefix of all router heartbeats."""
        return self.prefix + "router:"

    def engine(self, engine_id: str) -> str:
        return self.engines + engine_id

    def router(self, router_id: str) -> str:
        return self.routers + router_id
