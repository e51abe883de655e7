"""One generation: a prompt, then tokens until something ends it, with the text of each as soon as it is complete."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tapeout.runtime.errors import TapeoutError
from tapeout.runtime.sequence import SamplingOptions, sampling_of
from tapeout.runtime.text import StopStrings, StreamDecoder

if TYPE_CHECKING:
    from tapeout.runtime.model import Model


@dataclass(frozen=True)
class Step:
    """One generated token. ``text`` is what became certain with it; ``finish_reason`` is set on the last step only.

    Reasons: ``eos`` (an end-of-sequence id; its text is not shown), ``stop`` (a stop string), ``length``
    (max_tokens), ``context`` (the planned context is full).
    """

    token: int
    text: str
    finish_reason: str | None = None


class Generation:
    """An iterator over Steps. ``timings`` holds rates once the generation has ended or was left.

    Its memory goes back with the last step, with ``close``, or when nothing refers to it any more.
    """

    def __init__(
        self, model: Model, ids: list[int], max_tokens: int, options: Mapping[str, Any], stop: Sequence[str]
    ) -> None:
        model.check_prompt(ids)
        if max_tokens < 1:
            raise TapeoutError(f"max_tokens is {max_tokens}; it must be at least 1")
        self._run = _Run(model, ids, max_tokens, sampling_of(options), stop)
        self._steps = self._run.steps()

    @property
    def tokens(self) -> list[int]:
        """Ids generated so far, the one that ends it included."""
        return self._run.tokens

    @property
    def timings(self) -> dict[str, float]:
        """Seconds and rates; empty until the end."""
        return self._run.timings

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        return next(self._steps)

    def close(self) -> None:
        """End early: give the sequence's memory back and fix the timings."""
        self._steps.close()


class _Run:
    """What a generation works with. It does not know its iterator, so that dropping that one ends the run at once."""

    def __init__(
        self, model: Model, ids: list[int], max_tokens: int, sampling: SamplingOptions, stop: Sequence[str]
    ) -> None:
        self._model, self._ids, self._max_tokens, self._sampling = model, ids, max_tokens, sampling
        self._stop, self._decoder = StopStrings(stop), StreamDecoder(model.tokenizer)
        self.tokens: list[int] = []
        self.timings: dict[str, float] = {}

    def steps(self) -> Generator[Step, None, None]:
        """Prefill, then a token a step; the sequence is closed before the last one is handed out."""
        model, sequence = self._model, self._model.pool.open(self._sampling)
        started = time.perf_counter()
        first = started
        try:
            token = model.prefill(sequence, self._ids)
            first = time.perf_counter()
            most = min(self._max_tokens - 1, model.max_context - len(self._ids))
            with closing(model.stream([sequence], [token], most)) as following:
                while not (step := self._step(token)).finish_reason:
                    yield step
                    token = next(following)[0]
        finally:
            model.pool.close(sequence)
            self._time(started, first, time.perf_counter())
        yield step

    def _step(self, token: int) -> Step:
        """Take a token: decide whether it is the last, and which text is certain now."""
        length = len(self._ids) + len(self.tokens)
        self.tokens.append(token)
        if token in self._model.eos_ids:
            return Step(token, self._stop.push(self._decoder.flush()) + self._stop.flush(), "eos")
        text = self._stop.push(self._decoder.push(token))
        if self._stop.matched is not None:
            return Step(token, text, "stop")
        reason = (
            "length"
            if len(self.tokens) >= self._max_tokens
            else "context"
            if length >= self._model.max_context
            else None
        )
        if reason:
            text += self._stop.push(self._decoder.flush()) + self._stop.flush()
        return Step(token, text, reason)

    def _time(self, started: float, first: float, ended: float) -> None:
        decoded = len(self.tokens) - 1
        self.timings = {
            "prefill_s": first - started,
            "decode_s": ended - first,
            "prefill_tok_s": len(self._ids) / max(first - started, 1e-9),
            "decode_tok_s": decoded / (ended - first) if decoded > 0 else 0.0,
        }
