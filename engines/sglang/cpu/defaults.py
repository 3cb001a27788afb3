"""What SGLang needs to be told to run on a CPU, unless an operator says otherwise."""

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

BFLOAT16_INSTRUCTIONS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Names in /proc/cpuinfo, on x86 and Arm. Without one of them a bfloat16 product takes six times a float32 one."""
KV_TOKENS = "20000"
SWITCHES = ("--sleep-on-idle", "--disable-overlap-schedule")
"""An idle engine would otherwise keep a whole core busy. And a CPU computes in the scheduler's own thread: there is
nothing to overlap, every result would only wait for the pass after its own, and passes would be timed as the next."""


def flags(given: Collection[str]) -> Sequence[str]:
    """Flags of SGLang's to add to those that are `given` (names, such as `--dtype`)."""
    wanted = {
        "--attention-backend": "torch_native",
        "--max-total-tokens": KV_TOKENS,
        **_number_formats(given, _cpu_flags()),
    }
    found = [part for name, value in wanted.items() if name not in given for part in (name, value)]
    return [*found, *(switch for switch in SWITCHES if switch not in given)]


def environment(stand_ins: Collection[str], folders: Sequence[str]) -> Mapping[str, str]:
    """Environment to add. `folders` hold the packages `stand_ins` and must come before everything else."""
    path = [*folders, *filter(None, [os.environ.get("PYTHONPATH")])]
    found = {"SGLANG_USE_CPU_ENGINE": "1"}
    if path:
        found["PYTHONPATH"] = os.pathsep.join(path)
    if "triton" in stand_ins:
        # Torch's compiler looks into triton; with a stand-in in its place it must not be loaded at all.
        found["TORCHDYNAMO_DISABLE"] = "1"
    return found


def _number_formats(given: Collection[str], cpu_flags: Collection[str]) -> Mapping[str, str]:
    if "--dtype" in given:
        return {}
    if BFLOAT16_INSTRUCTIONS.isdisjoint(cpu_flags):
        # The KV cache stays in bfloat16, so engines on either kind of CPU can exchange it.
        return {"--dtype": "float32", "--kv-cache-dtype": "bfloat16"}
    return {"--dtype": "bfloat16"}


def _cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    found = (line.partition(":")[2] for line in lines if line.lower().startswith(("flags", "features")))
    return frozenset(next(found, "").split())
