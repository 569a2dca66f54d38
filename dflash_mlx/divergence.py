"""Where two answers to one request differ, and whether rounding can be the reason.

A forward over a block may add the same numbers in another order than one over a single token, so at a near-tie plain
and speculative decoding can choose differently; any other difference is a bug. `compare` measures at the first one
(`dflash_mlx.rounding`):

1. Single-token steps over the prompt and the tokens that agree give the logits that plain decoding chose from; the same
   tokens in blocks of several widths give the rounding: the most by which a logit of the two candidates moves.
   Where the answer ran on kernels (`dflash_mlx.kernels`) so do these blocks, and the steps do not.
2. A near-tie is where a move of every logit by the rounding and one unit in the last place is enough to choose the
   other token; for greedy text: the gap is at most twice their sum. Where blocks move no logit of the vocabulary, as
   with plain MLX on a CPU, only an exact tie is one.
3. Blocks that move the logits by more than rounding can are a bug of the forward itself, not a near-tie.

Measured on SmolLM2-135M by putting the hidden units of its MLPs in other orders: point 2 covers every choice that this
flips in 1920 rows of bfloat16 and 960 of float16, and 99.9% in 960 of float32 (bench/LOG.md). What it
cannot tell: a bug that first shows at a near-tie passes for one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import wired_limit
from mlx_lm.tokenizer_utils import TokenizerWrapper

from dflash_mlx.generate import stream_generate
from dflash_mlx.kernels.choice import Kernels
from dflash_mlx.kernels.gate import select
from dflash_mlx.rounding import Decoding, limit, logits_after
from dflash_mlx.sampling import Draws, SamplingPolicy, log_probs

Kind = Literal["identical", "near-tie", "bug"]
Score = Callable[[mx.array], mx.array]


@dataclass(frozen=True)
class Divergence:
    """The comparison of two answers, `expected` by plain decoding and `got`. None where there is nothing to say.

    index:    of the first token that differs, from 0; or the length of the answer that ended too early.
    gap:      log-probability of the expected token minus that of the one that was got, by single-token steps, rounded
              as mlx_lm rounds; at a temperature with the noise of the draw.
    rounding: the most by which blocks move a logit of the two tokens there.
    """

    kind: Kind
    index: int | None
    gap: float | None
    rounding: float | None
    expected_token: int | None
    got_token: int | None
    explanation: str


def compare(
    model: nn.Module,
    prompt: Sequence[int],
    expected: Sequence[int],
    got: Sequence[int],
    *,
    policy: SamplingPolicy | None = None,
    decoding: Decoding | None = None,
    kernels: str | Kernels = "auto",
) -> Divergence:
    """Compare two answers to `prompt`; where they differ, five passes over the answer so far are run.

    An answer that ends where the other goes on is a bug: rounding changes tokens, not where equal tokens end. So both
    have to come from the same budget and the same stops.

    Args:
        model: an mlx_lm model; it needs no adapter.
        prompt: ids, at least one; decoded without a prompt cache and without logits processors.
        expected, got: generated ids, stop tokens included.
        policy: how both were chosen; None is greedy. A temperature needs a seed, and `got` rule="match".
        decoding: how both were decoded; None is mlx_lm's defaults.
        kernels: what ran the blocks of `got`, as for `stream_generate`, whose default is this one; "off" for an
            answer without blocks.
    Raises:
        ValueError: `prompt` is empty, `policy` samples without a seed, or `kernels` names none.
    """
    policy, chosen = policy or SamplingPolicy(), select(kernels)
    if isinstance(prompt, str):
        raise ValueError("`prompt` has to be ids, got text. Give what both answers continue: tokenizer.encode(...).")
    if not len(prompt):
        raise ValueError("`prompt` has no tokens. Give the ids that both answers continue, at least one.")
    if not policy.greedy and policy.seed is None:
        raise ValueError("`policy` samples without a `seed`, so two answers differ by chance. Give both the same seed.")
    index = next((i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b), None)
    if index is None:
        return _of_equal_tokens(expected, got)
    with wired_limit(model):
        logits, blocks = logits_after(model, prompt, expected[:index], decoding or Decoding(), chosen)
    place = _Place(index, int(expected[index]), int(got[index]), logits, blocks, _score(policy, len(prompt) + index))
    return place.verdict(limit(model, logits.dtype))


def check(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    prompt: Sequence[int],
    tokens: Sequence[int],
    *,
    policy: SamplingPolicy,
    prefill_step_size: int,
    kernels: str | Kernels = "auto",
    **request: Any,
) -> Divergence:
    """Decode the same request plainly, up to the first difference, and compare `tokens` with that.

    `kernels`: as for `compare`. `request`: what else `stream_generate` was given (`max_tokens`, `stop`, `kv_bits`...).
    Costs a plain decoding.
    """
    kept = {name: request[name] for name in ("kv_bits", "kv_group_size", "quantized_kv_start") if name in request}
    expected = list[int]()
    responses = stream_generate(
        model, tokenizer, prompt, mode="plain", sampler=policy, prefill_step_size=prefill_step_size, **request
    )
    with closing(responses):
        for index, response in enumerate(responses):
            expected.append(response.token)
            if list(tokens[index : index + 1]) != [response.token]:
                break
    decoding = Decoding(prefill_step_size, **kept)
    return compare(model, prompt, expected, tokens, policy=policy, decoding=decoding, kernels=kernels)


def _of_equal_tokens(expected: Sequence[int], got: Sequence[int]) -> Divergence:
    """Of two answers of which one begins with the other."""
    if len(expected) == len(got):
        return Divergence("identical", None, None, None, None, None, f"All {len(got)} tokens are the same.")
    index = min(len(expected), len(got))
    missing, more = (int(answer[index]) if len(answer) > index else None for answer in (expected, got))
    short, long = ("it", "plain decoding") if more is None else ("plain decoding", "it")
    why = f"After {index} equal tokens {short} ends where {long} goes on, which rounding cannot do."
    return Divergence("bug", index, None, None, missing, more, why)


def _score(policy: SamplingPolicy, position: int) -> Score:
    """What the policy takes the largest of, from log-probabilities [V], in their units; position: of the token."""
    if policy.greedy:
        return lambda rows: rows
    key = Draws.for_policy(policy).key("target", position)
    return lambda rows: (
        policy.temperature * (policy.log_weights(rows[None])[0] + mx.random.gumbel(shape=rows.shape, key=key))
    )


@dataclass(frozen=True)
class _Place:
    """The first difference, measured. logits: [V] by single-token steps; blocks: [W, V] by blocks."""

    index: int
    expected: int
    got: int
    logits: mx.array
    blocks: mx.array
    score: Score

    def verdict(self, most: float) -> Divergence:
        """most: that rounding can move the logits; standard deviation of the moves over that of the logits."""
        logits, pair = self.logits.astype(mx.float32), mx.array([self.expected, self.got])
        finite = mx.isfinite(logits)  # a model may rule ids out
        moves = mx.where(finite, self.blocks.astype(mx.float32) - logits, 0.0)  # [W, V]
        rounding = _number(mx.abs(moves[:, pair]).max())
        spread = _number(mx.std(moves, axis=-1).max() / mx.std(mx.where(finite, logits, 0.0)))
        rows = log_probs(self.logits).astype(mx.float32)  # [V]
        last_place = self._last_place(mx.concatenate([rows[pair], logits[pair]]))
        slack = rounding + last_place if mx.any(moves != 0).item() else 0.0
        scores = self.score(rows)
        gap = _number(scores[self.expected] - scores[self.got])
        kind: Kind = "bug"
        moved = f"blocks move their logits by up to {rounding:.3g}"
        if not spread <= most:
            why = f"blocks move the logits by {spread:.2g} of their spread, and rounding by less than {most:.2g}"
        elif not self._chosen(rows, self.expected, slack):
            why = f"single-token steps of the model do not choose the expected one either; {moved}"
        elif not self._chosen(rows, self.got, slack):
            why = f"{_apart(gap)}, and {moved}, which is too little"
        else:
            kind, why = "near-tie", f"{_apart(gap)}, and {moved}, so rounding decides"
        text = f"After {self.index} equal tokens {self.expected} was expected and {self.got} got: {why}."
        return Divergence(kind, self.index, _finite(gap), _finite(rounding), self.expected, self.got, text)

    def _last_place(self, values: mx.array) -> float:
        """One unit in the last place of the logits' dtype at the largest of `values`."""
        return mx.finfo(self.logits.dtype).eps * 2.0 ** (math.frexp(_number(mx.abs(values).max()))[1] - 1)

    def _chosen(self, rows: mx.array, token: int, slack: float) -> bool:
        """Whether moves of at most `slack` make the policy choose `token`: it rises, or the first choice falls.

        The second matters to filters (top-p, top-k, min-p), at whose border the first choice may drop out.
        """
        ids = mx.arange(rows.size)
        first = mx.argmax(self.score(rows))
        for moves in (mx.where(ids == token, 2 * slack, 0.0), mx.where(ids == first, -2 * slack, 0.0)):
            scores = self.score(rows + moves)
            if (scores[token] >= scores.max()).item():
                return True
        return False


def _apart(gap: float) -> str:
    if gap == 0:
        return "they are equally likely"
    return f"they are {gap:.3g} apart in log-probability" if math.isfinite(gap) else "a filter leaves one of them out"


def _number(value: mx.array) -> float:
    return float(value.astype(mx.float32).item())  # type: ignore[arg-type]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
