"""What is believed of an engine kind before it has been watched: its shipped profile, or a guess from its KV layout."""

from collections.abc import Mapping

from engines.emulated.profile import Profile, load_profile, profile_names
from engines.types import EngineInfo

FLOPS_PER_S = 1.5e14
"""Of one device in dense 16-bit arithmetic, as served engines get it; devices differ by a factor of ten."""
MEMORY_BYTES_PER_S = 1.5e12
LINK_BYTES_PER_S = 2.5e10
LAUNCH_S = 5e-3
SEQUENCE_S = 5e-5
TRANSFER_SETUP_S = 2e-3
CHUNK_TOKENS = 8192
MAX_RUNNING = 256


def shipped_priors() -> Mapping[str, Profile]:
    """All profiles that ship with Trimtab, by kind. Reads files."""
    return {name: load_profile(name) for name in profile_names()}


def guessed_prior(kind: str, info: EngineInfo) -> Profile:
    """A profile of the right order for a model of this KV layout on common hardware. Data soon say better."""
    layout = info.kv_layout
    width = layout.head_dim * max(layout.layers, layout.kv_heads)  # most models have about as many heads as layers
    parameters = 12 * layout.layers * width**2
    devices = max(1, layout.tensor_parallel)
    return Profile(
        name=kind,
        description=f"guessed from the KV layout of {layout.model}",
        source=dict.fromkeys(("prefill", "step", "transfer", "kv", "scheduler"), "guessed"),
        model=info.model,
        a_s=LAUNCH_S,
        b_s_per_token=2 * parameters / (FLOPS_PER_S * devices),
        c_s_per_token2=4 * layout.layers * width / (FLOPS_PER_S * devices),
        d_s=LAUNCH_S + 2 * parameters / (MEMORY_BYTES_PER_S * devices),
        e_s_per_sequence=SEQUENCE_S,
        f_s_per_kv_token=layout.bytes_per_token / (MEMORY_BYTES_PER_S * devices),
        g_s=TRANSFER_SETUP_S,
        bandwidth_bytes_per_s=LINK_BYTES_PER_S,
        kv_layout=layout,
        kv_capacity_tokens=max(1, info.kv_capacity_tokens),
        context_length_tokens=max(1, info.context_length_tokens),
        chunked_prefill_tokens=CHUNK_TOKENS,
        max_running=MAX_RUNNING,
    )
