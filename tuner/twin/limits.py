"""What the simulators take over from the router, which they may not import. A test holds both to the same numbers."""

POLL_S = 0.5
"""How often the router asks each engine for its load."""
QUEUE = 1024
"""Requests that may wait for room at a time."""
QUEUE_S = 30.0
"""Longest wait for room."""
RESERVATION_TTL_S = 90.0
BLOCK_TOKENS = 128
"""Tokens in one block of the prefix index, at four bytes of text a token."""
MAX_BLOCKS = 512
"""Blocks of a prompt that the prefix index looks at."""
INDEX_BLOCKS = 200_000
"""Blocks that the prefix index holds."""
