"""The two kinds of answer: events as tokens come, or one document at the end."""

import asyncio
from collections.abc import Sequence

import msgspec

from engines.emulated.answers import ChoiceText, Format, Usage
from engines.emulated.choice import Choice
from engines.emulated.openai import Ask
from engines.emulated.stops import Piece
from engines.types import EngineTimings


class StreamAnswer:
    """Turns tokens into events at once; whoever writes them takes what has gathered with `read`."""

    def __init__(self, ask: Ask, form: Format, *, with_timings: bool) -> None:
        self._ask = ask
        self._format = form
        self._with_timings = with_timings
        self._pending: list[bytes] = []
        self._ended = False
        self._reader: asyncio.Future[None] | None = None

    def show(self, choice: Choice, pieces: Sequence[Piece], finish: str | None) -> None:
        if choice.fresh and self._ask.echoes:
            self._show_one(choice, Piece(None, self._ask.echoes[choice.prompt_index]), None)
        for piece in pieces[:-1]:
            self._show_one(choice, piece, None)
        self._show_one(choice, pieces[-1] if pieces else Piece(None, ""), finish)
        self._wake()

    def end(self, usage: Usage, timings: EngineTimings) -> None:
        self._pending.append(self._format.ending(usage, timings if self._with_timings else None))
        self._ended = True
        self._wake()

    async def read(self) -> bytes | None:
        """The events since the last call, waiting for one; `None` at the end. One reader at a time."""
        if not self._pending and not self._ended:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        if not self._pending:
            return None
        data = self._pending[0] if len(self._pending) == 1 else b"".join(self._pending)
        self._pending.clear()
        return data

    def _show_one(self, choice: Choice, piece: Piece, finish: str | None) -> None:
        event = self._format.event(choice.index, piece, role=choice.fresh, offset=choice.offset, finish=finish)
        self._pending.append(event)
        choice.offset += len(piece.text)
        choice.fresh = False

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class PlainAnswer:
    """Gathers everything; `read` gives the document and the timings once all is there."""

    def __init__(self, ask: Ask, form: Format) -> None:
        self._ask = ask
        self._format = form
        self._choices: dict[int, ChoiceText] = {}
        self._done: asyncio.Future[tuple[bytes, bytes]] = asyncio.get_running_loop().create_future()

    def show(self, choice: Choice, pieces: Sequence[Piece], finish: str | None) -> None:
        echo = self._ask.echoes[choice.prompt_index] if choice.fresh and self._ask.echoes else ""
        text = self._choices.setdefault(choice.index, ChoiceText(index=choice.index, echo=echo, pieces=[]))
        text.pieces += pieces
        text.finish_reason = finish

    def end(self, usage: Usage, timings: EngineTimings) -> None:
        if not self._done.done():
            choices = [self._choices[index] for index in sorted(self._choices)]
            self._done.set_result((self._format.plain(choices, usage), msgspec.json.encode(timings)))

    async def read(self) -> tuple[bytes, bytes]:
        return await self._done
