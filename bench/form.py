"""Dataclasses as JSON and back, by their type hints.

Tuples are arrays, keys of objects text, unknown is null. A number that is not finite is refused, since unknown is null.
"""

from __future__ import annotations

import dataclasses
import types
from functools import cache
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from dflash_mlx.errors import DFlashError

T = TypeVar("T")


class BenchError(DFlashError):
    """A run whose numbers would not be true, or a record that cannot be read."""


def plain(value: Any) -> Any:
    """A dataclass, or what it is made of, as what `json.dumps` takes."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value


def read(kind: type[T], value: Any, where: str = "record") -> T:
    """The inverse of `plain`; `where` names the place in errors.

    Fields that have a default may be missing, and fields that are not known are left out.

    Raises:
        BenchError: a field is missing or of another type.
    """
    return cast(T, _read(kind, value, where))


def _read(kind: Any, value: Any, where: str) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        if value is None and type(None) in inner:
            return None
        return _read(next(each for each in inner if each is not type(None)), value, where)
    if origin is Literal and value in inner:
        return value
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        return _read_fields(kind, value, where)
    if origin is tuple and isinstance(value, list):
        kinds = [inner[0]] * len(value) if inner[-1] is Ellipsis else list(inner)
        if len(kinds) == len(value):
            return tuple(_read(k, v, f"{where}[{i}]") for i, (k, v) in enumerate(zip(kinds, value, strict=True)))
    if origin is list and isinstance(value, list):
        return [_read(inner[0], each, f"{where}[{i}]") for i, each in enumerate(value)]
    if origin is dict and isinstance(value, dict):
        return {inner[0](key): _read(inner[1], each, f"{where}.{key}") for key, each in value.items()}
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if kind in (int, str, bool) and type(value) is kind:
        return value
    raise BenchError(
        f"`{where}` of the record holds {str(value)[:60]!r}, where {getattr(kind, '__name__', kind)} belongs. The file "
        "was changed or cut off: take it from where it was made, or run the benchmark again."
    )


def _read_fields(kind: Any, value: dict[str, Any], where: str) -> Any:
    hints, given = _hints(kind), {}
    for field in dataclasses.fields(kind):
        if field.name in value:
            given[field.name] = _read(hints[field.name], value[field.name], f"{where}.{field.name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise BenchError(
                f"`{where}` of the record has no `{field.name}`. The file was changed or cut off: take it from where "
                "it was made, or run the benchmark again."
            )
    return kind(**given)


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)
