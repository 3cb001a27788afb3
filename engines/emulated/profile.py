"""A profile: the latency model, memory and scheduler defaults of one kind of engine. Data files, no code.

`prefill_s = a + b·n + c·n·context`, `step_s = d + e·batch + f·kv_tokens`, `transfer_s = g + bytes / bandwidth`.
"""

import tomllib
from pathlib import Path
from typing import Annotated

import msgspec

from engines.types import KvLayout

PROFILES = Path(__file__).parent / "profiles"

NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]


class ProfileError(ValueError):
    """A profile is unknown, unreadable or does not hold together; the message says which and why."""


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one kind of engine is like. Vary one with `msgspec.structs.replace(profile, max_running=8)`."""

    name: str
    """Name of the file without its suffix; also the engine kind."""
    description: str
    source: dict[str, str]
    """Where each group of numbers is from: `prefill`, `step`, `transfer`, `kv`, `scheduler`."""
    model: str
    """The model name that clients ask for."""
    a_s: NotNegative
    b_s_per_token: NotNegative
    c_s_per_token2: NotNegative
    d_s: NotNegative
    e_s_per_sequence: NotNegative
    f_s_per_kv_token: NotNegative
    g_s: NotNegative
    bandwidth_bytes_per_s: Positive
    kv_layout: KvLayout
    kv_capacity_tokens: Count
    context_length_tokens: Count
    chunked_prefill_tokens: Annotated[int, msgspec.Meta(ge=16)]
    prefill_decode_interval: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    mixed_chunk: bool = False
    """Whether one pass may hold a prefill chunk and the decode batch together."""
    max_running: Count = 256

    @property
    def kind(self) -> str:
        return self.name

    def prefill_s(self, new_tokens: int, context_product: float) -> float:
        """Seconds to prefill `new_tokens` in one pass.

        `context_product` is the sum over the pass's sequences of n·(p + n/2), for n new tokens behind p cached ones:
        new tokens × mean tokens that each of them attends to.
        """
        return self.a_s + self.b_s_per_token * new_tokens + self.c_s_per_token2 * context_product

    def step_s(self, batch: int, kv_tokens: int) -> float:
        """Seconds for one decode pass of `batch` sequences that attend to `kv_tokens` in all."""
        return self.d_s + self.e_s_per_sequence * batch + self.f_s_per_kv_token * kv_tokens

    def pass_s(self, new_tokens: int, context_product: float, batch: int, kv_tokens: int) -> float:
        """Seconds for any pass; a mixed one costs its prefill plus what the decodes add to it."""
        if new_tokens == 0:
            return self.step_s(batch, kv_tokens)
        decodes_s = self.step_s(batch, kv_tokens) - self.d_s if batch else 0.0
        return self.prefill_s(new_tokens, context_product) + decodes_s

    def transfer_s(self, nbytes: int, concurrent: int = 1) -> float:
        """Seconds to move `nbytes` while `concurrent` transfers, this one included, share the link."""
        return self.g_s + nbytes * max(1, concurrent) / self.bandwidth_bytes_per_s


def profile_names() -> list[str]:
    """The names of the profiles that ship with Trimtab, sorted."""
    return sorted(path.stem for path in PROFILES.glob("*.toml"))


def load_profile(name_or_path: str) -> Profile:
    """The shipped profile of that name, or the TOML file at that path. Raises `ProfileError`."""
    path = _find(name_or_path)
    try:
        fields = tomllib.loads(path.read_text(encoding="utf-8"))
        return msgspec.convert({**fields, "name": path.stem}, Profile)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ProfileError(f"profile {path}: {error}") from error


def _find(name_or_path: str) -> Path:
    if name_or_path.endswith(".toml"):
        return Path(name_or_path)
    if name_or_path in (known := profile_names()):
        return PROFILES / f"{name_or_path}.toml"
    raise ProfileError(
        f"unknown profile {name_or_path!r}; known are {', '.join(known)}, or give a path to a .toml file"
    )
