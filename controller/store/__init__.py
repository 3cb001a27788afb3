"""The store: documents with versions, streams, heartbeats and leases, on Redis or in memory."""

from controller.store.keys import Keys
from controller.store.memory import MemoryStore
from controller.store.open import open_store
from controller.store.protocol import Entry, Lease, LostLease, Store, StoreUnavailable, VersionConflict, Versioned
from controller.store.redis import RedisStore

__all__ = [
    "Entry",
    "Keys",
    "Lease",
    "LostLease",
    "MemoryStore",
    "RedisStore",
    "Store",
    "StoreUnavailable",
    "VersionConflict",
    "Versioned",
    "open_store",
]
