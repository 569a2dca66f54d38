"""Models without an adapter of their own: examined once, then served by the generic adapter or refused by name.

Examined are the structure (parts, cache entries, limits of attention in the config) and the numbers: the adapter's
logits have to be those of model(...) bit for bit, in the model's own dtype, on a short prefill, a block and a single
row. That is evidence over a few tokens, not a proof, so `TargetSpec.note` says it to the user.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, make_prompt_cache

from dflash_mlx.cache import TargetCache
from dflash_mlx.errors import UnsupportedTarget
from dflash_mlx.targets import Target, adapter_of, family, supported, text_part
from dflash_mlx.targets.dense import DenseTarget, Names

Make = Callable[[nn.Module], Target]

_WIDTHS = (9, 5, 1)  # rows of the probe's forwards: prefill, block, single row
_LIMITS = ("window", "chunk", "sliding")  # in the names of config fields that bound what a position sees


class GenericTarget(DenseTarget):
    """A model that was found to be a plain stack of layers under one causal mask."""

    def __init__(self, model: nn.Module, names: Names) -> None:
        self.names = names
        super().__init__(model)


@dataclass(frozen=True)
class _Verdict:
    """make: builds the adapter, None where the model is refused; text: the note, or which check failed."""

    make: Make | None
    text: str


_verdicts: dict[int, _Verdict] = {}  # by id, since a module is an unhashable dict; dropped with the model


def probed(model: nn.Module) -> tuple[Make, str]:
    """What builds the adapter of a model whose file has none, and the note about it.

    Raises:
        UnsupportedTarget: it cannot be served; says which check failed and what to do.
    """
    verdict = _verdicts.get(id(model))
    if verdict is None:
        verdict = _verdicts[id(model)] = _examine(model)
        weakref.finalize(model, _verdicts.pop, id(model), None)
    if verdict.make is None:
        raise UnsupportedTarget(
            f"{type(model).__module__}.{type(model).__name__} has no adapter in dflash_mlx (these mlx_lm model files "
            f"have: {', '.join(supported())}), and the generic one does not serve it: {verdict.text}. Tokens could "
            "differ from the model's own. Generate with mlx_lm, or add a file to dflash_mlx/targets."
        )
    return verdict.make, verdict.text


class _Unfit(Exception):
    """A check failed; the text says which."""


def _examine(model: nn.Module) -> _Verdict:
    try:
        make, whose = _candidate(model)
        _check_numbers(model, make)
    except (_Unfit, UnsupportedTarget) as error:
        return _Verdict(None, str(error).rstrip("."))
    tokens = sum(_WIDTHS)
    return _Verdict(
        make, f"{family(model)} has no adapter of its own; {whose} gave the model's own logits on {tokens} probe tokens"
    )


def _candidate(model: nn.Module) -> tuple[Make, str]:
    """What may serve the model, and in words: its text part's adapter or the generic one."""
    text = text_part(model)
    adapter = adapter_of(text)
    if adapter is not None:
        return adapter, f"that of its text part ({family(text)})"
    names = _names(text)
    inner = text[names.inner]
    _check_entries(make_prompt_cache(model), len(inner[names.layers]))
    _check_limits(text, inner)
    return partial(GenericTarget, names=names), "the generic one"


def _names(text: nn.Module) -> Names:
    """What the parts are called here."""
    inner = _first(text, "stack of layers", "model", "transformer", "backbone")
    stack = text[inner]
    return Names(
        inner=inner,
        embedding=_first(stack, "token embedding", "embed_tokens", "wte", "tok_embeddings", "word_embeddings"),
        layers=_first(stack, "list of layers", "layers", "h"),
        norm=_first(stack, "final norm", "norm", "ln_f", "final_layernorm"),
        head=next((name for name in ("lm_head", "output") if name in text), Names.head),
    )


def _first(module: nn.Module, what: str, *candidates: str) -> str:
    found = next((name for name in candidates if name in module), None)
    if found is None:
        raise _Unfit(f"it has no {what} under the name {' or '.join(candidates)}")
    return found


def _check_entries(entries: list, layers: int) -> None:
    """Plain KV caches, one per layer."""
    kinds = sorted({type(entry).__name__ for entry in entries})
    if {type(entry) for entry in entries} != {KVCache} or len(entries) != layers:
        raise _Unfit(f"its {layers} layers have {len(entries)} cache entries ({', '.join(kinds)}), not a KVCache each")


def _check_limits(text: nn.Module, inner: nn.Module) -> None:
    """No field bounds attention further on than the probe looks."""
    args = getattr(text, "args", None)
    if args is None:
        raise _Unfit("it has no `args` that would say how far its attention reaches")
    for name, value in [*vars(args).items(), *vars(inner).items()]:
        if value and any(word in name for word in _LIMITS):
            raise _Unfit(f"`{name}` is {value!r}, which may hide positions that the short probe does not reach")
        if name == "layer_types" and set(value or ()) - {"full_attention"}:
            raise _Unfit(f"`layer_types` has {', '.join(sorted(set(value)))}, and the generic one knows full_attention")


def _check_numbers(model: nn.Module, make: Make) -> None:
    """The same bits as model(...) from fresh caches, in the widths of prefill, verification and plain decoding."""
    with _fails_as("its parts are not what their names say"):
        target = make(model)
    cache, theirs, done = TargetCache(target.make_entries(), 0), make_prompt_cache(model), 0
    for width in _WIDTHS:
        ids = mx.array([[(i * 7919 + 1) % target.spec.vocab_size for i in range(done, done + width)]])
        done += width
        expected = model(ids, cache=theirs)
        mx.eval(expected)  # what fails until here is the model's own error
        with _fails_as("its layers cannot be called one by one"):
            cache.begin(width)
            ours = target.logits(target.forward(ids, cache).hidden)
            cache.commit(width)
            mx.eval(ours)
        if ours.shape != expected.shape or ours.dtype != expected.dtype or not mx.array_equal(ours, expected):
            raise _Unfit(f"its own forward gives other logits over {width} rows, so it does more than its layers do")


@contextmanager
def _fails_as(what: str) -> Generator[None]:
    """A model that was not made for this may fail in any way."""
    try:
        yield
    except UnsupportedTarget:
        raise
    except Exception as error:
        raise _Unfit(f"{what} ({type(error).__name__}: {error})") from error
