"""The only place that turns logits into tokens.

Baseline, prefill and verification use the same functions, so a token can differ between plain and speculative
decoding only where the logits do. Filters and their order are mlx_lm's (`mlx_lm.sample_utils.make_sampler`):
log-probabilities, then top-p, min-p, XTC, top-k, then temperature; the filters are mlx_lm's functions, but for XTC's.

Randomness: every draw has an explicit key made from (seed, purpose, absolute position), never the global state.
The draw at a position is therefore independent of block size, of earlier requests and of the thread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import mlx.core as mx
from mlx_lm import sample_utils

_FLOAT32_MAX = 3.4e38
Sampler = Callable[[mx.array], mx.array]
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]
Position = int | mx.array  # absolute; on the device [1] int32, and the draws are the same


def log_probs(logits: mx.array) -> mx.array:
    """[.., V] -> [.., V], in the dtype of the logits, rounded as mlx_lm's `generate_step` rounds."""
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


@dataclass(frozen=True)
class Xtc:
    """mlx_lm's XTC filter: at some positions the most likely tokens are excluded, so that another one gets its turn.

    probability:    of excluding at a position, (0, 1]; every position has its own coin.
    threshold:      tokens at least this likely are excluded but for the least likely of them, 0..0.5.
    special_tokens: ids 0 or more that are never excluded.

    Raises:
        ValueError: an argument is out of range; the message names it as `make_sampler` does.
    """

    probability: float
    threshold: float = 0.1
    special_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.probability <= 1:
            raise ValueError(f"`xtc_probability` has to be 0 (off) or in (0, 1], got {self.probability}.")
        if not 0 <= self.threshold <= 0.5:
            raise ValueError(f"`xtc_threshold` has to be in 0..0.5, got {self.threshold}.")
        if any(token < 0 for token in self.special_tokens):
            raise ValueError(f"`xtc_special_tokens` have to be ids, 0 or more, got {min(self.special_tokens)}.")

    def exclude(self, logprobs: mx.array) -> mx.array:
        """[.., V] -> [.., V]: what is left where the coin says so; excluded tokens become -inf.

        The arithmetic of mlx_lm's `apply_xtc`, which cannot be called for it: it tosses one coin for all rows, and
        from MLX's global random state.
        """
        probs = mx.softmax(logprobs, axis=-1)
        least = mx.where(probs > self.threshold, probs, mx.inf).min(axis=-1, keepdims=True)
        excluded = probs > least
        special = [token for token in self.special_tokens if token < logprobs.shape[-1]]
        if special:
            excluded[..., special] = False
        return mx.where(excluded, -mx.inf, logprobs)


@dataclass(frozen=True)
class SamplingPolicy:
    """How a token is chosen from log-probabilities; the arguments mean what they mean in mlx_lm.

    temperature: 0 is greedy (argmax), and then nothing else matters.
    top_p:       nucleus mass in (0, 1); 0 or >= 1 is off.
    min_p:       least probability relative to the top token, 0..1; 0 is off.
    top_k:       ranks kept; 0 or >= V is off.
    seed:        None draws one from MLX's global random state when a request starts.
    xtc:         None is off. It is honoured as the distribution that its coin and the draw have together.

    Raises:
        ValueError: an argument is out of range; the message names it.
    """

    temperature: float = 0.0
    top_p: float = 0.0
    min_p: float = 0.0
    min_tokens_to_keep: int = 1
    top_k: int = 0
    seed: int | None = None
    xtc: Xtc | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"`temperature` has to be 0 or more and finite, got {self.temperature}.")
        if not self.top_p >= 0:
            raise ValueError(f"`top_p` has to be 0 (off) or in (0, 1], got {self.top_p}.")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"`min_p` has to be in 0..1, got {self.min_p}.")
        if not isinstance(self.min_tokens_to_keep, int) or self.min_tokens_to_keep < 1:
            raise ValueError(f"`min_tokens_to_keep` has to be an integer, 1 or more, got {self.min_tokens_to_keep}.")
        if not isinstance(self.top_k, int) or self.top_k < 0:
            raise ValueError(f"`top_k` has to be an integer, 0 (off) or more, got {self.top_k}.")
        if self.seed is not None and not 0 <= self.seed < 2**64:
            raise ValueError(f"`seed` has to be in 0..2**64-1, got {self.seed}.")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def select(self, logprobs: mx.array) -> mx.array:
        """[.., V] -> [..]: the greedy token, ties to the lowest id."""
        return mx.argmax(logprobs, axis=-1)

    def log_weights(self, logprobs: mx.array) -> mx.array:
        """[.., V] -> [.., V] float32: unnormalised log-probabilities after filters and temperature."""
        kept = logprobs
        if 0 < self.top_p < 1:
            kept = sample_utils.apply_top_p(kept, self.top_p)
        if self.min_p > 0:
            kept = sample_utils.apply_min_p(kept, self.min_p, self.min_tokens_to_keep)
        if self.xtc is None:
            return self._tempered(kept)
        # The coin of a position depends on nothing, so coin and draw together are one draw from the mixture.
        coin = self.xtc.probability
        heads = mx.softmax(self._tempered(self.xtc.exclude(kept)), axis=-1, precise=True)
        tails = mx.softmax(self._tempered(kept), axis=-1, precise=True)
        return mx.log(coin * heads + (1 - coin) * tails)

    def _tempered(self, kept: mx.array) -> mx.array:
        """[.., V] -> [.., V] float32: the filters' end, top-k and temperature (mlx_lm's stays in the model's dtype).

        The top token is moved to 0 first: a tiny temperature would make its log-weight -inf, too.
        """
        if 0 < self.top_k < kept.shape[-1]:
            kept = sample_utils.apply_top_k(kept, self.top_k)
        kept = kept.astype(mx.float32)
        return (kept - kept.max(axis=-1, keepdims=True)) * min(1.0 / self.temperature, _FLOAT32_MAX)

    def probs(self, logprobs: mx.array) -> mx.array:
        """[.., V] -> [.., V] float32: the distribution this policy samples from."""
        return mx.softmax(self.log_weights(logprobs), axis=-1, precise=True)

    def __call__(self, logprobs: mx.array) -> mx.array:
        """Makes the policy an mlx_lm sampler, drawing from MLX's global random state."""
        if self.greedy:
            return self.select(logprobs)
        if self.seed is not None:
            raise ValueError(
                f"This policy carries seed {self.seed}, which only dflash_mlx's stream_generate honours. "
                "With mlx_lm's own functions leave `seed` out and call mx.random.seed."
            )
        return mx.random.categorical(self.log_weights(logprobs))


@lru_cache(maxsize=64)
def _base_key(seed: int, purpose: str) -> tuple[int, int]:
    digest = hashlib.blake2b(f"{seed}:{purpose}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


@dataclass(frozen=True)
class Draws:
    """Keyed randomness of one request: (purpose, absolute position) -> an independent draw.

    A key is a 64-bit hash of seed and purpose whose first word is advanced by the position; distinct keys of
    MLX's counter-based generator give independent numbers.
    """

    seed: int

    @classmethod
    def for_policy(cls, policy: SamplingPolicy) -> Draws:
        """The policy's seed, or one drawn from MLX's global state (one host read, at the start of a request)."""
        if policy.seed is not None or policy.greedy:
            return cls(policy.seed or 0)
        return cls(int(mx.random.randint(0, 2**31 - 1).item()))  # type: ignore[arg-type]

    def key(self, purpose: str, position: Position) -> mx.array:
        low, high = _base_key(self.seed, purpose)
        if isinstance(position, mx.array):  # uint32 wraps as below
            low_word = position.astype(mx.uint32) + mx.array(low, mx.uint32)
            return mx.concatenate([low_word, mx.array([high], mx.uint32)])
        return mx.array([(low + position) % 2**32, high], dtype=mx.uint32)

    def uniform(self, purpose: str, position: Position, count: int) -> mx.array:
        """[count] float32 in [0, 1)."""
        return mx.random.uniform(shape=(count,), key=self.key(purpose, position))

    def categorical(self, log_weights: mx.array, purpose: str, position: Position) -> mx.array:
        """[R, V] -> [R] int32; row i is drawn with the key of `position + i`."""
        rows, width = log_weights.shape
        noise = mx.stack([mx.random.gumbel(shape=(width,), key=self.key(purpose, position + i)) for i in range(rows)])
        return mx.argmax(log_weights + noise, axis=-1).astype(mx.int32)


def make_sampler(
    temp: float = 0.0,
    top_p: float = 0.0,
    min_p: float = 0.0,
    min_tokens_to_keep: int = 1,
    top_k: int = 0,
    xtc_probability: float = 0.0,
    xtc_threshold: float = 0.1,
    xtc_special_tokens: Sequence[int] | None = None,
    *,
    seed: int | None = None,
) -> SamplingPolicy | Sampler:
    """mlx_lm's `make_sampler` with a `seed`.

    Returns a `SamplingPolicy`, whose distribution the verifier knows (one host read per cycle, with either rule).
    XTC without a seed is mlx_lm's own sampler, which is applied position by position, so that MLX's global seed gives
    the text that it gives in mlx_lm.

    Raises:
        ValueError: an argument is out of range; the message names it.
    """
    xtc = Xtc(xtc_probability, xtc_threshold, tuple(xtc_special_tokens or ())) if xtc_probability else None
    policy = SamplingPolicy(temp, top_p, min_p, min_tokens_to_keep, top_k, seed, xtc)
    if xtc is None or policy.greedy or seed is not None:
        return policy
    return sample_utils.make_sampler(
        temp,
        top_p,
        min_p,
        min_tokens_to_keep,
        top_k,
        xtc.probability,
        xtc.threshold,
        list(xtc.special_tokens),
    )


def as_policy(sampler: Sampler | SamplingPolicy | None) -> SamplingPolicy | Sampler:
    """None and mlx_lm's greedy sampler become the greedy policy; any other callable stays opaque."""
    if sampler is None or sampler is sample_utils.greedy_sampler:
        return SamplingPolicy()
    return sampler
