"""What servers say of their drafts, in this package's counts: R cycles, P drafted, A accepted tokens, N of the answer.

    engine       where it says it                      what is taken
    vLLM         metrics.speculative_decoding          its steps, drafts, accepted drafts and histogram; needs
                                                       --per-request-spec-decode-metrics summary
    SGLang       sglext.spec_tokens_details, or        spec_verify_ct, drafts proposed and right. Its spec_accept_length
                 meta_info                             is N/R with the first token, which belongs to no cycle
    mlx-vlm      timings with draft_rounds             rounds, drafts; A = N - 1 - R, since its draft_n_accepted counts
                                                       before an answer is cut at its end
    llama.cpp    timings with draft_n                  drafts and accepted; R = N - 1 - A, steps without drafts included
    vLLM         /metrics before and after             spec_decode counters of the whole server: nobody else may use it

The first one that speaks is believed; `Said.definition` says which, and goes into the record with every request.
Sources: vLLM's page on per-request acceptance metrics, SGLang's SpecTokensDetails, mlx-vlm's and llama.cpp's READMEs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .measured import Reported

Counters = Mapping[tuple[str, str], float]


@dataclass(frozen=True)
class Said:
    """Counts of one request; definition: where they come from and what was converted. drafted: None where unknown."""

    definition: str
    cycles: int
    accepted: int
    drafted: int | None = None
    histogram: dict[int, int] = field(default_factory=dict)
    block_size: int | None = None
    plain_steps: int = 0

    def reported(self, generated: int | None) -> Reported:
        return Reported(
            generated=generated,
            cycles=self.cycles,
            plain_steps=self.plain_steps,
            drafted=self.drafted,
            accepted=self.accepted,
            histogram=self.histogram or None,
        )

    def doubts(self, generated: int) -> Iterable[str]:
        """What does not add up: an engine that counts before the end of an answer is cut."""
        if self.cycles + self.accepted + 1 != generated:
            yield (
                f"accepted + cycles + 1 is {self.cycles + self.accepted + 1} and the answer has {generated} tokens: "
                "the server counts before the end is cut, or takes steps without drafts"
            )


def of_response(parts: Sequence[Mapping[str, Any]], generated: int, alone: bool = True) -> Said | None:
    """Of the objects of a streamed answer with so many tokens; None where the server says nothing of drafts.

    alone: no other request was made at the same time; mlx-vlm's rounds are of all of them.
    """
    for place, read in _READERS:
        for part in reversed(parts):
            found = _at(part, place)
            if not isinstance(found, dict) or ("draft_rounds" in found and not alone):
                continue
            if (said := read(found, generated)) is not None:
                return said
    return None


def _at(part: Mapping[str, Any], place: str) -> Any:
    found: Any = part
    for key in place.split("."):
        if isinstance(found, list):
            found = found[0] if found else None
        found = found.get(key) if isinstance(found, dict) else None
    return found


def _vllm(found: dict[str, Any], generated: int) -> Said | None:
    cycles, drafted, accepted = _ints(found, "num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
    if cycles is None or accepted is None:
        return None
    most = _int(found.get("num_spec_tokens"))
    return Said(
        "vLLM's metrics.speculative_decoding: its steps, drafts and accepted drafts",
        cycles,
        accepted,
        drafted,
        _histogram(found.get("acceptance_histogram")),
        None if most is None else most + 1,
    )


def _sglang(found: dict[str, Any], generated: int) -> Said | None:
    cycles = _int(found.get("spec_verify_ct"))
    if not cycles:
        return None
    accepted = _first(found, "spec_num_correct_drafts", "spec_accept_token_num")
    drafted = _first(found, "spec_num_proposed_drafts", "spec_draft_token_num")
    how = "SGLang's verifications and drafts that were right"
    if accepted is None:
        accepted, how = max(generated - 1 - cycles, 0), "SGLang's verifications; accepted = tokens - 1 - verifications"
    even = drafted is not None and drafted % cycles == 0
    return Said(
        f"{how} (its spec_accept_length counts the first token, this does not)",
        cycles,
        accepted,
        drafted,
        _histogram(found.get("spec_correct_drafts_histogram")),
        drafted // cycles + 1 if drafted and even else None,
    )


def _timings(found: dict[str, Any], generated: int) -> Said | None:
    """llama.cpp's, which mlx-vlm and others follow and add `draft_rounds` to."""
    drafted, accepted, cycles = _ints(found, "draft_n", "draft_n_accepted", "draft_rounds")
    generated = _int(found.get("predicted_n")) or generated
    if not drafted or accepted is None:
        return None
    if cycles is None:
        how = "llama.cpp's draft_n and draft_n_accepted; cycles = tokens - 1 - accepted, steps without drafts included"
        return Said(how, max(generated - 1 - accepted, 1), accepted, drafted)
    how = (
        f"draft_rounds and draft_n of timings; accepted = tokens - 1 - rounds (its draft_n_accepted, {accepted}, "
        "counts what is cut at the end too)"
    )
    block = drafted // cycles + 1 if cycles and drafted % cycles == 0 else None
    return Said(how, cycles, max(generated - 1 - cycles, 0), drafted, block_size=block) if cycles else None


_READERS: Sequence[tuple[str, Callable[[dict[str, Any], int], Said | None]]] = (
    ("metrics.speculative_decoding", _vllm),
    ("sglext.spec_tokens_details", _sglang),
    ("choices.meta_info", _sglang),
    ("meta_info", _sglang),
    ("timings", _timings),
)


def of_counters(before: Counters | None, after: Counters | None) -> Said | None:
    """From vLLM's Prometheus counters, of everything that the server did in between; None where nothing was drafted."""
    if not before or not after:
        return None
    cycles, drafted, accepted = (
        _grown(before, after, f"vllm:spec_decode_num_{name}") for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    if not cycles or accepted is None:
        return None
    block = drafted // cycles + 1 if drafted and drafted % cycles == 0 else None
    how = "vLLM's counters in /metrics, before and after: right if nobody else used the server"
    return Said(how, cycles, accepted, drafted, _by_position(before, after, cycles), block)


def _grown(before: Counters, after: Counters, name: str) -> int | None:
    """Of a counter with or without Prometheus' ending, over all its labels; None where it is not kept."""
    kept = [key for key in after if key[0] in (name, f"{name}_total")]
    return round(sum(after[key] - before.get(key, 0.0) for key in kept)) if kept else None


def _by_position(before: Counters, after: Counters, cycles: int) -> dict[int, int]:
    """The histogram from how often each position was accepted: those that reached i and not i + 1."""
    reached: dict[int, int] = {0: cycles}
    for (name, labels), value in after.items():
        place = re.search(r'position="(\d+)"', labels)
        if name.removesuffix("_total") == "vllm:spec_decode_num_accepted_tokens_per_pos" and place:
            index = int(place[1]) + 1
            reached[index] = reached.get(index, 0) + round(value - before.get((name, labels), 0.0))
    if len(reached) == 1:
        return {}
    return {k: n for k in sorted(reached) if (n := reached[k] - reached.get(k + 1, 0)) > 0}


def _histogram(value: Any) -> dict[int, int]:
    """Of a dense list: index = drafts accepted, value = cycles."""
    if not isinstance(value, list):
        return {}
    return {index: count for index, count in enumerate(value) if isinstance(count, int) and count > 0}


def _ints(found: Mapping[str, Any], *names: str) -> tuple[int | None, ...]:
    return tuple(_int(found.get(name)) for name in names)


def _first(found: Mapping[str, Any], *names: str) -> int | None:
    return next((value for value in _ints(found, *names) if value is not None), None)


def _int(value: Any) -> int | None:
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
