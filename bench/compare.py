"""One prompt's answers against the baseline's: the same tokens, if not where and why, and the same answer.

Rounding is examined by `dflash_mlx.divergence`, which a judge hides, so that a client of a server can do without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .answers import extract, is_right
from .record import Compared, Limits, Measured, Prompt

if TYPE_CHECKING:
    from dflash_mlx.divergence import Divergence

Judge = Callable[[Sequence[int], Sequence[int], Sequence[int]], "Divergence"]
"""(prompt, expected, got), all ids."""


def model_judge(model: Any, limits: Limits, kernels: str = "auto") -> Judge | None:
    """Whether rounding explains a difference, measured on the model; None for sampled text, where chance can too.

    kernels: of the arms that draft.
    """
    if not limits.greedy:
        return None
    from dflash_mlx.divergence import compare
    from dflash_mlx.rounding import Decoding

    decoding = Decoding(limits.prefill_step_size)
    return lambda prompt, expected, got: compare(model, prompt, expected, got, decoding=decoding, kernels=kernels)


def common_prefix(expected: Sequence[int], got: Sequence[int]) -> int:
    """Equal tokens at the beginning."""
    pairs = zip(expected, got, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(got)))


def compared(
    prompt: Prompt,
    baseline: Sequence[Measured],
    trials: Sequence[Measured],
    judge: Judge | None = None,
    run_code: bool = False,
) -> Compared:
    """An arm's trials against the first of the baseline's, at least one each; the baseline's own too."""
    expected = baseline[0]
    answer, wanted = (extract(prompt, each.text, run_code) for each in (trials[0], expected))
    others = {each.output_sha256: each for each in trials if each.output_sha256 != expected.output_sha256}
    match, worst = not others, min(others.values(), key=lambda each: _prefix(expected, each), default=expected)
    found = None
    if match:
        kind: Any = "identical"
    elif judge is None or not (expected.tokens and all(each.tokens for each in others.values())):
        kind = None
    else:
        judged = [(judge(prompt.ids, expected.tokens, each.tokens), each) for each in others.values()]
        found, worst = min(judged, key=lambda pair: (pair[0].kind != "bug", pair[0].index or 0))
        kind = found.kind
    prefix = _prefix(expected, worst)
    longer = max(len(expected.tokens), len(worst.tokens))
    return Compared(
        prompt=prompt.name,
        arm=trials[0].arm,
        tokens_match=match,
        common_prefix=prefix,
        common_share=prefix / longer if longer else float(match),
        divergence=kind,
        index=None if match or not longer else prefix,
        gap=found.gap if found else None,
        rounding=found.rounding if found else None,
        explanation=found.explanation if found else None,
        answers=len({each.output_sha256 for each in trials}),
        answer=answer,
        answer_match=None if answer is None and wanted is None else answer == wanted,
        right=is_right(prompt, answer),
    )


def _prefix(expected: Measured, got: Measured) -> int:
    return common_prefix(expected.tokens, got.tokens)
