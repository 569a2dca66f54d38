"""Load a pair and answer turns. No thread and no UI here: `EngineThread` and the plain path share this class.

Invariant: the cache is either consistent with what was yielded, or dropped. The whole conversation is
rendered each turn (real roles through the model's template) and the cache keeps what it can of it, so
editing, regenerating and clearing need no case of their own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from datetime import datetime
from typing import Any

from dflash_mlx.app.backend import Backend, Cache, Pair, Response
from dflash_mlx.app.card import describe
from dflash_mlx.app.jobs import Ask, LoadModel, Messages, Race
from dflash_mlx.app.messages import (
    Event,
    LoadCancelled,
    ModelCard,
    ModelLoading,
    ModelReady,
    RaceCancelled,
    Reason,
    TurnDone,
)
from dflash_mlx.app.race import Cancelled, Racer
from dflash_mlx.app.record import json_object, metrics, utc_now
from dflash_mlx.app.reporter import TICK_INTERVAL_S, TurnReporter
from dflash_mlx.app.tally import Tally
from dflash_mlx.cli import noted_warnings
from dflash_mlx.report import Answer
from dflash_mlx.segments import Segments
from dflash_mlx.templates import render, stable_length


class ChatEngine:
    """Owns the model, the tokenizer and the cache; lives in one thread.

    Args:
        emit: takes every event, from the owning thread.
        cancelled: read between cycles, between prefill chunks and between load steps; gets the job's number.
        clock, now: seconds for what is measured; the time of day for records.
    """

    def __init__(
        self,
        backend: Backend,
        emit: Callable[[Event], None],
        cancelled: Callable[[int], bool] = lambda number: False,
        clock: Callable[[], float] = time.perf_counter,
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        self.answered: Mapping[str, Any] = {}
        """The newest turn as `generate --json` prints it, tokens included; empty if it gave none."""
        self._backend = backend
        self._emit = emit
        self._cancelled = cancelled
        self._clock = clock
        self._now = now
        self._pair: Pair | None = None
        self._card: ModelCard | None = None
        self._cache: Cache | None = None
        self._replaced: ModelCard | None = None
        self._kernels = "auto"
        self._raced = False

    @property
    def card(self) -> ModelCard | None:
        """What is loaded; None if nothing is."""
        return self._card

    @property
    def replaced(self) -> ModelCard | None:
        """What the newest load freed to make room, and so what is gone if that load fails."""
        return self._replaced

    def load(self, job: LoadModel) -> None:
        """Load a pair in the place of the one before, and report it.

        The one before is freed when nothing is left to do but to read weights: what fails or is cancelled until then
        leaves it as it was.
        """
        started = self._clock() if job.launched_at is None else job.launched_at
        last_text, last_at = "", float("-inf")

        def progress(text: str, fraction: float | None) -> None:
            nonlocal last_text, last_at
            if self._cancelled(job.number):
                raise Cancelled
            now = self._clock()
            if text != last_text or now - last_at >= TICK_INTERVAL_S:
                last_text, last_at = text, now
                self._emit(ModelLoading(text, fraction))

        options = job.options
        notes: list[str] = []
        pair: Pair | None = None
        try:
            if self._pair is not None and not self._cancelled(job.number):
                with noted_warnings([]):  # loading says them again
                    self._backend.prepare(job.model, options, progress, job.insist)
            if not self._cancelled(job.number):
                self._drop_pair()
                with noted_warnings(notes):
                    pair = self._backend.load(job.model, options, progress)
        except Exception:
            if not self._cancelled(job.number):
                raise  # else this is `Cancelled`, or what the library made of it on the way
        if pair is None or self._cancelled(job.number):
            pair = None
            if self._pair is None:
                self._backend.free()
            self._emit(LoadCancelled(job.number, self._card))
            return
        card = describe(job, pair, self._clock() - started, notes, self._backend.memory_gb)
        self._pair, self._card, self._kernels = pair, card, job.kernels
        self._emit(ModelReady(card, job.number))

    def answer(self, job: Ask) -> None:
        """Answer one turn.

        Raises:
            ValueError: the library refused the request before it began; the cache is as good as before.
            Exception: whatever else the library raised; the cache is dropped and the next turn starts cold.
        """
        self.answered = {}
        pair = self._loaded()
        ids, stable = self._render(pair, job)
        asked_at = self._clock() if job.requested_at is None else job.requested_at
        tally = Tally(job.settings.mode, asked_at, self._clock, self._backend.active_gb)
        tokenizer: Any = pair.tokenizer
        answer = Answer(Segments.for_prompt(tokenizer, ids))
        reporter = TurnReporter(job.turn, self._emit, self._clock, tally, answer)
        begun = False
        try:
            responses = self._request(job, pair, ids, stable, reporter)
            begun = True
            reason = self._generate(job.turn, responses, reporter)
        except Cancelled:
            reason = "cancelled"
        except KeyboardInterrupt:  # the plain path: what was answered so far has its numbers too
            self._cache = None
            self._finish(job, reporter, "cancelled")
            raise
        except BaseException as error:
            if begun or not isinstance(error, ValueError):
                self._cache = None
            reporter.end(None)
            raise
        self._finish(job, reporter, reason)

    def race(self, job: Race) -> None:
        """Answer the last message plainly and with drafts, and compare; the cache of the conversation stays.

        Raises:
            Exception: whatever the library raised; a ValueError is for the user.
        """
        pair = self._loaded()
        ids = self._ids(pair, job.messages, job.settings.thinking)
        racer = Racer(
            backend=self._backend,
            pair=pair,
            ids=ids,
            job=job,
            kernels=self._kernels,
            emit=self._emit,
            cancelled=lambda: self._cancelled(job.number),
            clock=self._clock,
            warm=self._raced,
        )
        try:
            done = racer.run()
        except Cancelled:
            self._emit(RaceCancelled(job.number))
            return
        self._raced = True
        self._emit(done)

    def recover(self) -> None:
        """Give back what a failed job held. Call it when its error has been handled, since tracebacks hold arrays."""
        self._backend.free()

    def _drop_pair(self) -> None:
        """Two large models at once may not fit."""
        self._replaced = self._card
        self._pair = self._card = self._cache = None
        self._raced = False
        self.answered = {}
        self._backend.free()

    def _request(
        self, job: Ask, pair: Pair, ids: list[int], stable: int, reporter: TurnReporter
    ) -> Generator[Response, None, None]:
        """Everything that can be refused, before the model works."""
        settings = job.settings
        sampler = self._backend.make_sampler(
            temp=settings.temperature,
            top_p=settings.top_p,
            min_p=settings.min_p,
            top_k=settings.top_k,
            seed=settings.seed,
        )
        if self._cache is None:
            self._cache = self._backend.make_cache(pair.model, pair.draft)
        cached = self._cache.reuse(ids, stable)

        def progress(done: int, total: int) -> None:
            if self._cancelled(job.turn):
                raise Cancelled
            reporter.prefill(done, total, cached)

        progress(0, len(ids) - cached)
        return self._backend.stream(
            pair.model,
            pair.tokenizer,
            ids[cached:],
            settings.max_tokens,
            pair.draft,
            sampler=sampler,
            prompt_cache=self._cache,
            prefill_step_size=self._backend.prefill_step_size,
            prompt_progress_callback=progress,
            block_size=settings.block_size,
            mode=settings.mode,
            kernels=self._kernels,
            requested_at=job.requested_at,
        )

    def _generate(self, turn: int, responses: Generator[Response, None, None], reporter: TurnReporter) -> Reason:
        reason: Reason = "length"
        with closing(responses):  # closing early leaves the cache holding exactly what was yielded
            for response in responses:
                first = reporter.add(response)
                if response.finish_reason is not None:
                    reason = "stop" if response.finish_reason == "stop" else "length"
                elif first and self._cancelled(turn):
                    return "cancelled"
        return reason

    def _finish(self, job: Ask, reporter: TurnReporter, reason: Reason) -> None:
        """The last of the text, then the closing message with the turn's record."""
        reporter.end(reason)
        newest, record = reporter.tally.newest, dict[str, Any]()
        if newest is not None and self._card is not None:
            self.answered = json_object(newest, reporter.answer, self._card)
            record = metrics(self.answered, self._card, job.settings, self._backend.versions, self._now())
        self._emit(TurnDone(job.turn, reason, reporter.tally.final(), record))

    def _render(self, pair: Pair, job: Ask) -> tuple[list[int], int]:
        """The prompt's ids, and how many of them the next turn will begin with."""
        ids = self._ids(pair, job.messages, job.settings.thinking)
        chat = [{"role": role, "content": text} for role, text in job.messages]
        return ids, stable_length(pair.tokenizer, chat, ids, job.settings.thinking)

    def _ids(self, pair: Pair, messages: Messages, thinking: bool | None) -> list[int]:
        if not pair.tokenizer.has_chat_template:
            raise ValueError(
                "This model has no chat template, so the chat cannot mark who said what. "
                "Use an instruction-tuned target, or `python -m dflash_mlx.generate` for plain completion."
            )
        return render(pair.tokenizer, [{"role": role, "content": text} for role, text in messages], thinking)

    def _loaded(self) -> Pair:
        if self._pair is None:
            raise ValueError("No model is loaded yet.")
        return self._pair
