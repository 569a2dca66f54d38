"""The same prompt twice, plainly and with drafts, one after the other: two clocks and a verdict about the tokens.

Each run has caches of its own, made by `stream` and dropped with it. The first race of a pair warms both ways of
decoding up, because whoever runs first would pay for what is made only once.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass, replace

from dflash_mlx.app.backend import Backend, Pair, Response
from dflash_mlx.app.jobs import Race
from dflash_mlx.app.messages import Arm, ArmName, Event, RaceDone, RaceTick
from dflash_mlx.app.reporter import TICK_INTERVAL_S
from dflash_mlx.app.settings import Settings
from dflash_mlx.app.tally import Tally

WARM_UP_PROMPT = 32
"""Tokens of the prompt's end that the warm-up reads."""


class Cancelled(Exception):
    """Raised inside a progress callback, which the library lets stop a prefill or a load cleanly."""


@dataclass
class Racer:
    """Runs one race.

    cancelled: read between cycles and between prefill chunks.
    warm:      whether both ways of decoding have run with this pair.
    """

    backend: Backend
    pair: Pair
    ids: list[int]
    job: Race
    kernels: str
    emit: Callable[[Event], None]
    cancelled: Callable[[], bool]
    clock: Callable[[], float]
    warm: bool = False

    def run(self) -> RaceDone:
        """Both arms and the verdict.

        Raises:
            ValueError: there is no draft, or the settings are refused.
            Cancelled: it was stopped.
        """
        if self.pair.draft is None:
            raise ValueError(
                "A race runs the same prompt with drafts and without, and this model was loaded without a draft, so "
                "there is nothing to race. Load a model that has one: `dflash-metal models` lists them."
            )
        settings = seeded(self.job.settings)
        sampler = self.backend.make_sampler(
            temp=settings.temperature,
            top_p=settings.top_p,
            min_p=settings.min_p,
            top_k=settings.top_k,
            seed=settings.seed,
        )
        self._stop_if_cancelled()
        if not self.warm:
            self.backend.warm_up(self.pair, self.ids[-WARM_UP_PROMPT:], self.kernels)
        plain, expected = self._arm("plain", settings, sampler)
        dflash, got = self._arm("dflash", settings, sampler)
        self._stop_if_cancelled()
        drafted = any(drafts for _, drafts in dflash.numbers.recent) or dflash.numbers.acceptance_rate is not None
        found = self.backend.compare(
            self.pair.model, self.ids, expected, got, policy=sampler, kernels=self.kernels if drafted else "off"
        )
        return RaceDone(self.job.number, plain, dflash, found.kind, found.index, found.explanation)

    def _arm(self, name: ArmName, settings: Settings, sampler: object) -> tuple[Arm, list[int]]:
        """One run, and the tokens that it gave."""
        tally = Tally(name, self.clock(), self.clock, self.backend.active_gb)
        text, tokens, pieces, ticked = "", list[int](), list[tuple[float, str]](), float("-inf")

        def tick() -> None:
            nonlocal ticked
            now = self.clock()
            if now - ticked >= TICK_INTERVAL_S:
                ticked = now
                self.emit(RaceTick(self.job.number, name, tally.numbers(), text))

        def progress(done: int, total: int) -> None:
            self._stop_if_cancelled()
            tally.prefill(done, total, 0)
            tick()

        with closing(self._stream(name, settings, sampler, progress)) as responses:
            for response in responses:
                place = tally.add(response)
                tokens.append(response.token)
                if response.text:
                    pieces.append((_elapsed(response), response.text))
                    text += response.text
                if place.first and response.finish_reason is None:
                    self._stop_if_cancelled()
                if place.last:
                    tick()
        return Arm(name, tally.final(), joined(pieces)), tokens

    def _stream(
        self, name: ArmName, settings: Settings, sampler: object, progress: Callable[[int, int], None]
    ) -> Generator[Response, None, None]:
        return self.backend.stream(
            self.pair.model,
            self.pair.tokenizer,
            self.ids,
            settings.max_tokens,
            self.pair.draft,
            sampler=sampler,
            mode=name,
            rule="match" if settings.temperature else "rejection",  # greedy text has no rule
            block_size=None if settings.block_size == 1 or name == "plain" else settings.block_size,
            kernels=self.kernels,
            prefill_step_size=self.backend.prefill_step_size,
            prompt_progress_callback=progress,
        )

    def _stop_if_cancelled(self) -> None:
        if self.cancelled():
            raise Cancelled


def seeded(settings: Settings) -> Settings:
    """With a seed if there is something to draw, so that both arms draw the same."""
    if settings.temperature == 0 or settings.seed is not None:
        return settings
    return replace(settings, seed=secrets.randbits(32))


def joined(pieces: list[tuple[float, str]]) -> tuple[tuple[float, str], ...]:
    """Text that came at one moment, with one cycle, as one piece."""
    found: list[tuple[float, str]] = []
    for at, text in pieces:
        if found and found[-1][0] == at:
            text = found.pop()[1] + text
        found.append((at, text))
    return tuple(found)


def _elapsed(response: Response) -> float:
    """Seconds from the run's start to this token, by the engine's clock."""
    return (response.timings.total_s if response.timings is not None else None) or 0.0
