"""The arms of a benchmark: each runs one prompt and says what was seen.

    stock        mlx_lm.stream_generate itself, on the same ids: the baseline
    plain        our loop without a draft
    dflash       a block of drafts in every cycle
    auto         as many drafts of a block as pay, or none
    sequential   an ordinary small model that drafts token by token, through mlx_lm's own speculative decoding

Times are those at which a caller has a token in hand, on the clock that the arm was given. Before the clock starts the
device is idle and the buffers of earlier requests are returned, so that every request begins alike. Caches are fresh.
"""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from .measured import Cycles, Measured, Reported, ids_sha256
from .record import Limits, Prompt

if TYPE_CHECKING:
    from mlx_lm.generate import GenerationResponse
    from mlx_lm.tokenizer_utils import TokenizerWrapper

Clock = Callable[[], float]


class Arm(Protocol):
    """exact: whether its greedy tokens have to be the baseline's."""

    @property
    def name(self) -> str: ...

    @property
    def exact(self) -> bool: ...

    def run(self, prompt: Prompt, limits: Limits) -> Measured:
        """One request from the beginning to the end, with caches of its own."""
        ...


@dataclass
class Sighting:
    """Collects tokens as they come. cycle 0 is what prefill gave; tokens of one cycle share its number."""

    clock: Clock
    start: float = 0.0
    tokens: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    first_s: float = 0.0
    end_s: float = 0.0
    cycles: dict[int, list[int]] = field(default_factory=dict)  # number -> emitted, drafted, accepted
    at: dict[int, float] = field(default_factory=dict)

    def begin(self) -> None:
        self.start = self.clock()

    def see(self, token: int, text: str, *, cycle: int, drafted: int = 0, from_draft: bool = False) -> None:
        self.end_s = self.clock() - self.start
        self.first_s = self.first_s if self.tokens else self.end_s
        self.tokens.append(token)
        self.text.append(text)
        counts = self.cycles.setdefault(cycle, [0, drafted, 0])
        counts[0] += 1
        counts[2] += from_draft
        self.at[cycle] = self.end_s

    def measured(self, prompt: Prompt, arm: str, **more: Any) -> Measured:
        """`more`: the fields that tokens and clock do not tell."""
        rows = [(self.at[number], *counts) for number, counts in self.cycles.items() if number]
        at, emitted, drafted, accepted = (tuple(column) for column in zip(*rows, strict=True)) if rows else ((),) * 4
        return Measured(
            prompt=prompt.name,
            arm=arm,
            prompt_tokens=len(prompt.ids),
            prompt_sha256=ids_sha256(prompt.ids),
            generated=len(self.tokens),
            output_sha256=ids_sha256(self.tokens),
            first_s=self.first_s,
            end_s=self.end_s,
            tokens=tuple(self.tokens),
            text="".join(self.text),
            cycles=Cycles(at, emitted, drafted, accepted),
            **more,
        )


@dataclass(frozen=True)
class Models:
    """model, tokenizer: as `dflash_mlx.load` or mlx_lm's gives them. clock: of the harness, in seconds."""

    model: Any
    tokenizer: TokenizerWrapper
    clock: Clock = time.perf_counter

    def tokenizer_for(self, limits: Limits) -> TokenizerWrapper:
        """One that ends nothing, with `ignore_eos`: both loops ask it which ids end an answer."""
        if not limits.ignore_eos:
            return self.tokenizer
        endless = copy.copy(self.tokenizer)
        endless.eos_token_ids = ()
        return endless


def settle() -> None:
    """Leave nothing of earlier requests in flight, in memory, or in the count of it."""
    import mlx.core as mx
    from mlx_lm.generate import generation_stream

    gc.collect()
    mx.synchronize(generation_stream)  # mlx_lm's loop leaves a step in flight when an answer ends
    mx.synchronize()
    mx.clear_cache()
    mx.reset_peak_memory()


def _sampler(limits: Limits) -> Any:
    """mlx_lm's, over its global random state, which is seeded here."""
    import mlx.core as mx
    from mlx_lm.sample_utils import make_sampler

    if limits.greedy:
        return None
    mx.random.seed(limits.seed or 0)
    return make_sampler(limits.temperature, limits.top_p, top_k=limits.top_k)


@dataclass(frozen=True)
class Stock:
    """mlx_lm's own loop."""

    models: Models
    name: str = "stock"
    exact: bool = True

    def run(self, prompt: Prompt, limits: Limits) -> Measured:
        import mlx.core as mx
        from mlx_lm import stream_generate

        tokenizer, sampler, seen = self.models.tokenizer_for(limits), _sampler(limits), Sighting(self.models.clock)
        settle()
        seen.begin()
        last = None
        for number, last in enumerate(
            stream_generate(
                self.models.model,
                tokenizer,
                mx.array(prompt.ids),
                limits.max_tokens,
                sampler=sampler,
                prefill_step_size=limits.prefill_step_size,
            )
        ):
            seen.see(last.token, last.text, cycle=number)
        return seen.measured(prompt, self.name, block_size=1, mode="plain", **_mlx_lm_says(last))


def _mlx_lm_says(last: GenerationResponse | None) -> dict[str, Any]:
    """What mlx_lm's last response reports. Its prompt's time ends with the first token: the time to it."""
    assert last is not None, "mlx_lm yields at least one response"
    return {
        "finish_reason": last.finish_reason,
        "peak_memory_gb": last.peak_memory,
        "reported": Reported(
            generated=last.generation_tokens,
            ttft_s=last.prompt_tokens / last.prompt_tps,
            generation_tps=last.generation_tps if last.generation_tokens > 1 else None,
        ),
    }


@dataclass(frozen=True)
class Ours:
    """This package's loop.

    mode: "plain", "dflash" or "auto". block_size: None is the draft's choice, which `auto` may change at any time.
    options: what else `stream_generate` takes, `pipelined` and `kernels` say.
    """

    models: Models
    draft: Any
    mode: str
    name: str
    block_size: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    exact: bool = True

    @classmethod
    def plain(cls, models: Models) -> Ours:
        return cls(models, None, "plain", "plain")

    @classmethod
    def dflash(cls, models: Models, draft: Any, block_size: int | None = None, name: str = "dflash") -> Ours:
        """Drafts in every cycle: the block is given, since only without one does a request rest."""
        return cls(models, draft, "dflash", name, block_size or draft.block_size)

    @classmethod
    def auto(cls, models: Models, draft: Any) -> Ours:
        return cls(models, draft, "auto", "auto")

    def run(self, prompt: Prompt, limits: Limits) -> Measured:
        from dflash_mlx.generate import stream_generate
        from dflash_mlx.sampling import SamplingPolicy

        policy = SamplingPolicy(limits.temperature, limits.top_p, top_k=limits.top_k, seed=limits.seed)
        tokenizer, seen = self.models.tokenizer_for(limits), Sighting(self.models.clock)
        settle()
        seen.begin()
        last: Any = None
        for last in stream_generate(
            self.models.model,
            tokenizer,
            list(prompt.ids),
            limits.max_tokens,
            self.draft,
            sampler=policy,
            prefill_step_size=limits.prefill_step_size,
            mode=self.mode,
            block_size=self.block_size,
            **self.options,
        ):
            seen.see(last.token, last.text, cycle=last.cycle, drafted=last.drafted, from_draft=last.from_draft)
        stats, timings = last.stats, last.timings
        return seen.measured(
            prompt,
            self.name,
            finish_reason=last.finish_reason,
            cached_tokens=last.cached_tokens,
            block_size=last.block_size,
            draft_prefill_s=timings.draft_prefill_s,
            peak_memory_gb=last.peak_memory,
            mode=last.mode,
            notes=tuple(last.notes),
            reported=Reported(
                generated=stats.emitted,
                cycles=stats.cycles,
                plain_steps=stats.plain_steps,
                drafted=stats.drafted,
                accepted=stats.accepted,
                histogram=dict(sorted(stats.histogram.items())),
                ttft_s=timings.ttft_s,
                decode_s=timings.decode_s,
                total_s=timings.total_s,
                decode_tps=timings.decode_tps,
                request_tps=timings.request_tps,
            ),
        )


@dataclass(frozen=True)
class Sequential:
    """mlx_lm's speculative decoding with an ordinary small model, `drafts` tokens per cycle, drafted one by one.

    Its first cycle drafts already, so that no token is prefill's alone, and the time to the first token holds the
    prefill of both models and that cycle. mlx_lm does not say how many tokens it drafted: as many as fit below the
    budget.
    """

    models: Models
    draft: Any
    drafts: int = 3
    name: str = "sequential"
    exact: bool = False

    def run(self, prompt: Prompt, limits: Limits) -> Measured:
        import mlx.core as mx
        from mlx_lm import stream_generate

        tokenizer, sampler, seen = self.models.tokenizer_for(limits), _sampler(limits), Sighting(self.models.clock)
        settle()
        seen.begin()
        responses: Iterable[GenerationResponse] = stream_generate(
            self.models.model,
            tokenizer,
            mx.array(prompt.ids),
            limits.max_tokens,
            self.draft,
            num_draft_tokens=self.drafts,
            sampler=sampler,
            prefill_step_size=limits.prefill_step_size,
        )
        cycle, room, last = 1, limits.max_tokens, None
        for last in responses:
            drafted = min(self.drafts, room)
            seen.see(last.token, last.text, cycle=cycle, drafted=drafted, from_draft=last.from_draft)
            if not last.from_draft:  # the target's own token ends a cycle
                cycle, room = cycle + 1, limits.max_tokens - len(seen.tokens)
        return seen.measured(prompt, self.name, block_size=self.drafts + 1, mode="sequential", **_mlx_lm_says(last))
