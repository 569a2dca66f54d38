"""A session whose parts wait for the device at the end of each phase, and say so to a `Phases`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import mlx.core as mx

from dflash_mlx.accept import Decider, Judgement
from dflash_mlx.proposal import Proposal, Verdict
from dflash_mlx.proposers import DraftsAhead, Proposer
from dflash_mlx.session import Session
from dflash_mlx.targets import Forward

from .profile import Phases


def watched(session: Session, phases: Phases) -> WatchedSession:
    """The same session, which must not be used beside it. It drafts after the verdict: phases one after the other."""
    values = {each.name: getattr(session, each.name) for each in fields(session)}
    values |= {
        "proposer": _WatchedProposer(session.proposer, phases),
        "decider": _WatchedDecider(session.decider, phases),
        "pipelined": False,
    }
    return WatchedSession(**values, phases=phases)


@dataclass
class WatchedSession(Session):
    phases: Phases = field(kw_only=True)

    def forward(self, ids: mx.array) -> Forward:
        self.phases.mark("rest")
        return super().forward(ids)

    def keep(
        self,
        forward: Forward,
        count: int,
        tokens: Sequence[int] = (),
        *,
        undelivered: int = 0,
        drafter: DraftsAhead | None = None,
    ) -> None:
        self.phases.mark("rest")
        super().keep(forward, count, tokens, undelivered=undelivered, drafter=drafter)
        mx.eval([entry.state for entry in self.cache.entries], self.cache.pending)
        self.phases.mark("commit")
        self.proposer.evaluate()
        self.phases.mark("draft")


@dataclass
class _WatchedProposer:
    inner: Proposer
    phases: Phases

    @property
    def taps(self) -> tuple[int, ...]:
        return self.inner.taps

    def propose(self, anchor: int, limit: int, position: int) -> Proposal:
        self.phases.mark("rest")
        proposal = self.inner.propose(anchor, limit, position)
        mx.eval(*proposal.arrays)
        self.phases.mark("proposed")
        return proposal

    def observe(self, features: mx.array | None) -> None:
        self.phases.mark("commit")  # called in the middle of a commit
        self.inner.observe(features)
        self.phases.mark("draft")

    def trim_to(self, length: int) -> None:
        self.inner.trim_to(length)

    def flush(self) -> None:
        self.inner.flush()

    def evaluate(self) -> None:
        self.inner.evaluate()


@dataclass
class _WatchedDecider:
    inner: Decider
    phases: Phases

    @property
    def host_reads(self) -> int:
        return self.inner.host_reads

    def judge(self, proposal: Proposal, logits: mx.array, position: int) -> Judgement | None:
        return self.inner.judge(proposal, logits, position)

    def decide(
        self, proposal: Proposal, logits: mx.array, position: int, judgement: Judgement | None = None
    ) -> Verdict:
        verdict = self.inner.decide(proposal, logits, position, judgement)
        mx.eval(verdict.log_probs)
        self.phases.mark("verify")
        return verdict

    def observe(self, tokens: Sequence[int]) -> None:
        self.inner.observe(tokens)
