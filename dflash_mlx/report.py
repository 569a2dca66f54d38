"""One request as numbers: the JSON object of `generate --json` and the lines for a terminal.

Definitions: `dflash_mlx.stats`, and for `check` `dflash_mlx.divergence`. Unknown is null.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dflash_mlx.divergence import Divergence
    from dflash_mlx.generate import GenerationResponse
    from dflash_mlx.segments import Segment, Segments


@dataclass
class Answer:
    """What the responses of one request amount to, collected one by one."""

    segments: Segments
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    parts: list[Segment] = field(default_factory=list)

    def add(self, response: GenerationResponse) -> None:
        self.text += response.text
        self.tokens.append(response.token)
        self.parts += self.segments.feed(response.text)

    def finish(self, reason: str | None) -> None:
        self.finish_reason = reason
        self.parts += self.segments.finish()

    def of(self, kind: str) -> list[str]:
        """The texts of this kind."""
        return [part.text for part in self.parts if part.kind == kind]


def as_json(last: GenerationResponse, answer: Answer, check: Divergence | None = None) -> dict[str, Any]:
    """The JSON object of one request; last: its last response, check: its comparison with plain decoding, if made."""
    stats, timings = last.stats, last.timings
    return {
        "text": answer.text,
        "reasoning": "".join(answer.of("reasoning")) or None,
        "answer": "".join(answer.of("answer")),
        "tool_calls": answer.of("tool_call"),
        "unfinished": answer.segments.unfinished,
        "tokens": answer.tokens,
        "finish_reason": answer.finish_reason,
        "mode": last.mode,
        "notes": list(last.notes),
        "prompt_tokens": last.prompt_tokens,
        "cached_tokens": last.cached_tokens,
        "recomputed_tokens": last.recomputed_tokens,
        "generation_tokens": last.generation_tokens,
        "prefill_s": timings.prefill_s,
        "draft_prefill_s": timings.draft_prefill_s,
        "ttft_s": timings.ttft_s,
        "decode_s": timings.decode_s,
        "total_s": timings.total_s,
        "prompt_tps": timings.prompt_tps,
        "decode_tps": timings.decode_tps,
        "request_tps": timings.request_tps,
        "cycles": stats.cycles,
        "plain_steps": stats.plain_steps,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "mean_acceptance_length": stats.mean_acceptance_length,
        "draft_acceptance_rate": stats.draft_acceptance_rate,
        "acceptance_histogram": {str(k): stats.histogram[k] for k in sorted(stats.histogram)},
        "block_size": last.block_size,
        "blocks": {str(size): stats.blocks[size] for size in sorted(stats.blocks)},
        "pipelined": last.pipelined,
        "draft_vocabulary": last.draft_vocabulary,
        "host_syncs": stats.host_syncs,
        "rechecked": stats.rechecked,
        "peak_memory_gb": last.peak_memory,
        "check": None if check is None else asdict(check),
    }


def summary_lines(last: GenerationResponse) -> list[str]:
    """Statistics for people: both clocks by name, then what speculation did, then the notes."""
    stats, timings = last.stats, last.timings
    cached = f" ({last.cached_tokens} more from the cache)" if last.cached_tokens else ""
    lines = [
        f"prompt: {timings.prompt_tokens} tokens{cached}, {_rate(timings.prompt_tps)}, "
        f"first token after {_seconds(timings.ttft_s)}",
        f"answer: {last.generation_tokens} tokens, generation only {_rate(timings.decode_tps)}, "
        f"prefill-inclusive {_rate(timings.request_tps)}",
    ]
    drafting = stats.cycles - stats.plain_steps
    if last.mode == "dflash" or drafting:
        rate = stats.draft_acceptance_rate
        share = "no drafts" if rate is None else f"{rate:.0%} of {stats.drafted} drafts accepted"
        length, block = stats.mean_acceptance_length, f"{last.block_size}{', pipelined' if last.pipelined else ''}"
        lines.append(f"dflash: block {block}, {_number(length)} tokens per cycle over {drafting} cycles, {share}")
        if len(stats.blocks) > 1:
            sizes = ", ".join(f"{size} in {cycles}" for size, cycles in sorted(stats.blocks.items(), reverse=True))
            lines.append(f"tokens verified by cycles: {sizes}")
        if last.draft_vocabulary is not None:
            lines.append(f"the draft proposes {last.draft_vocabulary} of the target's tokens and leaves out the others")
        if stats.plain_steps > 1:
            lines.append(f"and {stats.plain_steps} plain steps, to rest from drafts that do not pay or to measure")
        if stats.rechecked:
            lines.append(f"{stats.rechecked} near-ties decided again by a forward over one token")
    if last.mode == "plain":
        lines.append("from there on plain decoding" if drafting else "plain decoding")
    lines.append(f"peak memory: {last.peak_memory:.2f} GB")
    return lines + [f"note: {note}" for note in last.notes]


def check_line(check: Divergence, seconds: float) -> str:
    """The comparison with plain decoding, which took so long, for people."""
    found = {
        "identical": "identical",
        "near-tie": f"near-tie at token {check.index}. {check.explanation}",
        "bug": f"DIFFERS at token {check.index}. {check.explanation} This is a bug: please report it with the command",
    }
    return f"checked against plain decoding: {found[check.kind]} ({seconds:.1f} s for the check)"


def _rate(value: float | None) -> str:
    return "- tok/s" if value is None else f"{value:.1f} tok/s"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
