"""`dflash-metal plan`: is there a draft, is the target run here, does the pair fit, and can it pay; before a download.

Nothing but configs, model cards, lists and heads of files is fetched. What is not known is None. Everything about
memory and speed is calculated, not measured.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dflash_mlx.errors import FetchError
from dflash_mlx.fit import DraftNeed, block_bytes
from dflash_mlx.pairing.inspection import described, examine
from dflash_mlx.planned import Asked, Sized, sized
from dflash_mlx.regime import ASSUMPTIONS, Regime, regime

_WORTH = 0.05  # what quantising a draft has to save of a cycle to be worth trying
_ON_CPU = "on a CPU arithmetic, not memory, takes the time: `auto` measures there whether speculation pays"


def plan(asked: Asked) -> dict[str, Any]:
    """Everything, as plain values.

    Raises:
        ValueError: an argument is no name, a revision of what has none, a block that the draft cannot run, or a group
            of keys that does not divide the target's heads.
    """
    pair = examine(asked.target, asked.revision, asked.draft, asked.draft_revision)
    found = described(pair)
    numbers = sized(asked, pair)
    refused = found["refused"] or (found["target"]["runs_reason"] if found["target"]["runs"] is False else None)
    fit = numbers.fit if numbers else None
    unread = isinstance(pair.refused, FetchError) and numbers is None  # what it is cannot be told without its config
    verdict = "unknown" if unread else "unsupported" if refused else fit.verdict if fit else "unknown"
    paying = _paying(numbers)
    result = dict(
        verdict=verdict,
        line="",
        target=found["target"],
        draft=found["draft"],
        refused=refused,
        machine=_machine(asked),
        settings=_settings(asked, numbers),
        memory=_memory(numbers),
        needed_bytes=numbers.parts().total if numbers else None,
        largest_context=numbers.longest_context() if numbers else None,
        context_limit=numbers.sizes.positions if numbers else None,
        draft_bits=_draft_bits(numbers),
        regime=paying,
        benchmark=_benchmark(asked, paying),
        calculated=True,
    )
    return result | {"line": _line(result)}


def _machine(asked: Asked) -> dict[str, Any]:
    chip = asked.chip
    return dict(
        memory_bytes=asked.machine.memory,
        usable_bytes=asked.machine.usable,
        metal=asked.machine.metal,
        chip=chip.name if chip else None,
        bandwidth_gbs=chip.bandwidth if chip else None,
    )


def _settings(asked: Asked, numbers: Sized | None) -> dict[str, Any]:
    need = numbers.need if numbers else None
    block = None if need is None or numbers is None else numbers.settings.block or need.block
    return dict(context=asked.context, kv_bits=asked.kv_bits, draft_bits=asked.draft_bits, block_size=block)


def _memory(numbers: Sized | None) -> dict[str, int] | None:
    """Bytes by parts. The buffers of a block and the activations of a prompt come one after the other."""
    if numbers is None:
        return None
    parts, machine = numbers.parts(), numbers.asked.machine
    return dict(
        target=parts.target,
        draft=parts.draft,
        keys_values=parts.context,
        draft_keys_values=parts.draft_context,
        states=parts.states,
        prefix_cache=parts.snapshots,
        activations=parts.work,
        block_buffers=block_bytes(numbers.sizes, numbers.need, numbers.settings),
        system_reserve=machine.memory - machine.usable,
    )


def _paying(numbers: Sized | None) -> dict[str, Any] | None:
    """What the draft has to reach; with `reason` alone where that is not calculated. None without a draft."""
    if numbers is None or numbers.need is None:
        return None
    if not numbers.asked.machine.metal:
        return dict(reason=_ON_CPU)
    found = _regime(numbers, numbers.need, numbers.asked.draft_bits)
    return dict(
        reason=None,
        block_size=found.block,
        pays_above_low=found.low,
        pays_above_high=found.high,
        at_most=found.best,
        step_bytes=found.step_bytes,
        draft_bytes=found.draft_bytes,
        verify_bytes=found.verify_bytes,
        plain_ceiling_tps=found.plain_tps,
        assumptions=list(ASSUMPTIONS),
    )


def _regime(numbers: Sized, need: DraftNeed, bits: int | None) -> Regime:
    packed = bits is not None or need.config.quantization is not None
    return regime(
        numbers.sizes, numbers.weights, numbers.config, need, numbers.settings, numbers.asked.chip, draft_packed=packed
    )


@dataclass(frozen=True)
class _Choice:
    """Of `--draft-bits`: the draft's bytes, those of everything, and the low bound of c."""

    bits: int | None
    draft_bytes: int
    needed_bytes: int
    pays_above_low: float


def _draft_bits(numbers: Sized | None) -> dict[str, Any] | None:
    """Which `--draft-bits` to take: as stored, unless that does not fit or a cycle reads a good deal less otherwise."""
    if numbers is None or numbers.draft is None:
        return None
    if not numbers.asked.machine.metal:
        return dict(choose=None, reason="a CPU computes packed weights more slowly", choices=[])
    if numbers.draft.config.quantization is not None:
        return dict(choose=None, reason="it is packed already", choices=[])
    choices = [_choice(numbers, bits) for bits in (None, 8, 4)]
    chosen, reason = _chosen([each for each in choices if each.needed_bytes <= numbers.asked.machine.usable])
    return dict(choose=chosen, reason=reason, choices=[asdict(each) for each in choices])


def _choice(numbers: Sized, bits: int | None) -> _Choice:
    need = numbers.need_in(bits)
    assert need is not None
    return _Choice(bits, need.weights, numbers.parts(need=need).total, _regime(numbers, need, bits).low)


def _chosen(fitting: Sequence[_Choice]) -> tuple[int | None, str]:
    """The bits, None for as stored, and why."""
    if not fitting:
        return None, "it fits in no bits"
    best, least = fitting[0], fitting[-1]
    if best.bits is not None:
        return best.bits, "so that it fits"
    saved = 1 - least.pays_above_low / best.pays_above_low
    if saved > _WORTH:
        return least.bits, f"a cycle then reads {saved:.0%} less; it may accept less, which only a run shows"
    return None, "packing it would save next to nothing"


def _benchmark(asked: Asked, paying: Mapping[str, Any] | None) -> dict[str, Any]:
    """Which number a benchmark of this pair reports, and what bounds it."""
    draft = None if asked.draft == "auto" else asked.draft or "none"
    options: dict[str, object] = {"--model": asked.target, "--revision": asked.revision, "--draft": draft}
    options |= {"--draft-revision": asked.draft_revision, "--draft-bits": asked.draft_bits}
    options["--block-size"] = asked.block_size
    given = {name: str(value) for name, value in options.items() if value is not None}
    command = shlex.join(["dflash-metal", "bench", *(word for option in given.items() for word in option)])
    ceiling = paying.get("plain_ceiling_tps") if paying else None
    return dict(
        number="total time of mlx_lm.stream_generate divided by that of dflash, prefill included and generation only",
        command=command,
        plain_ceiling_tps=ceiling,
    )


def _line(result: Mapping[str, Any]) -> str:
    """The verdict in one sentence or two."""
    if result["verdict"] == "unsupported":
        return f"Cannot be loaded here: {result['refused']}"
    if result["needed_bytes"] is None:
        return f"Not known: {result['refused'] or 'its config and its files do not say enough to tell.'}"
    needed, usable = result["needed_bytes"] / 1e9, result["machine"]["usable_bytes"] / 1e9
    context, longest = result["settings"]["context"], result["largest_context"]
    numbers = f"about {needed:.2f} GB of the {usable:.2f} GB that a model may use, with {context:,} tokens of context"
    if result["verdict"] == "too large":
        cure = f"the longest context that fits is {longest:,}" if longest else "no context fits, it is the weights"
        return f"Does not fit: {numbers}; {cure}."
    word = "Fits" if result["verdict"] == "fits" else "Fits tightly"
    return f"{word}: {numbers}. {_speculation(result)}"


def _speculation(result: Mapping[str, Any]) -> str:
    paying, draft = result["regime"], result["draft"]["name"]
    if draft is None:
        return "No draft is known, so decoding is plain."
    if paying is None or paying["reason"]:
        return f"Draft {draft}; whether it pays is not calculated here."
    low, high = paying["pays_above_low"], paying["pays_above_high"]
    above = f"{low:.2f}" if round(low, 2) == round(high, 2) else f"{low:.2f} to {high:.2f}"
    return f"Draft {draft} pays above {above} tokens per cycle (calculated, not measured)."
