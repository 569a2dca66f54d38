"""The decode loop, on token ids. One loop for plain and speculative decoding: they differ in the proposer.

State between cycles: the anchor is the last committed token and is not in the target cache yet. A cycle is

    propose K drafts -> target forward over [anchor, drafts] -> decide -> commit the t tokens that are kept

Between anchor and verdict everything stays lazy; the decider's read is the only host synchronisation of a cycle. Cut at
the budget or a stop token first, commit second, yield third: nothing beyond the end is ever held or shown.

While the host waits for a verdict, and turns it into text, the device should have work. What it gets:

    without drafts    the next step, submitted before this one is read (`_step_ahead`)
    simple cycle      the next draft, submitted after the verdict is read (`_propose`)
    pipelined cycle   the next draft, submitted before: how many tokens survive, and which is the anchor, stay on the
                      device (`_draft_ahead`). Where the verdict turns out to want another draft it is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass

import mlx.core as mx

from dflash_mlx.accept import Judgement
from dflash_mlx.proposal import Proposal, Verdict
from dflash_mlx.session import Commit as Commit
from dflash_mlx.session import Session as Session
from dflash_mlx.targets import Forward

UNLIMITED = 1 << 62  # max_tokens = -1
_CLEAR_EVERY = 256  # emitted tokens between two returns of MLX's buffer pool
_FLUSH_EVERY = 32  # cycles after which a context that no draft has read yet is computed
Progress = Callable[[int, int], None]


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
        drafted: _DraftAhead | None = None
        while True:
            remaining = max_tokens - s.stats.emitted
            # The next draft runs while the caller turns this commit into text; it is dropped if the caller stops.
            again = verdict.uncertain  # the next position was too close for a block to call
            proposal = nothing if commit.finish_reason or ahead or again else _propose(s, remaining, drafted)
            # So does what the commit left to do: the caller may go on in another thread, which can compute nothing of
            # this one's.
            mx.async_eval(*proposal.arrays, *commit.log_probs, *s.pending(ahead.forward if ahead else None))
            yield commit
            if commit.finish_reason:
                return
            s.last = None
            step = ahead or _verify(s, proposal, mx.array(s.tokens[-1:], mx.int32), s.position)
            ahead = _step_ahead(s, step, remaining)
            drafted = None if ahead else _draft_ahead(s, step, remaining)
            verdict = s.decider.decide(step.proposal, step.logits, s.position, step.judgement)
            forward = step.forward
            if not verdict.tokens:  # not even the first row was clear
                verdict, forward = _single_row(s, nothing)
                again, drafted = True, None
            s.stats.rechecked += again
            verdict = verdict.truncate(remaining, stop)
            made = len(verdict.tokens)
            read_at = _record(s, step, None if again or verdict.uncertain else verdict.accepted, made, read_at)
            finish = _finish(verdict, remaining, stop)
            if ahead is None:
                s.keep(forward, made, verdict.tokens, undelivered=made, drafter=s.drafter if drafted else None)
            else:
                s.know(verdict.tokens, 1)
            s.stats.record(drafted=len(step.proposal), accepted=verdict.accepted, emitted=made)
            s.stats.host_syncs = s.decider.host_reads - prefill_reads
            _housekeeping(s, made)
            commit = _commit(s, step.proposal, verdict, finish)
    finally:  # an exception, an interrupt, or a caller who stopped: nothing half-written stays
        s.undo()


def _record(s: Session, step: _Step, accepted: int | None, made: int, since: float) -> float:
    """Tell the schedule of a cycle, which began when the one before it was read, at `since`; returns the time now."""
    now = s.timings.clock()
    s.schedule.record(
        drafted=len(step.proposal), accepted=accepted, emitted=made, seconds=now - since, position=s.position
    )
    return now


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


def _single_row(s: Session, nothing: Proposal) -> tuple[Verdict, Forward]:
    """In place of the open block: the next token from a forward over the anchor alone."""
    s.undo()
    step = _verify(s, nothing, mx.array(s.tokens[-1:], mx.int32), s.position)
    return s.decider.decide(nothing, step.logits, s.position, step.judgement), step.forward


def _step_ahead(s: Session, step: _Step, remaining: int) -> _Step | None:
    """Without drafts the next step needs no read: submit it before this one is read, as mlx_lm does.

    None if there is no next step, or if it needs the host. Otherwise this step is committed and the next one open.
    """
    judged = step.judgement
    if judged is None or len(step.proposal) or remaining < 2 or s.schedule.limit():
        return None
    s.keep(step.forward, 1)
    ahead = _verify(s, step.proposal, judged.anchor, s.position + 1)
    if ahead.judgement is not None:
        mx.async_eval(ahead.judgement.packed)
    return ahead


@dataclass(frozen=True)
class _DraftAhead:
    """A proposal of `limit` drafts asked for, submitted before the verdict that it follows was read."""

    proposal: Proposal
    limit: int


def _draft_ahead(s: Session, step: _Step, remaining: int) -> _DraftAhead | None:
    """The pipelined cycle: submit this verification and, on top of it, the next draft, before anything is read.

    None if that is not wanted, if proposer or decider cannot, or if no drafts follow.
    """
    drafter, judged = s.drafter, step.judgement
    limit = min(s.schedule.limit(), remaining - 2)  # at least one token comes before
    if drafter is None or judged is None or limit < 1:
        return None
    mx.async_eval(judged.packed)  # first and alone: to read one of several arrays is to wait for all of them
    proposal = drafter.propose_after(step.forward.features, judged.count, judged.anchor, limit, s.position)
    proposal = proposal.within(s.target.spec.vocab_size)
    mx.async_eval(*proposal.arrays)
    return _DraftAhead(proposal, limit)


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


def _propose(s: Session, remaining: int, drafted: _DraftAhead | None) -> Proposal:
    """The next proposal: the one that was drafted ahead, if it is as long as is wanted by now."""
    room = s.cache.room
    limit = min(s.schedule.limit(), remaining - 1, UNLIMITED if room is None else room - 1)
    if drafted is not None and drafted.limit == limit:
        return drafted.proposal
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
