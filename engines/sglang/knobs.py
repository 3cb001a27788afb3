"""The knobs that turn while an engine serves."""

from engines.errors import BadRequest
from engines.protocol import Config

MIN_CHUNK_TOKENS = 16


def check_knobs(wanted: Config, page_size_tokens: int) -> None:
    """Raises `BadRequest` that names the knob; nothing may be changed then."""
    chunk, interval = wanted.chunked_prefill_tokens, wanted.prefill_decode_interval
    smallest = max(MIN_CHUNK_TOKENS, page_size_tokens)
    if chunk is not None and chunk < smallest:
        raise BadRequest(f"chunked_prefill_tokens is {chunk}, but must be at least {smallest}")
    if interval is not None and interval < 0:
        raise BadRequest(f"prefill_decode_interval is {interval}, but must be at least 0")
