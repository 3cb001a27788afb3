"""Attention of new tokens on a CPU that costs what the new tokens cost.

SGLang's `torch_native` backend pads the queries of a request to its whole sequence and throws most of the result away,
so that a request whose prompt is cached pays for the cached tokens all over again. Here only the new tokens' queries
attend, over all keys; outputs are the same.
"""

from typing import Any


def extend(
    backend: Any,
    query: Any,
    output: Any,
    k_cache: Any,
    v_cache: Any,
    req_to_token: Any,
    req_pool_indices: Any,
    seq_lens: Any,
    extend_prefix_lens: Any,
    extend_seq_lens: Any,
    encoder_lens: Any = None,
    scaling: float | None = None,
    enable_gqa: bool = False,
    causal: bool = False,
    is_cross_attn: bool = False,
    sliding_window_size: int | None = None,
) -> Any:
    """Fill and return `output`: [tokens, heads, head size], as `query`; requests lie one after the other.

    `k_cache`, `v_cache`: [slots, KV heads, head size]. The `*_lens` and `req_pool_indices`: one number per request.
    """
    start = 0
    firsts = _first_keys(seq_lens, encoder_lens, is_cross_attn)
    for request, (first, keys) in enumerate(firsts):
        end = start + int(extend_seq_lens[request])
        slots = req_to_token[req_pool_indices[request], first : first + keys]
        mask, is_causal = _mask(backend, end - start, keys, causal, sliding_window_size, query.device)
        output[start:end] = _attend(
            query[start:end], k_cache[slots], v_cache[slots], mask, is_causal, scaling, enable_gqa
        )
        start = end
    return output


def _first_keys(seq_lens: Any, encoder_lens: Any, is_cross_attn: bool) -> list[tuple[int, int]]:
    """Where each request's keys begin in its row of slots, and how many they are."""
    lengths = [int(length) for length in seq_lens]
    if encoder_lens is None:
        return [(0, length) for length in lengths]
    encoded = [int(length) for length in encoder_lens]
    if is_cross_attn:
        return [(0, length) for length in encoded]
    return list(zip(encoded, lengths, strict=True))


def _mask(
    backend: Any, queries: int, keys: int, causal: bool, sliding_window_size: int | None, device: Any
) -> tuple[Any, bool]:
    """The mask of a request's last `queries` tokens over its `keys`, and whether the library's own is enough."""
    import torch

    cached = keys - queries
    if sliding_window_size is not None and sliding_window_size > -1:
        mask = backend._make_sliding_window_mask(
            q_len=queries,
            kv_len=keys,
            sliding_window_size=sliding_window_size,
            device=device,
            query_offset=cached,
        )
        return mask, False
    if not causal or cached == 0:
        return None, causal
    if queries == 1:
        return None, False
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(diagonal=cached), False


def _attend(
    query: Any, key: Any, value: Any, mask: Any, is_causal: bool, scaling: float | None, enable_gqa: bool
) -> Any:
    from torch.nn.functional import scaled_dot_product_attention

    heads_first = [part.to(query.dtype).movedim(0, 1).unsqueeze(0) for part in (query, key, value)]
    attended = scaled_dot_product_attention(
        *heads_first, attn_mask=mask, is_causal=is_causal, scale=scaling, enable_gqa=enable_gqa
    )
    return attended.squeeze(0).movedim(1, 0)
