"""Who is there: engines and routers as their heartbeats tell it."""

from collections.abc import Mapping
from typing import TypeVar

import msgspec

from controller.store.keys import Keys
from controller.store.protocol import Store
from engines.telemetry import Heartbeat

Beat = TypeVar("Beat")


class RouterBeat(msgspec.Struct, frozen=True, kw_only=True):
    """What a router says of itself under `router:{id}`."""

    router_id: str
    url: str
    plan_version: int
    slo_version: int = 0
    inflight: int = 0
    draining: bool = False
    workers: int = 1


class Heartbeats:
    """Reads heartbeats. Heartbeats that cannot be decoded are left out: their owner speaks another version.

    Every method raises `StoreUnavailable` when the store does not answer.
    """

    def __init__(self, store: Store, keys: Keys) -> None:
        self._store = store
        self._keys = keys

    async def engines(self) -> Mapping[str, Heartbeat]:
        """Live engines by id, sorted."""
        beats = await self._store.alive(self._keys.engines)
        found = [beat for raw in beats.values() if (beat := _decode(raw, Heartbeat)) is not None]
        return {beat.info.engine_id: beat for beat in sorted(found, key=lambda beat: beat.info.engine_id)}

    async def routers(self) -> Mapping[str, RouterBeat]:
        """Live routers by id, sorted."""
        beats = await self._store.alive(self._keys.routers)
        found = [beat for raw in beats.values() if (beat := _decode(raw, RouterBeat)) is not None]
        return {beat.router_id: beat for beat in sorted(found, key=lambda beat: beat.router_id)}


def _decode(raw: bytes, kind: type[Beat]) -> Beat | None:
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.DecodeError:
        return None
