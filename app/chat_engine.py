"""Load a pair and answer turns. No thread and no UI here: `EngineThread` and the plain path share this class.

Invariant: the cache is either consistent with what was yielded, or dropped. The whole conversation is
rendered each turn (real roles through the model's template) and the cache keeps what it can of it, so
editing, regenerating and clearing need no case of their own.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import asdict
from pathlib import PurePath

from dflash_mlx.app.backend import Backend, Cache, Pair, Response
from dflash_mlx.app.jobs import Ask, LoadModel
from dflash_mlx.app.messages import (
    EngineFailed,
    Event,
    ModelCard,
    ModelLoading,
    ModelReady,
    Reason,
)
from dflash_mlx.app.reporter import TICK_INTERVAL_S, TurnReporter
from dflash_mlx.cli import noted_warnings
from dflash_mlx.templates import render, stable_length


class _Cancelled(Exception):
    """Raised inside a progress callback, which the library lets stop a prefill or a load cleanly."""


class ChatEngine:
    """Owns the model, the tokenizer and the cache; lives in one thread.

    Args:
        emit: takes every event, from the owning thread.
        cancelled: read between cycles, between prefill chunks and between load steps; gets the turn's number.
    """

    def __init__(
        self,
        backend: Backend,
        emit: Callable[[Event], None],
        cancelled: Callable[[int], bool] = lambda turn: False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._backend = backend
        self._emit = emit
        self._cancelled = cancelled
        self._clock = clock
        self._pair: Pair | None = None
        self._cache: Cache | None = None
        self._kernels = "auto"

    def load(self, job: LoadModel) -> None:
        """Load a pair and report it; returns silently if the loading was cancelled."""
        started = self._clock() if job.launched_at is None else job.launched_at
        last_text, last_at = "", float("-inf")

        def progress(text: str, fraction: float | None) -> None:
            nonlocal last_text, last_at
            if self._cancelled(0):
                raise _Cancelled
            now = self._clock()
            if text != last_text or now - last_at >= TICK_INTERVAL_S:
                last_text, last_at = text, now
                self._emit(ModelLoading(text, fraction))

        options = {name: value for name, value in asdict(job).items() if name not in ("model", "launched_at")}
        notes: list[str] = []
        try:
            with noted_warnings(notes):
                pair = self._backend.load(job.model, options, progress)
        except _Cancelled:
            return
        self._pair, self._cache, self._kernels = pair, None, job.kernels
        draft = pair.draft
        card = ModelCard(
            target=PurePath(job.model).name or job.model,
            draft=draft.name if draft is not None else None,
            block_size=draft.block_size if draft is not None else None,
            ready_s=self._clock() - started,
            notes=tuple(notes),
            largest_block=pair.largest_block,
        )
        self._emit(ModelReady(card))

    def answer(self, job: Ask) -> None:
        """Answer one turn.

        Raises:
            ValueError: the library refused the request before it began; the cache is as good as before.
            Exception: whatever else the library raised; the cache is dropped and the next turn starts cold.
        """
        reporter = TurnReporter(job.turn, self._emit, self._clock, job.settings.mode)
        begun = False
        try:
            responses = self._request(job, reporter)
            begun = True
            reason = self._generate(job.turn, responses, reporter)
        except _Cancelled:
            reason = "cancelled"
        except KeyboardInterrupt:  # the plain path: what was answered so far has its numbers too
            self._cache = None
            reporter.finish("cancelled")
            raise
        except BaseException as error:
            if begun or not isinstance(error, ValueError):
                self._cache = None
            raise
        reporter.finish(reason)

    def _request(self, job: Ask, reporter: TurnReporter) -> Generator[Response, None, None]:
        """Everything that can be refused, before the model works."""
        pair, settings = self._loaded(), job.settings
        ids, stable = self._render(pair, job)
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
                raise _Cancelled
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

    def _render(self, pair: Pair, job: Ask) -> tuple[list[int], int]:
        """The prompt's ids, and how many of them the next turn will begin with."""
        if not pair.tokenizer.has_chat_template:
            raise ValueError(
                "This model has no chat template, so the chat cannot mark who said what. "
                "Use an instruction-tuned target, or `python -m dflash_mlx.generate` for plain completion."
            )
        chat = [{"role": role, "content": text} for role, text in job.messages]
        ids = render(pair.tokenizer, chat, job.settings.thinking)
        return ids, stable_length(pair.tokenizer, chat, ids, job.settings.thinking)

    def _loaded(self) -> Pair:
        if self._pair is None:
            raise ValueError("No model is loaded yet.")
        return self._pair


def failure(
    error: Exception, user_errors: tuple[type[Exception], ...], *, fatal: bool, turn: int | None = None
) -> EngineFailed:
    """Say an error to the user: its own text if it was written for them, otherwise what kind of bug it is."""
    if isinstance(error, user_errors):
        title = "The model could not be loaded" if fatal else "No answer"
        return EngineFailed(title, str(error), fatal, turn)
    if isinstance(error, MemoryError):
        body = (
            "The prompt cache was dropped. Try a shorter conversation (/clear), a smaller model, "
            "or a smaller block size (/block 4)."
        )
        return EngineFailed("Out of memory", body, fatal, turn)
    body = f"{type(error).__name__}: {error}\nThis is a bug in dflash_mlx; its traceback is shown when you quit."
    details = "".join(traceback.format_exception(error))
    return EngineFailed("Something unexpected went wrong", body, fatal, turn, details)
