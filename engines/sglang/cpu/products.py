"""Products of weights with the few rows of a small decode batch, at what reading the weights costs.

Torch hands `rows · weightᵀ` to a kernel that is made for many rows: on a CPU two or three of them take twice as long as
one, and longer than eight. The same product the other way round, `weight · rowsᵀ`, costs hardly more than one row does.
"""

from collections.abc import Callable
from typing import Any

FEW = range(2, 7)
"""Numbers of rows for which the way round is faster."""


def linear(original: Callable[..., Any], method: Any, layer: Any, x: Any, bias: Any = None) -> Any:
    """Around `UnquantizedLinearMethod.apply`; `x`: [rows, inputs], the result [rows, outputs]."""
    if not _is_plain(x, layer.weight):
        return original(method, layer, x, bias)
    product = _turned(x, layer.weight)
    return product if bias is None else product.add_(bias)


def lm_head(
    original: Callable[..., Any], processor: Any, hidden_states: Any, head: Any, embedding_bias: Any = None, **more: Any
) -> Any:
    """Around `LogitsProcessor._compute_lm_head`; `hidden_states`: [rows, hidden], the result [rows, vocabulary]."""
    weight = getattr(head, "weight", None)
    if hasattr(head, "set_lora") or weight is None or not _is_plain(hidden_states, weight):
        return original(processor, hidden_states, head, embedding_bias, **more)
    return _turned(hidden_states, weight)


def _is_plain(rows: Any, weight: Any) -> bool:
    """Few rows in float32, and a weight that no other kernel has packed for itself."""
    import torch

    return (
        rows.dim() == 2
        and len(rows) in FEW
        and rows.dtype == weight.dtype == torch.float32
        and weight.shape[-1] == rows.shape[-1]
    )


def _turned(rows: Any, weight: Any) -> Any:
    import torch

    return torch.mm(weight, rows.T).T.contiguous()
