"""Acceptance: how many draft tokens survive, and which token of the target follows them.

Three deciders, one interface. All are exact: what is emitted is distributed as the target's own decoding, given
the verifier's logits.

- `Matching` (greedy, and rule B): the target chooses its own token at every row; drafts are kept while they agree.
- `Rejection` (rule A): a draft sampled from q is kept with probability min(1, p/q); the first failure draws from
  max(0, p - q). Needs the distribution the draft was really sampled from.
- `Stepwise`: any mlx_lm sampler and logits processors, applied left to right to exactly the positions and
  histories that plain decoding would show them; one host read per row.

Sources: Leviathan et al. 2023, algorithm 1; Chen et al. 2023. p is the target's distribution, q the draft's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import mlx.core as mx

from dflash_mlx.kernels import accept
from dflash_mlx.kernels.choice import STOCK, Kernels
from dflash_mlx.proposal import Proposal, Verdict
from dflash_mlx.sampling import Draws, LogitsProcessor, Sampler, SamplingPolicy, log_probs


@dataclass(frozen=True)
class Judgement:
    """A decision that is still on the device.

    packed: [n] int32, all that has to be read.
    count:  [1] int32, how many tokens it makes: those of the verdict, unless that is uncertain or cut.
    anchor: [1] int32, the last of them.
    unpack: the verdict from what was read.
    """

    packed: mx.array
    count: mx.array
    anchor: mx.array
    unpack: Callable[[list[int]], Verdict]

    @classmethod
    def of_one(cls, token: mx.array, log_probs: mx.array) -> Judgement:
        """Without drafts: [1] int32, the target's next token, and [1, V]."""
        return cls(token, mx.array([1], mx.int32), token, lambda read: Verdict(0, tuple(read), log_probs))


class Decider(Protocol):
    """Decides a block, and the one-row case that ends prefill."""

    host_reads: int

    def judge(self, proposal: Proposal, logits: mx.array, position: int) -> Judgement | None:
        """Decide without reading anything; None if this decider needs the host for it.

        Args:
            proposal: K draft tokens after the anchor.
            logits: [K+1, V], any float dtype; row i predicts the token after slot i, slot 0 is the anchor.
            position: absolute position of the token that row 0 predicts.
        """
        ...

    def decide(
        self, proposal: Proposal, logits: mx.array, position: int, judgement: Judgement | None = None
    ) -> Verdict:
        """Decide and read; arguments as for `judge`, whose result may be handed in."""
        ...

    def observe(self, tokens: Sequence[int]) -> None:
        """Tokens that became final, in order (the prompt first)."""
        ...


@dataclass
class _Reader:
    """Counts what is read from the device."""

    host_reads: int = field(default=0, kw_only=True)

    def read(self, values: mx.array) -> list[int]:
        """[n] integers on the host: one synchronisation."""
        self.host_reads += 1
        return values.tolist()  # type: ignore[return-value]


_NEVER = mx.array([], mx.int32)  # stop tokens and budget are the host's business here
_UNLIMITED = mx.array([2**30], mx.int32)


@dataclass
class Matching(_Reader):
    """Greedy decoding, or sample-and-match (rule B) at a temperature. One host read per block.

    kernels: what counts the agreeing drafts.
    """

    policy: SamplingPolicy
    draws: Draws
    kernels: Kernels = field(default=STOCK, kw_only=True)

    def judge(self, proposal: Proposal, logits: mx.array, position: int) -> Judgement:
        _check_rows(proposal, logits)
        rows = log_probs(logits)  # [K+1, V]
        want = _choose(self.policy, self.draws, rows, position)  # [K+1]
        if not len(proposal):
            return Judgement.of_one(want, rows)
        if self.kernels.wired:
            block = mx.concatenate([want[:1], proposal.tokens])[None]  # whatever the anchor is
            call = (block, want[None], _NEVER, _UNLIMITED, 0, 1)
            kept, commit, following, _ = self.kernels.run(accept.OPERATION, *call)
            made, anchor = commit[0], following[0]
        else:
            agree = (proposal.tokens == want[:-1]).astype(mx.int32)
            kept = mx.cumprod(agree).sum(keepdims=True).astype(mx.int32)
            made, anchor = want, mx.take(want, kept)

        def unpack(read: list[int]) -> Verdict:
            count, *tokens = read
            return Verdict(count, tuple(tokens[: count + 1]), rows)

        return Judgement(mx.concatenate([kept, made]), kept + 1, anchor, unpack)

    def decide(
        self, proposal: Proposal, logits: mx.array, position: int, judgement: Judgement | None = None
    ) -> Verdict:
        judged = judgement or self.judge(proposal, logits, position)
        return judged.unpack(self.read(judged.packed))

    def observe(self, tokens: Sequence[int]) -> None:
        pass


@dataclass
class Rejection(Matching):
    """Rejection sampling (rule A) where the proposal carries q, else rule B. One host read per block."""

    def judge(self, proposal: Proposal, logits: mx.array, position: int) -> Judgement:
        if proposal.probs is None or not len(proposal):
            return super().judge(proposal, logits, position)
        _check_rows(proposal, logits)
        drafts, q = proposal.tokens.astype(mx.int32), proposal.probs  # [K], [K, V]
        rows = log_probs(logits)
        p = self.policy.probs(rows)  # [K+1, V]
        p_draft = mx.take_along_axis(p[:-1], drafts[:, None], axis=-1)[:, 0]
        q_draft = mx.take_along_axis(q, drafts[:, None], axis=-1)[:, 0]
        u = self.draws.uniform("accept", position, len(proposal))
        # A draft that returned NaN has a NaN q: the comparison is false, so it is always rejected.
        kept = mx.cumprod((u * q_draft < p_draft).astype(mx.int32)).sum(keepdims=True).astype(mx.int32)  # [1]
        p_next = mx.take(p, kept, axis=0)  # [1, V]
        q_next = mx.take(mx.concatenate([q, mx.zeros_like(q[:1])]), kept, axis=0)
        rest = mx.maximum(p_next - q_next, 0)
        # Nothing is left if p == q up to rounding, or if q is NaN (the comparison is false then, too): draw from p.
        rest = mx.where(rest.sum(axis=-1, keepdims=True) > 0, rest, p_next)
        bonus = self.draws.categorical(mx.log(rest), "target", position)

        def unpack(read: list[int]) -> Verdict:
            count, *tokens = read
            return Verdict(count, (*tokens[:count], tokens[-1]), rows)

        return Judgement(mx.concatenate([kept, drafts, bonus]), kept + 1, bonus, unpack)


@dataclass
class Stepwise(_Reader):
    """An opaque sampler and logits processors, called as plain decoding calls them: position by position, in order.

    Stateful processors and samplers that draw from MLX's global state see the same calls as in mlx_lm's own loop:
    never for a position behind a rejected draft or a stop token. (Without drafts a step is submitted before the one
    before it is read, there as here, so a stop token may be followed by one call.) One host read per emitted token.
    """

    choose: Callable[[mx.array, int], mx.array]  # ([1, V] log-probabilities, absolute position) -> [1]
    processors: Sequence[LogitsProcessor] = ()
    stop: Collection[int] = ()
    _history: mx.array = field(default_factory=lambda: mx.array([], dtype=mx.int32))
    _chosen: int = 0  # tokens at the end of the history that were chosen and not read yet

    def judge(self, proposal: Proposal, logits: mx.array, position: int) -> Judgement | None:
        _check_rows(proposal, logits)
        if len(proposal):
            return None
        rows, token = self._next(logits, position)
        return Judgement.of_one(token, rows)

    def decide(
        self, proposal: Proposal, logits: mx.array, position: int, judgement: Judgement | None = None
    ) -> Verdict:
        judged = judgement or self.judge(proposal, logits, position)
        if judged is not None:
            return judged.unpack(self.read(judged.packed))
        drafts = self.read(proposal.tokens)
        tokens, rows, accepted = list[int](), list[mx.array](), 0
        for row in range(len(drafts) + 1):
            processed, token = self._next(logits[row : row + 1], position + row)
            rows.append(processed[0])
            tokens += self.read(token)
            if row == len(drafts) or tokens[-1] != drafts[row]:
                break
            accepted += 1
            if tokens[-1] in self.stop:
                break
        return Verdict(accepted, tuple(tokens), rows)

    def _next(self, logits: mx.array, position: int) -> tuple[mx.array, mx.array]:
        """[1, V] -> log-probabilities [1, V] and the chosen token [1], which joins the history."""
        for processor in self.processors:
            logits = processor(self._history, logits)
        rows = log_probs(logits)
        token = self.choose(rows, position).astype(mx.int32)
        if self.processors:
            self._history = mx.concatenate([self._history, token])
            self._chosen += 1
        return rows, token

    def observe(self, tokens: Sequence[int]) -> None:
        known, self._chosen = self._chosen, max(self._chosen - len(tokens), 0)
        if self.processors and len(tokens) > known:
            self._history = mx.concatenate([self._history, mx.array(list(tokens[known:]), mx.int32)])


def _check_rows(proposal: Proposal, logits: mx.array) -> None:
    if logits.ndim != 2 or logits.shape[0] != len(proposal) + 1:
        raise ValueError(
            f"`logits` has to be [{len(proposal) + 1}, V] for {len(proposal)} draft tokens, got {logits.shape}."
        )


def make_decider(
    policy: SamplingPolicy | Sampler,
    processors: Sequence[LogitsProcessor],
    draws: Draws,
    *,
    rule: str = "rejection",
    stop: Collection[int] = (),
    kernels: Kernels = STOCK,
) -> Decider:
    """The decider for these arguments; `rule` is "rejection" or "match" and matters only at a temperature."""
    if not isinstance(policy, SamplingPolicy):
        sampler = policy
        return Stepwise(lambda rows, position: sampler(rows), tuple(processors), stop)
    if processors:
        return Stepwise(partial(_choose, policy, draws), tuple(processors), stop)
    if policy.greedy or rule == "match":
        return Matching(policy, draws, kernels=kernels)
    return Rejection(policy, draws, kernels=kernels)


def _choose(policy: SamplingPolicy, draws: Draws, logprobs: mx.array, position: int) -> mx.array:
    """[R, V] -> [R] int32: the policy's own token at every row; row i is drawn with the key of `position + i`."""
    if policy.greedy:
        return policy.select(logprobs).astype(mx.int32)
    return draws.categorical(policy.log_weights(logprobs), "target", position)
