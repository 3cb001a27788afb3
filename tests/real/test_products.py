"""Products of few rows, against what torch makes of them."""

import subprocess

from engines.sglang.launcher import PYTHON_VARIABLE
from tests.support.sglang import ROOT, environment

CHECK = """
from types import SimpleNamespace as Bag
import torch
from engines.sglang.cpu.products import FEW, linear, lm_head

def original(owner, *given, **more):
    return "SGLang's"

def made(rows, dtype=torch.float32):
    x, weight, bias = (torch.randn(*shape, dtype=dtype) for shape in ((rows, 96), (160, 96), (160,)))
    layer, expected = Bag(weight=weight), torch.nn.functional.linear(x, weight)
    found = linear(original, None, layer, x), linear(original, None, layer, x, bias), lm_head(original, None, x, layer)
    return found, (expected, expected + bias, expected)

torch.manual_seed(1)
for rows in FEW:
    for ours, theirs in zip(*made(rows)):
        assert torch.allclose(ours, theirs, atol=1e-4) and ours.is_contiguous(), rows
for rows, dtype in ((1, torch.float32), (FEW.stop, torch.float32), (FEW.start, torch.bfloat16)):
    assert set(made(rows, dtype)[0]) == {"SGLang's"}, rows
"""


def test_few_rows_give_what_torch_gives_and_all_else_is_left_to_sglang() -> None:
    found = environment()
    command = [found[PYTHON_VARIABLE], "-c", CHECK]
    done = subprocess.run(command, cwd=ROOT, env=found, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
