"""One request's generation: its choices in the kernel on one side, its answer on the other."""

from collections.abc import Callable, Sequence
from typing import Protocol

from engines.emulated.answers import Usage
from engines.emulated.choice import Choice
from engines.emulated.language import Language
from engines.emulated.openai import Ask
from engines.emulated.stops import Piece
from engines.errors import EngineError
from engines.types import EngineTimings

ABORTED = "abort"


class Answer(Protocol):
    """Where the visible text of a generation goes. Calls come in order and never block."""

    def show(self, choice: Choice, pieces: Sequence[Piece], finish: str | None) -> None:
        """More text of a choice, one piece a token; with `finish`, its last."""
        ...

    def end(self, usage: Usage, timings: EngineTimings) -> None:
        """All choices are through; comes once."""
        ...


class Work(Protocol):
    """What a generation needs from its engine."""

    def submit(self, generation: "Generation", choice: Choice) -> None: ...
    def finish(self, choice: Choice, at_s: float) -> EngineTimings | None: ...
    def abort_choice(self, choice: Choice) -> None: ...


class Generation:
    """Runs every choice of a request. The first of each prompt computes the prompt, the others then share its KV."""

    def __init__(
        self,
        ask: Ask,
        request_id: str,
        choices: Sequence[Choice],
        language: Language,
        work: Work,
        answer: Answer,
        on_end: Callable[["Generation"], None],
        tokens_agree: bool | None,
    ) -> None:
        self.ask = ask
        self.request_id = request_id
        self._choices = choices
        self._language = language
        self._work = work
        self._answer = answer
        self._on_end = on_end
        self._tokens_agree = tokens_agree
        self._live = {choice.index: choice for choice in choices if choice.finish_reason is None}
        self._followers: dict[int, list[Choice]] = {}
        self._ended = False
        self.timings: EngineTimings | None = None
        """Once it has ended by itself, not by an abort."""
        self._aborted = False

    def start(self) -> None:
        """Submit what is to be generated. Raises an `EngineError`, and then nothing was submitted."""
        for choice in list(self._live.values()):
            if choice.max_new_tokens < 1:
                self._show(choice, [], "length")
                self._retire(choice, None)
        leaders: dict[int, Choice] = {}
        for choice in self._live.values():
            if leaders.setdefault(choice.prompt_index, choice) is not choice:
                self._followers.setdefault(choice.prompt_index, []).append(choice)
        self._submit_all(list(leaders.values()))
        self._end_if_through()

    def on_token(self, choice: Choice, token: int, at_s: float) -> None:
        choice.outputs.append(token)
        if self._followers:
            self._submit_followers(choice)
        pieces, stopped = choice.stops.push(token, self._language.text(token))
        finish = "stop" if stopped else self._finish_reason(choice)
        if finish and not stopped:
            pieces += choice.stops.flush()
        if pieces or finish:
            self._show(choice, pieces, finish)
        if finish:
            timings = self._work.finish(choice, at_s)
            if timings is not None:
                self.on_finished(choice, timings)

    def on_finished(self, choice: Choice, timings: EngineTimings) -> None:
        self._retire(choice, timings)
        self._end_if_through()

    def abort(self) -> None:
        """Stop all that still runs; the answer ends as it is. Doing it twice is fine."""
        self._aborted = self._aborted or bool(self._live)
        for choice in list(self._live.values()):
            self._work.abort_choice(choice)
            if choice.finish_reason is None:
                self._show(choice, choice.stops.flush(), ABORTED)
            self._retire(choice, None)
        self._followers.clear()
        self._end_if_through()

    def _submit_all(self, leaders: Sequence[Choice]) -> None:
        try:
            for leader in leaders:
                self._work.submit(self, leader)
        except EngineError:
            for leader in leaders:
                self._work.abort_choice(leader)
            raise

    def _submit_followers(self, leader: Choice) -> None:
        for choice in self._followers.pop(leader.prompt_index, ()):
            self._work.submit(self, choice)

    def _finish_reason(self, choice: Choice) -> str | None:
        if len(choice.outputs) >= choice.max_new_tokens:
            return "length"
        if self.ask.ignore_eos or choice.output_tokens < self.ask.min_tokens:
            return None
        return "stop" if self._language.ends(choice.prompt, choice.outputs, choice.sample) else None

    def _show(self, choice: Choice, pieces: Sequence[Piece], finish: str | None) -> None:
        choice.finish_reason = finish
        self._answer.show(choice, pieces, finish)
        choice.fresh = False

    def _retire(self, choice: Choice, timings: EngineTimings | None) -> None:
        choice.timings = timings
        self._live.pop(choice.index, None)

    def _end_if_through(self) -> None:
        if self._live or self._ended:
            return
        self._ended = True
        usage = self._usage()
        timings = self._timings(usage)
        self.timings = None if self._aborted else timings
        self._answer.end(usage, timings)
        self._on_end(self)

    def _usage(self) -> Usage:
        prompt_tokens = [len(prompt) for prompt in self.ask.prompts]
        cached = {c.prompt_index: c.timings.cached_tokens for c in reversed(self._choices) if c.timings is not None}
        return Usage(
            prompt_tokens=sum(prompt_tokens),
            completion_tokens=sum(choice.output_tokens for choice in self._choices),
            cached_tokens=sum(min(tokens, prompt_tokens[index]) for index, tokens in cached.items()),
        )

    def _timings(self, usage: Usage) -> EngineTimings:
        """Of the request as a whole: queue and prefill of its first choice, decode until the last was through."""
        known = [choice.timings for choice in self._choices if choice.timings is not None]
        first = known[0] if known else None
        return EngineTimings(
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            output_tokens=usage.completion_tokens,
            queue_s=max(0.0, first.queue_s) if first else 0.0,
            prefill_s=max(0.0, first.prefill_s) if first else 0.0,
            decode_s=max((timings.decode_s for timings in known), default=0.0),
            tokens_agree=self._tokens_agree,
        )
