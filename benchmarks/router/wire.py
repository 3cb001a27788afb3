"""What load and backend tell each other through a proxy that knows nothing of it.

A prompt ends with an *order*: which request this is, how many chunks are wanted and how far apart. The text of every
chunk is a *mark*: its place in the stream, when it was sent, for which request, and how long the backend had held the
request by then. Fields have fixed widths, so that neither side needs to parse JSON to find them.
"""

from dataclasses import dataclass

ORDER = b"#%06d %06d %05d#"
"""request, gap in microseconds, chunks."""
ORDER_BYTES = len(ORDER % (0, 0, 0))

MARK = b"@%05d %020d %06d %013d@"
"""chunk number from 0, Unix time of sending in ns, request, ns from the request's arrival to this sending."""
MARK_BYTES = len(MARK % (0, 0, 0, 0))

MAX_REQUEST = 999_999


@dataclass(frozen=True, slots=True)
class Order:
    request: int = 0
    gap_us: int = 0
    chunks: int = 1


NO_ORDER = Order()


def read_order(body: bytes) -> Order:
    """The order in a request's body; `NO_ORDER` if there is none (token-id prompts have no room for one)."""
    at = body.find(b"#")
    order = body[at : at + ORDER_BYTES]
    if at < 0 or len(order) < ORDER_BYTES or not order.endswith(b"#"):
        return NO_ORDER
    return Order(int(order[1:7]), int(order[8:14]), int(order[15:20]))
