"""How the fast twin keeps its state: arrays of records, so that one record fits a few cache lines. Read this first.

A *job* is what a kernel calls a sequence: request `r` has the generation `2r` and, if it is split, the prefill job
`2r + 1`. A *context* is a session or a root; a *holding* is what one engine has of one context. `NONE` ends lists.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

NONE = -1

IDLE, PREFILL_PASS, DECODE_PASSES = 0, 1, 2
"""What an engine is doing."""

ROLE_PREFILL, ROLE_DECODE, ROLE_MIXED = 0, 1, 2
ROUND_ROBIN, LEAST_LOAD, PREFIX_AFFINITY = 0, 1, 2
ADMIT_ALL, ADMIT_QUEUE, ADMIT_SHED = 0, 1, 2

ENGINE = np.dtype(
    [
        # Profile and knobs
        *[(name, np.float64) for name in ("a", "b", "c", "d", "e", "f", "g", "bandwidth")],
        *[(name, np.int64) for name in ("capacity", "limit", "max_running", "mixed", "bytes_per_token")],
        *[(name, np.int64) for name in ("chunk", "interval")],
        # The pass under way. Decode passes come in runs of `passes` with the same batch, from `since_s` on
        *[(name, np.int64) for name in ("state", "passes", "batch", "owed", "computing", "waited_for")],
        *[(name, np.float64) for name in ("since_s", "first_s", "growth_s", "prefill_s", "until_s")],
        # Its prefill rate: smoothed tokens and seconds, and those of decode passes since the last prefill pass
        *[(name, np.float64) for name in ("rated_tokens", "rated_s", "behind_decode_s")],
        # Sequences: those that decode are in the engine's heap
        *[(name, np.int64) for name in ("running", "kv_sum", "decodes")],
        *[(name, np.int64) for name in ("prefilling", "prefilling_first", "prefilling_last", "prefilling_tokens")],
        *[(name, np.int64) for name in ("waiting", "waiting_first", "waiting_last", "waiting_tokens")],
        # KV room: private or pinned; reserved; cached and unpinned. What is left is free
        *[(name, np.int64) for name in ("used", "reserved", "cached", "lru_first", "lru_last")],
        *[(name, np.int64) for name in ("reservations", "reservation_last")],
        # The inbound link
        *[(name, np.int64) for name in ("flows", "flow_first", "landing_first", "landing_last")],
        *[(name, np.float64) for name in ("link_now_s", "link_served")],
        # What the router counts and was told
        *[(name, np.int64) for name in ("own_inflight", "own_pending", "own_transfers")],
        *[(name, np.int64) for name in ("reported_inflight", "reported_pending")],
        *[(name, np.float64) for name in ("busy_prefill_s", "busy_decode_s")],
        ("retracted", np.int64),
    ],
    align=True,
)

VIEW = np.dtype(
    [
        *[(name, np.int64) for name in ("role", "inflight", "pending", "kv_free", "hint")],
        ("rate", np.float64),  # 0: not measured
    ],
    align=True,
)
"""What `tuner.placement.EngineView` holds, and `hint`, the tokens of the request in hand that the index names."""

REQUEST = np.dtype(
    [
        *[(name, np.float64) for name in ("arrived_s", "ttft_s")],
        *[(name, np.int64) for name in ("prompt", "output", "session", "root", "root_tokens")],
        # In the router
        *[(name, np.int64) for name in ("ended", "waits", "waited", "timed", "reserving", "turn", "end", "begin")],
        *[(name, np.int64) for name in ("ahead", "behind", "next_deadline")],
        ("waits_since_s", np.float64),
        *[
            (name, np.int64)
            for name in ("decode", "prefill", "decode_held", "decode_pending", "prefill_held", "started")
        ],
        # Its reservation, in the list of its engine
        *[(name, np.int64) for name in ("reserved", "reserved_tokens", "claimed", "older", "newer")],
        ("expires_s", np.float64),
        # Its transfer
        *[(name, np.float64) for name in ("sent_s", "flow_end", "lands_s")],
        ("next_flow", np.int64),
        # What became of it
        *[(name, np.int64) for name in ("ending", "cached", "split")],
        *[
            (name, np.float64)
            for name in ("first_s", "tpot", "e2e", "queue", "prefill_time", "transfer", "decode_time")
        ],
    ],
    align=True,
)

JOB = np.dtype(
    [
        *[(name, np.int64) for name in ("length", "computed", "chunk", "outputs", "max_tokens", "expected")],
        *[(name, np.int64) for name in ("order", "following", "admitted", "matched", "next_told", "started")],
        *[(name, np.int64) for name in ("pinned", "next_pin", "last_pin")],
        *[(name, np.float64) for name in ("submitted_s", "admitted_s")],
    ],
    align=True,
)

HOLDING = np.dtype(
    [
        *[(name, np.int64) for name in ("context", "engine", "another")],
        *[(name, np.int64) for name in ("length", "base", "pinned", "pins", "first_pin", "leaf", "leaf_before")],
        *[(name, np.int64) for name in ("newer", "older", "listed")],
        *[(name, np.int64) for name in ("hint_blocks", "hint_age")],
    ],
    align=True,
)
"""`length` tokens of its context, of which `base` belong to the root, that has a holding of its own.

Its last tokens, from `leaf` on, and those from `leaf_before` on are dropped at once, as edges of the radix tree are.
The first `pinned` are kept for jobs: of a session the longest of its jobs' pins, of a root all while it has `pins`."""

STATE = np.dtype(
    [
        *[(name, np.float64) for name in ("now_s", "poll_s", "makespan_s")],
        *[(name, np.int64) for name in ("engines", "requests", "heap_size", "leaves")],
        *[(name, np.int64) for name in ("ended", "arrived", "holdings", "orders", "polled", "set_timers")],
        *[(name, np.int64) for name in ("queued", "queue_first", "queue_last", "woken_first", "woken_last")],
        *[(name, np.int64) for name in ("deadline_first", "deadline_last", "told_first", "told_last")],
        *[(name, np.int64) for name in ("index_age", "index_blocks")],
        # Roles that engines must not have to decode or to prefill, `NONE` if that would leave nobody; over those that
        # may decode their number and the requests in flight, over those that may prefill how many have no rate yet
        *[(name, np.int64) for name in ("not_decoding", "not_prefilling", "decoders", "inflight", "unrated")],
        # Of the request that is being placed
        *[(name, np.int64) for name in ("first", "prefill", "turn", "tried", "tried_cost", "last_tried")],
        ("bound", np.float64),
    ],
    align=True,
)

PLAN = np.dtype(
    [
        *[(name, np.int64) for name in ("data_parallel", "policy", "min_remote", "max_transfers")],
        *[(name, np.int64) for name in ("admission", "max_running", "hints")],
        *[(name, np.float64) for name in ("offload_ratio", "bypass_fraction")],
    ],
    align=True,
)

Records = NDArray[np.void]


HOLDERS = np.dtype([("first", np.int64)])
"""First holding of a context."""
HEAP = np.dtype([("entry", np.int64)])
TIMER = np.dtype([("at_s", np.float64), ("order", np.int64)])


class World(NamedTuple):
    """All state of a run: for compiled code the first record of each array, see `address.nth`."""

    state: Any
    plan: Any
    engines: Any
    views: Any
    requests: Any
    jobs: Any
    holdings: Any
    holders: Any
    heaps: Any
    timers: Any
