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
    cycle: int
    log_probs: tuple[mx.array, ...]  # [V] per token
    finish_reason: str | None = None  # "stop" or "length" on the last commit


@dataclass
class Session:
    """One request's state: what the loop needs and what a prompt cache keeps.

    tokens:  host truth of positions base, base + 1, ...; shared with the caller's prompt cache if there is one.
    borders: positions at which prefill ends a chunk and calls `at_border`; the end of prefill is one too.
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
    last: Commit | None = None  # whose tokens are being delivered; None while a cycle runs
    borders: Collection[int] = ()
    at_border: Callable[[], None] | None = None
    _delivered: int = 0  # of `tokens`, those that the caller was given, and the prompt
    _observed: list[mx.array] = field(default_factory=list)  # features of the last `keep`

    def __post_init__(self) -> None:
        self._delivered = len(self.tokens)

    @property
    def position(self) -> int:
        """Absolute position of the next token."""
        return self.base + len(self.tokens)

    def forward(self, ids: mx.array) -> Forward:
        """Run [T] ids inside a new transaction, which the caller commits or aborts."""
        self.cache.begin(ids.size)
        return self.target.forward(ids[None], self.cache, self.proposer.taps)

    def keep(self, forward: Forward, count: int, tokens: Sequence[int] = (), *, undelivered: int = 0) -> None:
        """Commit the first `count` positions of a forward, and the tokens that are known with them.

        In this order, so that an exception at any point leaves something that `retract` can put right.
        """
        self.cache.commit(count)
        self.know(tokens, undelivered)
        features = None if forward.features is None else forward.features[:, :count]
        self.proposer.observe(features)
        self._observed = [] if features is None else [features]

    def know(self, tokens: Sequence[int], undelivered: int) -> None:
        """`tokens` follow; the last `undelivered` of them have not been passed on."""
        self._delivered = len(self.tokens) + len(tokens) - undelivered
        self.tokens.extend(tokens)

    @property
    def undelivered(self) -> int:
        """Tokens at the end that the caller was not given."""
        return max(len(self.tokens) - self._delivered, 0)

    @undelivered.setter
    def undelivered(self, count: int) -> None:
        self._delivered = len(self.tokens) - count

    def pending(self, ahead: Forward | None) -> list[mx.array]:
        """What is left to compute of the last commit, and of a forward that is one step ahead."""
        features = [] if ahead is None or ahead.features is None else [ahead.features]
        pending, self._observed = [*self.cache.pending, *self._observed, *features], []
        return pending

    def retract(self) -> None:
        """Take back what was never delivered: cache and tokens hold exactly what the caller got.

        Of a block that was not delivered at all the anchor's row may stay, since that token was.
        """
        if self.cache.closed is not None:
            return
        count, commit = self.undelivered, self.last
        if count:
            del self.tokens[-count:]
        drop = self.cache.length - (self.position - 1 if count else self.position)
        if drop > 0 and self.cache.kept > 1:
            self.cache.shrink(max(self.cache.kept - drop, 1))
        self.proposer.trim_to(self.cache.length)
        if count and commit is not None and commit.cycle:
            self.stats.retract(
                drafted=commit.drafted,
                accepted=commit.accepted,
                emitted=len(commit.tokens),
                delivered=len(commit.tokens) - count,
            )

    def settle(self) -> None:
        """Write the anchor too, so that an mlx_lm cache list holds every returned token, as after mlx_lm."""
        if self.position == self.cache.length + 1:
            try:
                self.keep(self.forward(mx.array(self.tokens[-1:])), 1)
            finally:
                self.undo()
        self.finish()

    def finish(self) -> None:
        """Leave the cache as mlx_lm would: what is due is quantised, nothing is lazy."""
        if self.cache.closed is None:
            self.cache.quantize()
        self.evaluate()

    def undo(self) -> None:
        """Drop a forward that was not committed."""
        if self.cache.is_open:
            self.cache.abort()

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
        nothing = Proposal(mx.array([], dtype=mx.int32))
        verdict = s.decider.decide(nothing, logits, s.position)
        prefill_reads = s.decider.host_reads
        s.know(verdict.tokens, 1)
        read_at = s.timings.mark_prefilled()
        s.stats.emitted = 1
        commit = _commit(s, nothing, verdict, _finish(verdict, max_tokens, stop))
        ahead: _Step | None = None
        while True:
            remaining = max_tokens - s.stats.emitted
            # The next draft runs while the caller turns this commit into text; it is dropped if the caller stops.
            again = verdict.uncertain  # the next position was too close for a block to call
            proposal = nothing if commit.finish_reason or ahead or again else _propose(s, remaining)
            # So does what the commit left to do: the caller may go on in another thread, which can compute nothing of
            # this one's.
            mx.async_eval(proposal.tokens, *commit.log_probs, *s.pending(ahead.forward if ahead else None))
            yield commit
            if commit.finish_reason:
                return
            s.last = None
            step = ahead or _verify(s, proposal, mx.array(s.tokens[-1:], mx.int32), s.position)
            ahead = _step_ahead(s, step, remaining)
            verdict = s.decider.decide(step.proposal, step.logits, s.position, step.judgement)
            forward = step.forward
            if not verdict.tokens:  # not even the first row was clear
                s.undo()
                single = _verify(s, nothing, mx.array(s.tokens[-1:], mx.int32), s.position)
                verdict = s.decider.decide(nothing, single.logits, s.position, single.judgement)
                forward, again = single.forward, True
            s.stats.rechecked += again
            verdict = verdict.truncate(remaining, stop)
            now = s.timings.clock()
            s.schedule.record(
                drafted=len(step.proposal),
                accepted=None if again or verdict.uncertain else verdict.accepted,
                emitted=len(verdict.tokens),
                seconds=now - read_at,
                position=s.position,
            )
            read_at = now
            finish = _finish(verdict, remaining, stop)
            if ahead is None:
                s.keep(forward, len(verdict.tokens), verdict.tokens, undelivered=len(verdict.tokens))
            else:
                s.know(verdict.tokens, 1)
            s.stats.record(drafted=len(step.proposal), accepted=verdict.accepted, emitted=len(verdict.tokens))
            s.stats.host_syncs = s.decider.host_reads - prefill_reads
            _housekeeping(s, len(verdict.tokens))
            commit = _commit(s, step.proposal, verdict, finish)
    finally:  # an exception, an interrupt, or a caller who stopped: nothing half-written stays
        s.undo()


def _housekeeping(s: Session, emitted: int) -> None:
    """Return MLX's buffer pool, and compute a draft context that no draft has read, from time to time."""
    if s.stats.emitted // _CLEAR_EVERY > (s.stats.emitted - emitted) // _CLEAR_EVERY:
        mx.clear_cache()
    if s.stats.cycles % _FLUSH_EVERY == 0:
        s.proposer.flush()


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
    if token is None or remaining < 2 or s.schedule.limit():
        return None
    s.keep(step.forward, 1)
    ahead = _verify(s, step.proposal, token, s.position + 1)
    if ahead.judgement is not None:
        mx.async_eval(ahead.judgement.packed)
    return ahead


def _prefill(s: Session, prompt: Sequence[int], step: int, progress: Progress | None) -> mx.array:
    """Feed everything but the last token in chunks, then that one alone, as mlx_lm does. Returns [1, V].

    Where a snapshot is wanted on the way a chunk ends early.
    """
    history = [*s.tokens, *prompt]
    pending = s.tokens[s.cache.length - s.base :]  # the last answer's final token, if a cache is continued
    todo = [*pending, *prompt]
    s.timings.prompt_tokens = len(todo)
    if progress:
        progress(0, len(todo))
    done, start, last = 0, s.cache.length, len(todo) - 1
    borders = sorted({border - start for border in s.borders if 0 < border - start < last} | {last})
    while done < last:
        chunk = todo[done : min(done + step, next(border for border in borders if border > done))]
        s.keep(s.forward(mx.array(chunk)), len(chunk), chunk[max(len(pending) - done, 0) :])
        s.cache.evaluate()
        started = s.timings.clock()
        s.proposer.evaluate()
        s.timings.draft_prefill_s += s.timings.clock() - started
        done += len(chunk)
        if done in borders and s.at_border is not None:
            s.at_border()
        if progress:
            progress(done, len(todo))
        mx.clear_cache()
    forward = s.forward(mx.array(todo[-1:]))
    s.keep(forward, 1, todo[-1:])
    s.decider.observe(history)
    logits = s.target.logits(forward.hidden[:, -1:])[0]
    if progress:
        mx.eval(logits)
        progress(len(todo), len(todo))
    return logits


def _propose(s: Session, remaining: int) -> Proposal:
    room = s.cache.room
    limit = min(s.schedule.limit(), remaining - 1, UNLIMITED if room is None else room - 1)
    return s.proposer.propose(s.tokens[-1], limit, s.position).within(s.target.spec.vocab_size)


def _commit(s: Session, proposal: Proposal, verdict: Verdict, finish: str | None) -> Commit:
    s.decider.observe(verdict.tokens)
    s.last = Commit(
        tokens=verdict.tokens,
        accepted=verdict.accepted,
        drafted=len(proposal),
        cycle=s.stats.cycles,
        log_probs=tuple(verdict.log_probs[row] for row in range(len(verdict.tokens))),
        finish_reason=finish,
    )
    return s.last


def _finish(verdict: Verdict, remaining: int, stop: Collection[int]) -> str | None:
    if verdict.tokens[-1] in stop:
        return "stop"
    return "length" if len(verdict.tokens) >= remaining else None
