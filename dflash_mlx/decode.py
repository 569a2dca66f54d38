"""The decode loop, on token ids. One loop for plain and speculative decoding: they differ in the proposer.

State between cycles: the anchor is the last committed token and is not in the target cache yet. A cycle is

    propose K drafts -> target forward over [anchor, drafts] -> decide -> commit the t tokens that are kept

Invariant: base + len(tokens) == cache.length + 1, and the draft's context covers cache.length positions. Between
anchor and verdict everything stays lazy; the decider's read is the only host synchronisation of a cycle. Cut at
the budget or a stop token first, commit second, yield third: nothing beyond the end is ever held or shown.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from dflash_mlx.accept import Decider, Judgement
from dflash_mlx.blocksize import BlockSchedule
from dflash_mlx.cache import TargetCache
from dflash_mlx.proposal import Proposal, Verdict
from dflash_mlx.proposers import Proposer
from dflash_mlx.stats import Stats, Timings
from dflash_mlx.targets import Forward, Target

UNLIMITED = 1 << 62  # max_tokens = -1
_CLEAR_EVERY = 256  # emitted tokens between two returns of MLX's buffer pool
_FLUSH_EVERY = 32  # cycles after which a context that no draft has read yet is computed
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Commit:
    """Tokens that became final together.

    cycle 0 is the token that prefill gave; then accepted drafts and one correction or bonus per cycle.
    """

    tokens: tuple[int, ...]
    accepted: int
    drafted: int
    source: str
    cycle: int
    log_probs: mx.array | Sequence[mx.array]  # [V] per token, lazy
    finish_reason: str | None = None  # "stop" or "length" on the last commit


@dataclass
class Session:
    """One request's state: what the loop needs and what a prompt cache keeps.

    tokens: host truth of positions base, base + 1, ...; shared with the caller's prompt cache if there is one.
    """

    target: Target
    cache: TargetCache
    proposer: Proposer
    decider: Decider
    schedule: BlockSchedule
    tokens: list[int] = field(default_factory=list)
    base: int = 0
    stats: Stats = field(default_factory=Stats)
    timings: Timings = field(default_factory=Timings)
    undelivered: int = 0  # tokens of the last commit that the caller has not passed on
    _last: Commit | None = None

    @property
    def position(self) -> int:
        """Absolute position of the next token."""
        return self.base + len(self.tokens)

    def forward(self, ids: mx.array) -> Forward:
        """Run [T] ids inside a new transaction, which the caller commits or aborts."""
        self.cache.begin(ids.size)
        return self.target.forward(ids[None], self.cache, self.proposer.taps)

    def keep(self, forward: Forward, count: int) -> None:
        """Commit the first `count` positions of a forward in cache and draft context."""
        self.cache.commit(count)
        self.proposer.observe(None if forward.features is None else forward.features[:, :count])

    def record(self, commit: Commit) -> None:
        self.tokens.extend(commit.tokens)
        self.undelivered = len(commit.tokens)
        self._last = commit

    def retract(self) -> None:
        """Take back what was committed but never delivered: the cache holds exactly what the caller got."""
        count, commit = self.undelivered, self._last
        if not count or commit is None or self.cache.closed is not None:
            return
        self.undelivered = 0
        del self.tokens[-count:]
        if commit.cycle == 0:
            return
        kept = len(commit.tokens) - count
        if kept:
            self.cache.shrink(kept)
        else:
            self.cache.trim_to(self.cache.length - count)
        self.proposer.forget(count)
        self.stats.retract(accepted=commit.accepted, kept=min(commit.accepted, kept), emitted=count)

    def settle(self) -> None:
        """Write the anchor too, so that an mlx_lm cache list holds every returned token, as after mlx_lm."""
        if self.position == self.cache.length + 1:
            self.keep(self.forward(mx.array(self.tokens[-1:])), 1)
        self.evaluate()

    def evaluate(self) -> None:
        """Leave nothing lazy behind: another thread may use the cache next."""
        if self.cache.closed is None:
            self.cache.evaluate()
        self.proposer.evaluate()


def decode(
    session: Session,
    prompt: Sequence[int],
    *,
    max_tokens: int,
    stop: Collection[int] = (),
    prefill_step_size: int = 2048,
    progress: Progress | None = None,
) -> Generator[Commit]:
    """Generate after `prompt`, one Commit per cycle, until a stop token or `max_tokens`.

    Args:
        session: a fresh or reused session; `prompt` continues what it holds.
        prompt: ids in 0..V-1, at least one.
        max_tokens: 1 or more.
        stop: ids that end generation; the stop token is the last one emitted.
        progress: called with (processed, total) prompt tokens; an exception it raises leaves whole chunks behind.
    """
    s = session
    try:
        logits = _prefill(s, prompt, prefill_step_size, progress)  # [1, V]
        nothing = Proposal(mx.array([], dtype=mx.int32), source="prefill")
        verdict = s.decider.decide(nothing, logits, s.position)
        prefill_reads = s.decider.host_reads
        read_at = s.timings.mark_prefilled()
        s.stats.emitted = 1
        commit = _commit(s, nothing, verdict, _finish(verdict, max_tokens, stop))
        ahead: _Step | None = None
        while True:
            remaining = max_tokens - s.stats.emitted
            # The next draft runs while the caller turns this commit into text; it is dropped if the caller stops.
            proposal = nothing if commit.finish_reason or ahead else _propose(s, remaining)
            mx.async_eval(proposal.tokens)
            yield commit
            if commit.finish_reason:
                return
            step = ahead or _verify(s, proposal, mx.array(s.tokens[-1:], mx.int32), s.position)
            ahead = _step_ahead(s, step, remaining)
            verdict = s.decider.decide(step.proposal, step.logits, s.position, step.judgement)
            verdict = verdict.truncate(remaining, stop)
            now = s.timings.clock()
            s.schedule.record(
                drafted=len(step.proposal), emitted=len(verdict.tokens), seconds=now - read_at, position=s.position
            )
            read_at = now
            finish = _finish(verdict, remaining, stop)
            if ahead is None:
                s.keep(step.forward, len(verdict.tokens))
            elif finish:
                s.cache.abort()
            s.stats.record(drafted=len(step.proposal), accepted=verdict.accepted, emitted=len(verdict.tokens))
            s.stats.host_syncs = s.decider.host_reads - prefill_reads
            if s.stats.emitted // _CLEAR_EVERY > (s.stats.emitted - len(verdict.tokens)) // _CLEAR_EVERY:
                mx.clear_cache()
            if s.stats.cycles % _FLUSH_EVERY == 0:
                s.proposer.flush()
            commit = _commit(s, step.proposal, verdict, finish)
    finally:  # an exception, an interrupt, or a caller who stopped: nothing half-written stays
        if s.cache.is_open:
            s.cache.abort()


@dataclass(frozen=True)
class _Step:
    """A verification that was submitted and not read yet."""

    proposal: Proposal
    forward: Forward
    logits: mx.array  # [K+1, V]
    judgement: Judgement | None


def _verify(s: Session, proposal: Proposal, anchor: mx.array, position: int) -> _Step:
    """One target forward over [anchor, drafts], in a transaction that stays open; `position`: of row 0's token."""
    ids = mx.concatenate([anchor, proposal.tokens]) if len(proposal) else anchor  # [K+1]
    forward = s.forward(ids)
    logits = s.target.logits(forward.hidden)[0]
    return _Step(proposal, forward, logits, s.decider.judge(proposal, logits, position))


def _step_ahead(s: Session, step: _Step, remaining: int) -> _Step | None:
    """Without drafts the next step needs no read: submit it before this one is read, as mlx_lm does.

    None if there is no next step, or if it needs the host. Otherwise this step is committed and the next one open.
    """
    token = step.judgement.token if step.judgement else None
    if token is None or remaining < 2 or s.schedule.limit() or not s.schedule.sure():
        return None
    s.keep(step.forward, 1)
    ahead = _verify(s, step.proposal, token, s.position + 1)
    mx.async_eval(ahead.logits if ahead.judgement is None else ahead.judgement.packed)
    return ahead


def _prefill(s: Session, prompt: Sequence[int], step: int, progress: Progress | None) -> mx.array:
    """Feed everything but the last token in chunks, then that one alone, as mlx_lm does. Returns [1, V]."""
    pending = s.tokens[s.cache.length - s.base :]  # the last answer's final token, if a cache is continued
    del s.tokens[s.cache.length - s.base :]
    todo = [*pending, *prompt]
    s.timings.prompt_tokens = len(todo)
    if progress:
        progress(0, len(todo))
    done = 0
    while done < len(todo) - 1:
        chunk = todo[done : min(done + step, len(todo) - 1)]
        s.keep(s.forward(mx.array(chunk)), len(chunk))
        s.evaluate()
        s.tokens.extend(chunk)
        done += len(chunk)
        if progress:
            progress(done, len(todo))
        mx.clear_cache()
    forward = s.forward(mx.array(todo[-1:]))
    s.keep(forward, 1)
    s.tokens.append(todo[-1])
    s.decider.observe(prompt)
    logits = s.target.logits(forward.hidden[:, -1:])[0]
    if progress:
        mx.eval(logits)
        progress(len(todo), len(todo))
    return logits


def _propose(s: Session, remaining: int) -> Proposal:
    limit = min(s.schedule.limit(), remaining - 1)
    return s.proposer.propose(s.tokens[-1], limit, s.position).within(s.target.spec.vocab_size)


def _commit(s: Session, proposal: Proposal, verdict: Verdict, finish: str | None) -> Commit:
    s.decider.observe(verdict.tokens)
    commit = Commit(
        tokens=verdict.tokens,
        accepted=verdict.accepted,
        drafted=len(proposal),
        source=proposal.source,
        cycle=s.stats.cycles,
        log_probs=verdict.log_probs,
        finish_reason=finish,
    )
    s.record(commit)
    return commit


def _finish(verdict: Verdict, remaining: int, stop: Collection[int]) -> str | None:
    if verdict.tokens[-1] in stop:
        return "stop"
    return "length" if len(verdict.tokens) >= remaining else None
