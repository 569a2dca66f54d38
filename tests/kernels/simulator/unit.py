"""The translation unit: shim and MLX's prelude, which are the same for every kernel, and the kernel with its entry."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import mlx.core as mx

from tests.kernels.simulator import translate
from tests.kernels.simulator.generated import Generated

# The runtime's number for each thread attribute (`runtime/attributes.h`).
ATTRIBUTES = {
    "thread_position_in_grid": 0,
    "thread_position_in_threadgroup": 1,
    "threadgroup_position_in_grid": 2,
    "threadgroups_per_grid": 3,
    "threads_per_grid": 4,
    "grid_size": 4,
    "threads_per_threadgroup": 5,
    "dispatch_threads_per_threadgroup": 6,
    "thread_index_in_threadgroup": 7,
    "thread_index_in_simdgroup": 8,
    "simdgroup_index_in_threadgroup": 9,
    "simdgroups_per_threadgroup": 10,
    "threads_per_simdgroup": 11,
    "thread_execution_width": 11,
    "thread_index_in_quadgroup": 12,
    "quadgroup_index_in_threadgroup": 13,
    "quadgroups_per_threadgroup": 14,
    "dispatch_simdgroups_per_threadgroup": 15,
    "dispatch_quadgroups_per_threadgroup": 16,
    "grid_origin": 17,
}
_INCLUDE = re.compile(r'\s*#include "((?:mlx|msl)/.*)"')


@dataclass(frozen=True)
class Unit:
    """prelude: the same for every kernel, compiled once; kernel: what follows it."""

    prelude: str
    kernel: str


@lru_cache(maxsize=1024)
def unit(text: Generated, whole_kernels: bool = False) -> Unit:
    """The translation unit for MLX's text. `whole_kernels`: the header may declare threadgroup variables."""
    header, first = translate.whole_kernel_header(text.header) if whole_kernels else (translate.header(text.header), 0)
    parts = {
        "header": header + "\n",
        "signature": text.signature,
        "kernel": translate.body(text.body, first) + "\n}\n",
        "entry": _entry(text),
    }
    return Unit(prelude(), "".join(f'\n#line 1 "{name}"\n{part}' for name, part in parts.items()))


def _entry(text: Generated) -> str:
    """A function without parameters that calls the kernel with the runtime's buffers and attributes."""
    arguments = [
        f"{'*' if parameter.by_value else ''}({parameter.type}*)__msl_buf({index}u)"
        for index, parameter in enumerate(text.parameters)
    ]
    for kind, name in text.attributes:
        first = 4 * ATTRIBUTES[name]
        parts = [f"__msl_attr({first + axis}u)" for axis in range(3 if kind == "uint3" else 1)]
        arguments.append(f"metal::__mk<uint3>({', '.join(parts)})" if kind == "uint3" else parts[0])
    call = f"{text.name}{text.values}({', '.join(arguments)});"
    return f'extern "C" __attribute__((visibility("default"))) void msl_entry() {{ {call} }}\n'


@cache
def prelude() -> str:
    """The shim, and the text that MLX compiles in front of every custom kernel, from the installed package.

    In one piece: clang refuses a precompiled header when a file that it includes has another date.
    """
    own, package = Path(__file__).parent / "include", Path(mx.__file__).parent / "include"
    text = _inlined(package, "mlx/backend/metal/kernels/utils.h", set())
    return _inlined(own, "msl.h", set()) + translate.prelude(text)


def _inlined(root: Path, name: str, seen: set[str]) -> str:
    if name in seen:
        return ""
    seen.add(name)
    out = [f'#line 1 "{name}"\n']
    for number, line in enumerate((root / name).read_text().splitlines(), 1):
        include = _INCLUDE.match(line)
        if include:
            out.append(_inlined(root, include[1], seen) + f'#line {number + 1} "{name}"\n')
        else:
            out.append("\n" if "#pragma once" in line else line + "\n")
    return "".join(out)
