"""A loaded model with some of its modules replaced by ours, while the model itself stays as mlx_lm made it.

The view is a structural copy: the same arrays, and modules copied one by one, so that replacing one of them changes
nothing in the model. It is built again if the model was changed since (an adapter loaded, a layer quantised).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import mlx.nn as nn

from dflash_mlx.kernels.choice import Kernels
from dflash_mlx.kernels.modules import attention, gated_delta, linear
from dflash_mlx.kernels.operation import Case

Swap = Callable[[nn.Module, Kernels], nn.Module | None]
"""Ours in place of a module, or None. It is given a copy, whose own parts were swapped before."""

SWAPS: tuple[Swap, ...] = (linear.swap, attention.swap, gated_delta.swap)

_CONTAINERS = (list, tuple, dict, set)


@dataclass(frozen=True)
class _View:
    """seen: everything below the model when it was copied, in order."""

    model: weakref.ref
    seen: tuple[Any, ...]
    view: nn.Module


def view_of(model: nn.Module, kernels: Kernels) -> nn.Module:
    """The model with our modules in it; the model itself where no kernels are wired in.

    Kept with `kernels`, until the model is gone.
    """
    if not kernels.wired:
        return model
    views, key = kernels.views, id(model)
    seen = tuple(_below(model))
    held: _View | None = views.get(key)
    if held is not None and held.model() is model and _same(held.seen, seen):
        return held.view
    forget = weakref.ref(model, lambda _: views.pop(key, None))
    view = _Copy(kernels).module(model)
    views[key] = _View(forget, seen, view)
    return view


def _below(model: nn.Module) -> Iterator[Any]:
    """Every name and value of the tree below the model, which is not among them: it would be kept alive."""
    done = {id(model)}
    todo: list[Any] = [model]
    while todo:
        for name, item in _items(todo.pop()):
            if name is not None:
                yield name
            yield item
            if (isinstance(item, nn.Module) or type(item) in _CONTAINERS) and id(item) not in done:
                done.add(id(item))
                todo.append(item)


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    """Names and values; None for the names of what has only an order."""
    if isinstance(value, nn.Module):
        yield from value.items()
        yield from vars(value).items()
    elif isinstance(value, dict):
        yield from value.items()
    else:
        yield from ((None, item) for item in value)


def _same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


class _Copy:
    """Copies modules and the containers they are in; what is shared stays shared."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._done: dict[int, Any] = {}

    def module(self, module: nn.Module) -> nn.Module:
        if id(module) in self._done:
            return self._done[id(module)]
        copy = self._done[id(module)] = type(module).__new__(type(module))
        for name, value in module.items():
            dict.__setitem__(copy, name, self._of(value))
        for name, value in vars(module).items():
            vars(copy)[name] = self._of(value)
        for swap in SWAPS:
            ours = swap(copy, self._kernels)
            if ours is not None:
                self._done[id(module)] = ours
                return ours
        return copy

    def _of(self, value: Any) -> Any:
        if isinstance(value, nn.Module):
            return self.module(value)
        if type(value) not in _CONTAINERS:
            return value
        if id(value) not in self._done:
            self._done[id(value)] = self._container(value)
        return self._done[id(value)]

    def _container(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: self._of(item) for name, item in value.items()}
        return type(value)(self._of(item) for item in value)


@runtime_checkable
class HasCases(Protocol):
    """A module of ours that calls operations."""

    def cases(self) -> list[Case]:
        """What it wants raced."""
        ...


def survey(part: nn.Module) -> list[Case]:
    """The cases that the modules below want raced, each once."""
    found: dict[Case, None] = {}
    for module in part.modules():
        if isinstance(module, HasCases):
            found.update(dict.fromkeys(module.cases()))
    return list(found)
