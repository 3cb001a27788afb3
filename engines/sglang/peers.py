"""Other engines: how their agents get to know ours, once for each life of theirs, and whether they still live."""

import asyncio
from collections.abc import Awaitable, Callable

from engines.client import EngineClient, VerbTimeouts
from engines.errors import EngineError, EngineUnreachable, ReservationGone, TransferFailed
from engines.sglang.wire import KvAddress, KvHeld, Peer

TIMEOUTS = VerbTimeouts(connect_s=2.0, verb_s=10.0)
WATCH_EVERY_S = 1.0
MISSED_LOOKS = 2
KV_PEER = "kv_peer"
"""The route `POST /microserving/kv_peer`: takes the caller's `Peer`, answers with one's own."""
KV_HELD = "kv_held"
"""The route `POST /microserving/kv_held`: takes a `KvHeld`, succeeds if everything has arrived."""

Introduce = Callable[[Peer], Awaitable[None]]


class PeerClient(EngineClient):
    """An engine of this kind, as another engine calls it."""

    async def introduce(self, me: Peer) -> Peer:
        """Tell who writes, hear who receives."""
        return await self._post(KV_PEER, me, Peer, TIMEOUTS.verb_s)

    async def check_held(self, address: KvAddress) -> None:
        """Raises `EngineError` unless everything that was reserved has arrived."""
        await self._post(KV_HELD, KvHeld(request_id=address.request_id, nonce=address.nonce), dict, TIMEOUTS.verb_s)


class Peers:
    """Introduces engines to each other. Close it with `aclose()`."""

    def __init__(self, me: Peer, introduce: Introduce) -> None:
        """`introduce` makes a peer known to this engine's scheduler."""
        self._me = me
        self._introduce = introduce
        self._clients: dict[str, PeerClient] = {}
        self._known: set[str] = set()
        self._meetings: dict[str, asyncio.Task[None]] = {}

    async def meet(self, address: KvAddress) -> None:
        """Know the receiver behind an address. Raises `TransferFailed`, `ReservationGone`.

        Those who want to meet the same engine at the same time share one meeting. It waits for nothing else: the other
        engine may be meeting this one at this very moment.
        """
        if address.agent in self._known:
            return
        meeting = self._meetings.get(address.agent)
        if meeting is None:
            meeting = self._meetings[address.agent] = asyncio.create_task(self._meet(address))
            meeting.add_done_callback(lambda done: self._met(address.agent, done))
        await asyncio.shield(meeting)

    async def meet_caller(self, peer: Peer) -> None:
        """A sender introduces itself."""
        await self._introduce(peer)
        self._known.add(peer.agent)

    def forget(self, agent: str) -> None:
        """Something went wrong between the engines: they have to meet again before the next transfer."""
        self._known.discard(agent)

    async def holds(self, address: KvAddress) -> bool:
        """Whether the receiver says that everything has arrived."""
        try:
            await self._client(address.url).check_held(address)
        except EngineError:
            return False
        return True

    async def watch(self, address: KvAddress) -> None:
        """Returns never; raises `TransferFailed` or `ReservationGone` when the receiver is gone."""
        missed = 0
        while True:
            await asyncio.sleep(WATCH_EVERY_S)
            try:
                info = await self._client(address.url).info()
            except EngineUnreachable as error:
                missed += 1
                if missed >= MISSED_LOOKS:
                    self.forget(address.agent)
                    raise TransferFailed(f"the receiver at {address.url} is gone: {error}") from error
                continue
            missed = 0
            if info.epoch != address.epoch:
                self.forget(address.agent)
                raise ReservationGone("the receiver was started anew since the reservation")

    async def aclose(self) -> None:
        for meeting in self._meetings.values():
            meeting.cancel()
        for client in self._clients.values():
            await client.aclose()

    async def _meet(self, address: KvAddress) -> None:
        try:
            peer = await self._client(address.url).introduce(self._me)
        except EngineUnreachable as error:
            raise TransferFailed(f"the receiver at {address.url} cannot be reached: {error}") from error
        if peer.epoch != address.epoch:
            raise ReservationGone("the receiver was started anew since the reservation")
        await self._introduce(peer)
        self._known.add(peer.agent)

    def _met(self, agent: str, meeting: asyncio.Task[None]) -> None:
        del self._meetings[agent]
        if not meeting.cancelled():
            meeting.exception()  # whoever waited has it; if nobody does any more, it is no news

    def _client(self, url: str) -> PeerClient:
        client = self._clients.get(url)
        if client is None:
            client = self._clients[url] = PeerClient(url, TIMEOUTS)
        return client
