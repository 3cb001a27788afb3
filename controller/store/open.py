"""From a URL to a store."""

from controller.store.memory import MemoryStore
from controller.store.protocol import Store
from controller.store.redis import RedisStore


def open_store(url: str, timeout_s: float = 2.0) -> Store:
    """`memory://` is a new, empty store inside this process; `redis://host:port/db` (or `rediss://`, `unix://`) Redis.

    Nothing is connected yet. The caller closes the store. Raises `ValueError` that says what a URL must look like.
    """
    if url == "memory://":
        return MemoryStore()
    if not url.startswith(("redis://", "rediss://", "unix://")):
        given = url.partition("://")[0] + "://" if "://" in url else "no scheme"  # the rest may hold a password
        raise ValueError(f"the address of the store begins with {given}: give redis://host:port/0, or memory://")
    return RedisStore.from_url(url, timeout_s)
