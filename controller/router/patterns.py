"""Orchestration patterns: short programs of microserving calls that turn one client request into engine work.

A pattern is an async generator over a `Call`. It reserves and moves KV as it likes and yields one `Generate`, which
the router relays to the client. If an engine dies, the router places the request again and starts the pattern anew.
Your own go into the entry-point group `trimtab.patterns`; see docs/patterns.md.
"""

from collections.abc import AsyncGenerator, Mapping
from importlib.metadata import entry_points

from controller.router.call import Call, Generate, Pattern

__all__ = ["Call", "Generate", "Pattern", "balanced", "data_parallel", "disaggregated", "load_patterns", "split"]

GROUP = "trimtab.patterns"


async def data_parallel(call: Call) -> AsyncGenerator[Generate, None]:
    """One engine does everything."""
    yield call.generate(call.placement.decode[0])


async def split(call: Call) -> AsyncGenerator[Generate, None]:
    """P prefills `[matched, end)`, D prefills the rest and decodes; P is skipped where that does not pay."""
    if not call.placement.is_split or call.placement.end is None:
        yield call.generate(call.placement.decode[0])
        return
    room = await call.reserve(call.placement.end)
    await call.send_kv(room)
    yield call.generate(room.engine_id, begin=room.end)


disaggregated = split
"""`offload_ratio` 0: everything but the last token is prefilled on P."""

balanced = split
"""0 < `offload_ratio` < 1: D prefills the tail of the prompt itself."""


def load_patterns() -> Mapping[str, Pattern]:
    """Every installed pattern by name. Raises `ImportError` and the like if one cannot be loaded."""
    return {point.name: point.load() for point in entry_points(group=GROUP)}
