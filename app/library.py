"""The real engine library behind `backend.Backend`.

`mlx_backend` is the only place of this package that imports MLX, and it is called inside the engine thread: mlx_lm
takes about 3 s to import, and arrays belong to the thread that made them.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from typing import Any

from dflash_mlx.app.backend import Backend, Cache, Pair, Progress, Verdict

WARM_UP_TOKENS = 8


def mlx_backend() -> Backend:
    """Import the engine library. Slow; only inside the thread that will own the arrays."""
    # `load` comes first: it puts a real BLAS under MLX on Linux, which has to happen early.
    from dflash_mlx import load, make_prompt_cache, make_sampler, stream_generate  # noqa: I001
    from dflash_mlx.app.prepare import prepare
    from dflash_mlx.cpu import prefill_step_size
    from dflash_mlx.divergence import compare
    from dflash_mlx.doctor_command import versions
    from dflash_mlx.errors import DFlashError
    from dflash_mlx.rounding import Decoding
    from dflash_mlx.targets import target_for
    from dflash_mlx.training.memory import memory_here
    import mlx.core as mx
    from mlx.utils import tree_flatten

    step = prefill_step_size()

    def gigabytes(model: Any) -> float:
        arrays = dict[str, mx.array](tree_flatten(model.parameters()))
        return sum(array.nbytes for array in arrays.values()) / 1e9

    def with_head(draft: Any) -> float:
        """Rows of the target's head that it has a copy of are none of its parameters."""
        borrowed = draft.head if draft.config.draft_vocab_size is None else None
        return gigabytes(draft) + (gigabytes(borrowed) if borrowed is not None else 0.0)

    def load_pair(path: str, options: Mapping[str, Any], progress: Progress) -> Pair:
        mx.reset_peak_memory()
        model, tokenizer, draft = load(path, progress=progress, **options)
        return Pair(
            model,
            tokenizer,
            draft,
            draft.config.block_size if draft is not None else None,
            target_for(model).spec.max_positions,
            gigabytes(model),
            with_head(draft) if draft is not None else None,
        )

    def make_cache(model: Any, draft: Any) -> Cache:
        return make_prompt_cache(model, draft)

    def compare_arms(model: Any, ids: list[int], expected: list[int], got: list[int], **options: Any) -> Verdict:
        return compare(model, ids, expected, got, decoding=Decoding(step), **options)

    def warm_up(pair: Pair, ids: Sequence[int], kernels: str) -> None:
        model: Any = pair.model
        tokenizer: Any = pair.tokenizer
        draft: Any = pair.draft
        for mode in ("plain", "dflash"):
            for _ in stream_generate(
                model, tokenizer, list(ids), WARM_UP_TOKENS, draft, mode=mode, kernels=kernels, prefill_step_size=step
            ):
                pass

    def free() -> None:
        gc.unfreeze()  # the window freezes what is there when a model is ready: the model is part of it
        gc.collect()
        mx.clear_cache()

    return Backend(
        load_pair,
        stream_generate,
        make_sampler,
        make_cache,
        mx.clear_streams,
        compare_arms,
        warm_up,
        free,
        lambda: mx.get_active_memory() / 1e9,
        memory_here() / 1e9,
        (DFlashError, ValueError),
        step,
        versions(),
        prepare,
    )
