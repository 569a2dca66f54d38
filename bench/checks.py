"""Identities that true numbers keep. Most hold what an engine reports against what the harness saw, on its own clock.

Counts have to agree exactly. Clocks are read at two places, so they may differ by `SLACK_S` and `SLACK` of their size:
a prefill that is counted as decoding, or left out of both, differs by more.

Not for `exact`, whose cycles may end without a token of the target's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise

from .acceptance import Acceptance
from .form import BenchError
from .measured import Cycles, Measured, Reported
from .record import Compared

SLACK_S = 0.05  # largest of 24 requests on two busy cores: 0.0011
SLACK = 0.02
Broken = Iterator[str]


def check(measured: Measured) -> list[str]:
    """What is wrong with one request: the identity and both sides. Empty if nothing is."""
    return [broken for identity in _IDENTITIES for broken in identity(measured)]


def demand(measured: Measured) -> None:
    """Raises BenchError: an identity does not hold."""
    _raise(measured.prompt, measured.arm, check(measured))


def demand_same(compared: Compared, exact: bool) -> None:
    """exact: whether the arm promises the baseline's tokens.

    Raises:
        BenchError: it does, and gave others, which rounding cannot explain.
    """
    if exact and compared.divergence == "bug":
        _raise(compared.prompt, compared.arm, [f"its tokens are not the baseline's: {compared.explanation}"])


def _raise(prompt: str, arm: str, broken: Sequence[str]) -> None:
    if broken:
        raise BenchError(
            f"Prompt {prompt!r}, arm {arm!r}: {'; '.join(broken)}. Numbers of an engine whose own counts or clocks do "
            "not agree would mean nothing, so the run ends here. Please report it with the command."
        )


def _tokens(m: Measured) -> Broken:
    yield from _equal("tokens given = tokens counted", len(m.tokens) or m.generated, m.generated)
    yield from _equal("tokens given = tokens reported", m.generated, m.reported.generated)
    if m.generated < 1:
        yield f"tokens given >= 1: got {m.generated}"


def _cycles(m: Measured) -> Broken:
    """Every cycle gives its accepted drafts and one token of the target's; the end may cut the last one's."""
    columns = _columns(m.cycles)
    for index, (drafted, accepted, emitted) in enumerate(columns):
        if not 0 <= accepted <= drafted:
            yield f"0 <= accepted <= drafted in cycle {index + 1}: accepted {accepted}, drafted {drafted}"
        if m.block_size is not None and drafted > m.block_size - 1:
            yield f"drafted <= block - 1 in cycle {index + 1}: drafted {drafted}, block {m.block_size}"
        cut = index == len(columns) - 1 and emitted == accepted > 0
        if emitted != accepted + 1 and not cut:
            yield f"tokens = accepted + 1 in cycle {index + 1}: {emitted} = {accepted} + 1"


def _sum_of_tokens(m: Measured) -> Broken:
    """N = A + R and the token of prefill, by the engine's A and R, and by the histogram."""
    said, columns, first = m.reported, _columns(m.cycles), m.prefill_tokens
    if first is None or not _shows_cycles(m):
        return
    if first not in (0, 1):
        yield f"tokens outside of cycles are 0 or 1: {m.generated} tokens, {m.generated - first} in cycles"
    cut = int(bool(columns) and columns[-1][2] == columns[-1][1] > 0)
    if said.cycles is not None and said.accepted is not None:
        right = said.accepted + said.cycles + first - cut
        yield from _equal(
            f"tokens = accepted + cycles + first - cut ({said.accepted} + {said.cycles} + {first} - {cut})",
            m.generated,
            right,
        )
    if said.histogram is not None and said.plain_steps is not None:
        right = sum((k + 1) * n for k, n in said.histogram.items()) + said.plain_steps + first - cut
        yield from _equal("tokens = sum of (k + 1) * histogram + plain steps + first - cut", m.generated, right)


def _counters(m: Measured) -> Broken:
    seen, said = Acceptance.seen(m), m.reported
    if seen is None:
        return
    for name in ("cycles", "plain_steps", "drafted", "accepted"):
        yield from _equal(f"{name} seen = reported", getattr(seen, name), getattr(said, name))
    yield from _equal("histogram seen = reported", seen.histogram, said.histogram)
    yield from _equal("cycles of the histogram = cycles that drafted", sum(seen.histogram.values()), _drafting(said))
    yield from _equal("sum of k * histogram = accepted", sum(k * n for k, n in seen.histogram.items()), said.accepted)
    yield from _equal("sum over positions = accepted", sum(p.accepted for p in seen.positions), said.accepted)
    yield from _equal("sum over positions = drafted", sum(p.drafted for p in seen.positions), said.drafted)


def _clocks(m: Measured) -> Broken:
    times = (0.0, m.first_s, *(m.cycles.at_s if m.cycles else ()), m.end_s)
    if any(after < before for before, after in pairwise(times)):
        yield f"time does not run backwards: first token {m.first_s:.6g} s, last {m.end_s:.6g} s, and bursts between"
    if not 0 <= m.draft_prefill_s <= m.first_s:
        yield f"0 <= the draft's prefill <= first token: {m.draft_prefill_s:.6g} s, {m.first_s:.6g} s"
    if m.decode_s > m.end_s + 1e-9:
        yield f"generation only <= with prefill: {m.decode_s:.6g} s, {m.end_s:.6g} s"
    for name, seen, said in (
        ("first token after", m.ttft_s, m.reported.ttft_s),
        ("generation only took", m.decode_s, m.reported.decode_s),
        ("the request took", m.end_s, m.reported.total_s),
    ):
        yield from _close(f"{name}, seen = reported, in s", seen, said, slack=SLACK_S)


def _rates(m: Measured) -> Broken:
    """Rates again, from the cycles."""
    said, gaps = m.reported, m.cycle_s
    if gaps and said.cycles is not None and _shows_cycles(m):
        cycles = said.cycles - (m.prefill_tokens == 0)  # between the bursts, which are one more than their gaps
        whole = m.end_s - m.first_burst[1]
        yield from _close("cycle time * cycles = last token - first, in s", sum(gaps) / len(gaps) * cycles, whole)
        if cycles > 0 and m.decode_s > 0:
            per_cycle = m.decode_s / cycles
            rate = m.decode_tokens / cycles / per_cycle
            yield from _of_rate("tokens per cycle / cycle time = rate of generation", rate, said.decode_tps, m.decode_s)
    yield from _of_rate("tokens / time = rate with prefill", m.request_tps, said.request_tps, m.end_s)
    yield from _of_rate("mlx_lm's rate", m.mlx_lm_tps, said.generation_tps, m.end_s - m.first_s)
    if m.mlx_lm_tps is not None and m.request_tps is not None and m.request_tps > m.mlx_lm_tps * (1 + 1e-9):
        yield f"rate with prefill <= without, of as many tokens: {m.request_tps:.6g}, {m.mlx_lm_tps:.6g}"


_IDENTITIES: Iterable[Callable[[Measured], Broken]] = (_tokens, _cycles, _sum_of_tokens, _counters, _clocks, _rates)


def _shows_cycles(m: Measured) -> bool:
    """Not so of a server: its bursts are what the network made of cycles, and it may count before the end is cut."""
    return m.cycles is not None and m.cycles.drafted is not None


def _columns(cycles: Cycles | None) -> list[tuple[int, int, int]]:
    """(drafted, accepted, emitted) per cycle; none where the engine does not show them."""
    if cycles is None or cycles.drafted is None or cycles.accepted is None or cycles.emitted is None:
        return []
    return list(zip(cycles.drafted, cycles.accepted, cycles.emitted, strict=True))


def _drafting(said: Reported) -> int | None:
    return None if said.cycles is None or said.plain_steps is None else said.cycles - said.plain_steps


def _equal(identity: str, left: object, right: object) -> Broken:
    if left is not None and right is not None and left != right:
        yield f"{identity}: {left} and {right}"


def _close(identity: str, left: float | None, right: float | None, slack: float = 0.0) -> Broken:
    if left is not None and right is not None and abs(left - right) > slack + SLACK * max(abs(left), abs(right)):
        yield f"{identity}: {left:.6g} and {right:.6g}"


def _of_rate(identity: str, left: float | None, right: float | None, seconds: float) -> Broken:
    """Rates over so many seconds, of which `SLACK_S` may be missing."""
    if left is not None and right is not None:
        yield from _close(f"{identity}, per s", left, right, slack=max(left, right) * SLACK_S / max(seconds, SLACK_S))
