"""The store: documents with versions, streams and heartbeats, on Redis or in memory."""

from controller.store.keys import Keys
from controller.store.memory import MemoryStore
from controller.store.open import open_store
from controller.store.protocol import Entry, Store, StoreUnavailable, VersionConflict, Versioned
from controller.store.redis import RedisStore

__all__ = [
    "Entry",
    "Keys",
    "MemoryStore",
    "RedisStore",
    "Store",
    "StoreUnavailable",
    "VersionConflict",
    "Versioned",
    "open_store",
]
