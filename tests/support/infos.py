"""What an engine says that it is, for tests in which little of it matters."""

import msgspec

from engines.types import EngineInfo, KvLayout

_SMALL = EngineInfo(
    engine_id="e0",
    url="http://127.0.0.1:1",
    kind="laptop",
    model="m",
    context_length_tokens=8192,
    kv_capacity_tokens=20_000,
    kv_layout=KvLayout(model="m", dtype="bfloat16", layers=30, kv_heads=3, head_dim=64),
    transports=("tcp",),
    epoch="1",
)


def engine_info(**given: object) -> EngineInfo:
    return msgspec.structs.replace(_SMALL, **given)
