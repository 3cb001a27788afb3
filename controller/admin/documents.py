"""Reading and changing the versioned documents in the store."""

from collections.abc import Callable
from typing import Generic, TypeVar

from pydantic import BaseModel

from controller.store.protocol import Lease, Store, VersionConflict
from tuner.plan import BadDocument, parse

Document = TypeVar("Document", bound=BaseModel)

ATTEMPTS = 20
"""Lost races before giving up; each loss means that somebody else's change went through."""


class Documents(Generic[Document]):
    """One document under one key. The version inside the document is the store's own."""

    def __init__(self, store: Store, key: str, kind: type[Document]) -> None:
        self._store = store
        self._key = key
        self._kind = kind
        self._last: Document | None = None

    @property
    def last(self) -> Document | None:
        """The newest that was read or written here: what to go back to if the store loses its data."""
        return self._last

    async def get(self) -> Document | None:
        """The document in force; raises `BadDocument` if what is stored is not one, `StoreUnavailable`."""
        found = await self._store.get(self._key)
        if found is None:
            return None
        self._last = parse(self._kind, found.value)
        return self._last

    async def change(
        self,
        make: Callable[[Document | None, int], Document],
        expected_version: int | None = None,
        fence: Lease | None = None,
    ) -> Document:
        """Write `make(document in force, new version)` and return it.

        With `expected_version` a lost race raises `VersionConflict`; without it the change is made again on what is
        there then. `expected_version` 0 means that there must be none yet. With a `fence` only the holder of that
        lease may write; anybody else hears `LostLease`.
        """
        for _ in range(ATTEMPTS - 1):
            try:
                return await self._try(make, expected_version, fence)
            except VersionConflict:
                if expected_version is not None:
                    raise
        return await self._try(make, expected_version, fence)

    async def _try(
        self, make: Callable[[Document | None, int], Document], expected: int | None, fence: Lease | None
    ) -> Document:
        found = await self._store.get(self._key)
        at = None if found is None else found.version
        if expected is not None and expected != (at or 0):
            raise VersionConflict(self._key, expected, at)
        document = make(None if found is None else self._readable(found.value), (at or 0) + 1)
        await self._store.compare_and_set(self._key, document.model_dump_json().encode(), at, fence)
        self._last = document
        return document

    def _readable(self, raw: bytes) -> Document | None:
        """An unreadable document counts as none, so that an operator can write over it."""
        try:
            return parse(self._kind, raw)
        except BadDocument:
            return None
