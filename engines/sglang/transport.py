"""One-sided writes between the KV pools of engines with NIXL: host memory and device memory alike."""

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import structlog

from engines.errors import TransferFailed
from engines.sglang.slots import Rows, regions
from engines.sglang.wire import Buffer, Note, Peer, encode_note

log = structlog.get_logger(__name__)
BACKEND = "UCX"
PROGRESS_DELAY_US = 1000
"""How long the progress thread sleeps between looks; without a pause it takes most of a core."""


class NixlTransport:
    """One agent with the pool registered once. Belongs to the scheduler's thread."""

    def __init__(self, name: str, memory: str, device_id: int, buffers: Sequence[Buffer]) -> None:
        """Raises `ImportError` without NIXL, and what NIXL raises when it cannot register the pool."""
        api = importlib.import_module("nixl._api")
        self._errors = _errors(api.nixlBind)
        with _patient_progress(api.nixlBind):
            self._agent = api.nixl_agent(name, api.nixl_agent_config(backends=[BACKEND]))
        self._memory = memory
        self._device_id = device_id
        self._buffers = buffers
        self._peers: dict[str, Peer] = {}
        spans = [(buffer.base, buffer.row_bytes * buffer.rows, device_id, "") for buffer in buffers]
        self._registered = self._agent.register_memory(spans, memory)

    @property
    def metadata(self) -> bytes:
        """What another agent needs to reach this one."""
        return bytes(self._agent.get_agent_metadata())

    def add_peer(self, peer: Peer) -> None:
        """Know another engine; a new life of one that is known replaces it. Raises `TransferFailed`."""
        if peer.agent in self._peers:
            return
        try:
            self._agent.add_remote_agent(peer.metadata)
            self._agent.make_connection(peer.agent)
        except self._errors as error:
            raise TransferFailed(f"the engine {peer.agent} cannot be reached over NIXL: {error}") from error
        self._peers[peer.agent] = peer

    def knows(self, agent: str) -> bool:
        return agent in self._peers

    def earlier_lives(self, agent: str) -> Sequence[str]:
        """Known agents of the same engine under another epoch."""
        engine, _, epoch = agent.rpartition(".")
        return [known for known in self._peers if known.rpartition(".")[0] == engine and not known.endswith(epoch)]

    def forget(self, agent: str) -> None:
        """A peer that is gone."""
        if self._peers.pop(agent, None) is None:
            return
        try:
            self._agent.remove_remote_agent(agent)
        except self._errors as error:
            log.info("a peer that was gone could not be forgotten", agent=agent, error=str(error))

    def notify(self, agent: str, note: Note) -> None:
        """Never raises: whoever waits for it finds out by time. An engine that it cannot be sent to is forgotten."""
        try:
            self._agent.send_notif(agent, encode_note(note))
        except self._errors as error:
            log.info("a note was lost", agent=agent, note=type(note).__name__, error=str(error))
            self.forget(agent)

    def take_notes(self) -> Iterator[tuple[str, bytes]]:
        for agent, notes in self._agent.get_new_notifs().items():
            for note in notes:
                yield agent, note

    def write(self, agent: str, mine: Rows, theirs: Rows, note: bytes | None) -> Any:
        peer = self._peers.get(agent)
        if peer is None:
            raise TransferFailed(f"the engine {agent} is gone")
        local, remote = regions(mine, theirs, self._buffers, peer.buffers, (self._device_id, peer.device_id))
        handle = None
        try:
            source = self._agent.get_xfer_descs(local, self._memory)
            target = self._agent.get_xfer_descs(remote, peer.memory)
            handle = self._agent.initialize_xfer("WRITE", source, target, agent, note or b"")
            self._post(handle)
        except self._errors as error:
            raise TransferFailed(f"writing to {agent} failed: {error}") from error
        return handle

    def is_done(self, handle: Any) -> bool:
        try:
            state = self._agent.check_xfer_state(handle)
        except self._errors as error:
            raise TransferFailed(f"a write failed: {error}") from error
        if state == "PROC":
            return False
        self._agent.release_xfer_handle(handle)
        if state != "DONE":
            raise TransferFailed("a write failed")
        return True

    def _post(self, handle: Any) -> None:
        if self._agent.transfer(handle) == "ERR":
            raise TransferFailed("a write could not be started")


@contextmanager
def _patient_progress(bindings: Any) -> Iterator[None]:
    """NIXL's Python face sets the progress thread's pause to 0 and offers no way to set another."""
    original = bindings.nixlAgentConfig

    class Patient(original):  # type: ignore[misc, valid-type]
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, PROGRESS_DELAY_US if name == "pthrDelay" else value)

    bindings.nixlAgentConfig = Patient
    try:
        yield
    finally:
        bindings.nixlAgentConfig = original


def _errors(bindings: Any) -> tuple[type[Exception], ...]:
    """NIXL's exceptions have no common base of their own."""
    named = vars(bindings).values()
    return tuple(kind for kind in named if isinstance(kind, type) and issubclass(kind, Exception))


class NoTransport:
    """Stands where NIXL is missing, and says so."""

    def __init__(self, reason: str) -> None:
        self._reason = reason
        self.metadata = b""

    def add_peer(self, peer: Peer) -> None:
        raise TransferFailed(self._reason)

    def knows(self, agent: str) -> bool:
        return False

    def forget(self, agent: str) -> None:
        pass

    def earlier_lives(self, agent: str) -> Sequence[str]:
        return ()

    def notify(self, agent: str, note: Note) -> None:
        pass

    def take_notes(self) -> Iterator[tuple[str, bytes]]:
        return iter(())

    def write(self, agent: str, mine: Rows, theirs: Rows, note: bytes | None) -> Any:
        raise TransferFailed(self._reason)

    def is_done(self, handle: Any) -> bool:
        raise TransferFailed(self._reason)
