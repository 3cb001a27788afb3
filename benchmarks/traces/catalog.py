"""The traces, read from `traces.toml`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec

from benchmarks.adapt.scenarios import Positive, read
from engines.emulated.profile import Profile, load_profile

FILE = Path(__file__).parent / "traces.toml"
FOLDER_VARIABLE = "TRIMTAB_TRACES"
"""Environment variable that names the folder with the traces' files."""


class Trace(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where a trace comes from and what it is played on."""

    title: str
    file: str
    """Its name in the folder of traces: CSV as Azure publishes it, JSONL as Mooncake does."""
    source: str
    licence: str
    profile: str
    """Of every engine."""
    rates_rps: Annotated[Mapping[str, Positive], msgspec.Meta(min_length=1)]
    """SLO level -> requests per second and engine."""

    @property
    def engine(self) -> Profile:
        """Raises `ProfileError`."""
        return load_profile(self.profile)

    @property
    def limit_tokens(self) -> int:
        """Most that prompt and answer may have together on one engine."""
        return min(self.engine.context_length_tokens, self.engine.kv_capacity_tokens)


def load_traces() -> Mapping[str, Trace]:
    """Every trace by name. Raises `ScenarioError`."""
    return read(FILE, dict[str, Trace])
