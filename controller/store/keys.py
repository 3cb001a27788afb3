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
    def requests(self) -> str:
        return self.prefix + "requests"

    @property
    def passes(self) -> str:
        return self.prefix + "passes"

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
