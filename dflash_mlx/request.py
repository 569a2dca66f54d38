"""One request, planned before any model work: arguments checked, what runs decided, fallbacks noted.

`plan` answers "does this draft speculate here, with which block, and if not, why not"; `Request.open` makes the
session of the decode loop and `Request.close` leaves the caller's cache holding exactly what was returned.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache

from dflash_mlx import blas, quantized_kv
from dflash_mlx.accept import Decider, make_decider
from dflash_mlx.blocksize import AdaptiveBlock, BlockSchedule, FixedBlock
from dflash_mlx.cache import TargetCache, positions_held
from dflash_mlx.decode import UNLIMITED, Session
from dflash_mlx.draft.checkpoint import check_pair
from dflash_mlx.draft.model import DraftModel
from dflash_mlx.draft.vocabulary import borrow_head
from dflash_mlx.errors import CacheStateError, DraftFault
from dflash_mlx.exact import Cautious
from dflash_mlx.fallback import (
    request_notes,
    target_notes,
    unserved_notes,
    why_not_over,
    why_not_pipelined,
    why_plain,
)
from dflash_mlx.health import Patient, Watch
from dflash_mlx.kernels.choice import STOCK, Kernels
from dflash_mlx.kernels.gate import select
from dflash_mlx.options import Options
from dflash_mlx.prompt_cache import PromptCache
from dflash_mlx.proposers import NullProposer, Proposer
from dflash_mlx.proposers.block import BlockProposer
from dflash_mlx.proposers.cases import cases_of_pair
from dflash_mlx.sampling import Draws, SamplingPolicy
from dflash_mlx.stats import Timings
from dflash_mlx.targets import Target, target_for


@dataclass(frozen=True)
class Request:
    """What will run.

    draft:      also given for plain decoding over a prompt cache that keeps its context, which is then kept fed.
    mode:       "dflash" or "plain".
    block_size: 1 for plain.
    adaptive:   rest from speculating where it does not pay.
    pipelined:  submit the next draft before the verdict is read.
    kernels:    what runs blocks; single rows are stock MLX, and so is plain decoding.
    """

    target: Target
    draft: DraftModel | None
    mode: str
    notes: tuple[str, ...]
    block_size: int
    adaptive: bool
    options: Options
    prompt_cache: PromptCache | None
    entries: list | None  # an mlx_lm cache list of the caller's
    kernels: Kernels = STOCK
    pipelined: bool = False

    @property
    def max_tokens(self) -> int:
        return UNLIMITED if self.options.max_tokens == -1 else self.options.max_tokens

    def check_prompt(self, ids: Sequence[int]) -> None:
        """Raises ValueError for a prompt that is empty, longer than the context, or has ids outside the vocabulary."""
        if not len(ids):
            raise ValueError("`prompt` has no tokens. Give at least one; with a chat model, use its chat template.")
        expected = None if self.prompt_cache is None else self.prompt_cache.expected
        if expected is not None and list(ids) != expected:
            raise ValueError(
                f"`prompt` has {len(ids)} tokens, and `prompt_cache.reuse(ids)` kept {self.held}, so that the other "
                f"{len(expected)} have to follow: generate from ids[reused:]. To send something else, call `reuse` "
                "with the conversation that it ends."
            )
        rows = self.target.spec.vocab_size
        bad = next((token for token in ids if not 0 <= token < rows), None)
        if bad is not None:
            raise ValueError(f"`prompt` holds id {bad}, and the model's ids are 0..{rows - 1}. Is this its tokenizer?")
        limit, length = self.target.spec.max_positions, self.held + len(ids)
        if limit and length > limit:
            raise ValueError(f"`prompt` makes {length} tokens, and the model's context is {limit}. Shorten it.")

    def notes_for(self, ids: Sequence[int]) -> tuple[str, ...]:
        """The request's notes, and what this prompt adds: read again, or at the end of the model's context."""
        notes, limit = list(self.notes), self.target.spec.max_positions
        again = 0 if self.prompt_cache is None else self.prompt_cache.recomputed
        if again:
            notes.append(
                f"{again} tokens are read again: the conversation changed before them, and this target can go back "
                "only to snapshots"
            )
        if limit and self.held + len(ids) + self.max_tokens > limit:
            notes.append(f"the answer may outgrow the model's context of {limit} tokens and then loses quality")
        return tuple(notes)

    @property
    def held(self) -> int:
        """Positions that the caller's cache holds."""
        if self.prompt_cache is not None:
            return self.prompt_cache.cache.length
        return positions_held(self.entries or ())

    def open(self, stop: Collection[int]) -> Session:
        """The session that `decode` runs; `stop` are the ids that end it."""
        options = self.options
        draws = Draws.for_policy(options.policy) if isinstance(options.policy, SamplingPolicy) else Draws(0)
        held = self.prompt_cache
        if held is not None:
            with held.exclusive():
                held.check_whole()
                held.context_in_step()
            cache, tokens, base = held.cache, held.tokens, 0
        else:
            entries = self.entries if self.entries is not None else self.target.make_entries(options.max_kv_size)
            base = positions_held(entries)
            cache, tokens = TargetCache(entries, base), []
        cache.quantize_from_now(options.quantization)
        proposer = self._proposer(cache, draws)
        session = Session(
            target=self.target,
            cache=cache,
            proposer=proposer,
            decider=self._decider(draws, stop),
            schedule=self._schedule(proposer, tokens, cache.length),
            tokens=tokens,
            base=base,
            pipelined=self.pipelined,
            timings=Timings(start=options.requested_at),
        )
        if held is not None:
            if held.needs_places:
                session.at_border = held.remember_place
                session.borders = () if held.border is None else (held.border,)
            held.begin(session)  # until `close`, or until the session is gone
        return session

    def _decider(self, draws: Draws, stop: Collection[int]) -> Decider:
        policy, options = self.options.policy, self.options
        if options.exact and self.mode == "dflash" and isinstance(policy, SamplingPolicy):
            return Cautious(policy, draws, options.margin, kernels=self.kernels)
        return make_decider(policy, options.processors, draws, rule=options.rule, stop=stop, kernels=self.kernels)

    def _schedule(self, proposer: Proposer, tokens: list[int], position: int) -> BlockSchedule:
        draft, options = self.draft, self.options
        if self.mode != "dflash" or draft is None:
            return FixedBlock(1)
        adaptive = AdaptiveBlock(self.block_size, draft.costs, draft.acceptance, position) if self.adaptive else None
        return Watch(
            adaptive or FixedBlock(self.block_size),
            Patient(self.target, draft, proposer, tokens),
            insists=options.mode == "dflash" or options.text_depends_on_blocks,
            strict=options.strict,
        )

    def _proposer(self, cache: TargetCache, draws: Draws) -> Proposer:
        if self.draft is None:
            return NullProposer()
        context = self.prompt_cache.context if self.prompt_cache is not None else None
        if context is None:
            context = self.draft.make_context(cache.length)
        rows = self.block_size - 1 if self.adaptive else 0
        if self.options.samples_drafts and isinstance(self.options.policy, SamplingPolicy):
            return BlockProposer(self.draft, self.target, context, self.options.policy, draws, self.kernels, rows)
        return BlockProposer(self.draft, self.target, context, None, None, self.kernels, rows)

    def close(self, session: Session) -> None:
        """However the request ended: drop what was not delivered, leave nothing lazy in a cache that is kept."""
        try:
            session.retract()
            if session.cache.closed is not None:
                return
            if self.entries is not None and session.tokens:
                session.write_anchor()
            elif self.prompt_cache is not None:
                session.finish()
        except BaseException as error:  # a second interrupt, or work that MLX cannot finish in this thread
            why = f"It was left before what was not returned could be taken back ({type(error).__name__}: {error})."
            session.cache.closed = session.cache.closed or why
            raise
        finally:
            if self.prompt_cache is not None:
                self.prompt_cache.end(session)


def plan(
    model: nn.Module, draft: DraftModel | None, options: Options, prompt_cache: PromptCache | list | None = None
) -> Request:
    """Check the options against the models and decide what runs.

    Raises:
        ValueError: an argument is out of range or not honoured here; the message names it.
        UnsupportedTarget, IncompatiblePair, CacheStateError: as they say.
    """
    if draft is not None and not isinstance(draft, DraftModel):
        raise ValueError(
            f"`draft_model` is a {type(draft).__name__}, not a DFlash draft. A DFlash draft comes from "
            "dflash_mlx.load(..., draft=...); an ordinary language model as draft is what mlx_lm's own "
            "stream_generate takes."
        )
    if options.strict and draft is None:
        raise ValueError("`strict` is about a draft, and there is no `draft_model`. Pass one, or leave `strict` out.")
    target = target_for(model)
    if draft is not None:
        check_pair(draft, target, target.spec.model_type)
        borrow_head(draft, target)
        block_size = _block(draft, options.block_size)
    held, entries = _check_cache(prompt_cache, target, draft)
    if draft is not None and draft.fault is not None and options.strict and options.mode != "plain":
        raise DraftFault(f"In an earlier request {draft.fault} Without `strict` decoding would go on plainly.")
    reason = why_plain(draft, options, target.spec.dtype) or why_not_over(entries)
    if reason and options.mode == "dflash":
        raise ValueError(f"`mode` is 'dflash', but {reason}")
    present = held.cache.entries if held else entries
    if present is None:
        present = target.make_entries(options.max_kv_size)
    kv_notes = quantized_kv.check(target, present, options.quantization)
    speculates = draft is not None and reason is None
    _check_max_kv_size(options, held, speculates)
    adaptive = speculates and options.mode == "auto" and options.block_size is None
    simple = why_not_pipelined(options, speculates)
    target, kernels, kernel_notes = _served(target, draft, options) if speculates else (target, STOCK, ())
    return Request(
        target=target,
        draft=draft if speculates else _kept_draft(held),
        mode="dflash" if speculates else "plain",
        notes=(
            *request_notes(options, reason if draft else None, simple, speculates and _unseen(held, entries), adaptive),
            *kv_notes,
            *target_notes(target, speculates),
            *(draft.notes if draft is not None and speculates else ()),
            *((blas.status().note,) if blas.status().active else ()),
            *(kernel_notes if speculates else unserved_notes(options.kernels)),
        ),
        block_size=block_size if speculates else 1,
        adaptive=adaptive and not options.text_depends_on_blocks,
        pipelined=options.pipelined and simple is None,
        options=options,
        prompt_cache=held,
        entries=entries,
        kernels=kernels,
    )


def _served(stock: Target, draft: DraftModel | None, options: Options) -> tuple[Target, Kernels, tuple[str, ...]]:
    """What a request with drafts runs on: the target and its kernels, stock where none is open; and what to say."""
    wanted = select(options.kernels)
    if draft is None or not wanted.wired:
        return stock, wanted, wanted.notes(())
    target = target_for(stock.model, wanted)
    cases = cases_of_pair(target, draft, wanted)
    kernels = wanted.serving(cases)
    return target if kernels.wired else stock, kernels, wanted.notes(cases)


def _check_max_kv_size(options: Options, held: PromptCache | None, speculates: bool) -> None:
    if options.max_kv_size is None:
        return
    if held is not None:
        raise ValueError("`max_kv_size` is not honoured with a PromptCache, which was made without it. Leave one out.")
    if speculates:
        raise ValueError(
            "`max_kv_size` is not honoured with `draft_model`: its ring would change the answer. Leave one out."
        )


def _block(draft: DraftModel, block_size: int | None) -> int:
    trained = draft.config.block_size
    if block_size is None:
        return draft.block_size
    if block_size != 1 and not 2 <= block_size <= trained:
        raise ValueError(
            f"`block_size` has to be in 2..{trained} (1 is plain decoding; {draft.name} was trained with {trained}), "
            f"got {block_size}."
        )
    return block_size


def _check_cache(
    prompt_cache: PromptCache | list | None, target: Target, draft: DraftModel | None
) -> tuple[PromptCache | None, list | None]:
    if prompt_cache is None:
        return None, None
    if isinstance(prompt_cache, PromptCache):
        if prompt_cache.target.model is not target.model or (draft is not None and prompt_cache.draft is not draft):
            raise ValueError(
                "`prompt_cache` was made for other models. Make one with make_prompt_cache(model, draft_model) and "
                "use it with those two only."
            )
        if prompt_cache.cache.closed is not None:
            raise CacheStateError(prompt_cache.cache.closed)
        return prompt_cache, None
    fresh = target.make_entries()
    if len(prompt_cache) != len(fresh):
        raise ValueError(
            f"`prompt_cache` has {len(prompt_cache)} entries and the model {len(fresh)}. A list for another model or "
            "for an autoregressive draft does not fit; use make_prompt_cache(model, draft_model) of dflash_mlx."
        )
    for index, (entry, own) in enumerate(zip(prompt_cache, fresh, strict=True)):
        if isinstance(entry, ArraysCache) != isinstance(own, ArraysCache):
            raise ValueError(
                f"`prompt_cache` was made for another model: entry {index} is a {type(entry).__name__}, and this one's "
                f"is a {type(own).__name__}. Make one with make_prompt_cache(model, draft_model) of dflash_mlx."
            )
    return None, prompt_cache


def _kept_draft(held: PromptCache | None) -> DraftModel | None:
    """The draft whose context a plain request keeps fed."""
    return None if held is None else held.draft


def _unseen(held: PromptCache | None, entries: list | None) -> bool:
    """Whether the cache holds positions whose features the draft was never given."""
    if held is not None:
        return held.draft_is_late
    return entries is not None and positions_held(entries) > 0
