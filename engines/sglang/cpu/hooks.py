"""What is computed in another way than SGLang's where the engine runs on a CPU."""

import os

from engines.sglang.cpu.attention import extend
from engines.sglang.cpu.products import linear, lm_head

ATTENTION = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend._run_sdpa_forward_extend"
LINEAR = "sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod.apply"
LM_HEAD = "sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head"


def register() -> None:
    """Entry point of a plugin of SGLang's."""
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(ATTENTION, extend, HookType.REPLACE)
    HookRegistry.register(LINEAR, linear, HookType.AROUND)
    HookRegistry.register(LM_HEAD, lm_head, HookType.AROUND)
