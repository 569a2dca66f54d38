"""Why a request decodes plainly, and what else the user is told: no fallback is silent."""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models.cache import RotatingKVCache

from dflash_mlx import blas
from dflash_mlx.draft.model import DraftModel
from dflash_mlx.kernels.choice import Kernels
from dflash_mlx.kernels.gate import parse_wish
from dflash_mlx.options import Options
from dflash_mlx.sampling import SamplingPolicy
from dflash_mlx.targets import Target


def why_plain(draft: DraftModel | None, options: Options, dtype: mx.Dtype) -> str | None:
    """Why this request does not speculate, or None."""
    if draft is None:
        return "no `draft_model` was given."
    if options.mode == "plain":
        return "`mode` is 'plain'."
    if options.block_size == 1:
        return "`block_size` is 1, which leaves no room for a draft."
    if options.mode == "auto" and draft.fault is not None and not options.text_depends_on_blocks:
        return f"in an earlier request {draft.fault}"
    if options.mode == "auto" and mx.default_device() == mx.cpu:
        return _why_not_on_cpu(dtype)
    return None


def why_not_pipelined(options: Options, speculates: bool) -> str | None:
    """Why the next draft has to wait for the verdict, or None."""
    if not speculates:
        return "there are no drafts."
    if not isinstance(options.policy, SamplingPolicy) or options.processors:
        return (
            "this sampler, or the logits processors, are applied position by position, with the host in between. Use "
            "dflash_mlx.make_sampler, without processors."
        )
    return None


def why_not_over(entries: list | None) -> str | None:
    """Why a cache list of the caller's cannot be speculated over, or None."""
    if any(isinstance(entry, RotatingKVCache) and entry.keep for entry in entries or ()):
        return (
            "`prompt_cache` is a ring that keeps its first tokens (`max_kv_size`). A block over it sees other tokens "
            "than single steps do, so the answer would change."
        )
    return None


def _why_not_on_cpu(dtype: mx.Dtype) -> str | None:
    """On a CPU a block is cheaper than its tokens one by one only in float32 with a real BLAS (bench/LOG.md)."""
    if dtype != mx.float32:
        return (
            f"the target runs in {str(dtype).removeprefix('mlx.core.')} on a CPU, where every drafted token costs as "
            "much as a decoded one. Load with dtype='float32', or pass mode='dflash' to speculate anyway."
        )
    if not blas.status().fast:
        return (
            "MLX runs on a CPU with a reference BLAS, where every drafted token costs as much as a decoded one. Load "
            "with blas='auto', or pass mode='dflash' to speculate anyway."
        )
    return None


def request_notes(
    options: Options, reason: str | None, simple: str | None, unseen: bool, adaptive: bool
) -> tuple[str, ...]:
    """What the user should know about what runs: reasons first.

    Args:
        reason, simple: why decoding is plain, and why cycles are not pipelined, or None.
    """
    notes = []
    if reason is not None and options.mode == "auto":
        notes.append(f"plain decoding: {reason}")
    if simple is not None and options.pipelined:
        notes.append(f"cycles are not pipelined: {simple}")
    if unseen:
        notes.append(
            "the draft has not seen all that the prompt cache holds, so it accepts less; keep one "
            "dflash_mlx.make_prompt_cache(model, draft_model) for all requests to this pair"
        )
    if adaptive and options.text_depends_on_blocks:
        notes.append("whole blocks in every cycle, so that the seed repeats the text; with rule='match' they may adapt")
    return tuple(notes)


def unserved_notes(wish: str | Kernels) -> tuple[str, ...]:
    """Of a request without drafts, for someone who asked for kernels by name."""
    named = isinstance(wish, str) and parse_wish(wish)
    return ("no kernel is used: they run blocks of drafts, and decoding is plain",) if named else ()


def target_notes(target: Target, speculates: bool) -> tuple[str, ...]:
    notes = [] if target.spec.note is None else [target.spec.note]
    if speculates and target.spec.width_dependent:
        notes.append(
            f"{target.spec.model_type} computes a block in another form than single tokens, so at a near-tie the "
            "answer may differ from plain decoding; mode='plain' is plain decoding"
        )
    return tuple(notes)
