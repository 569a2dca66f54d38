"""What an operation with a custom kernel is: plain data, and the one call that runs a kernel on Metal.

A kernel's functions are in `metal/<name>.metal` (valid Metal, MLX's `header`); its body is the short call that names
the thread attributes, written beside the contract in `dflash_mlx/kernels/<name>.py`. MLX writes the signature.
Source: `mx.fast.metal_kernel`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import mlx.core as mx

WIDEST = 17  # rows of a block that a target is given; what is wider is a prompt
Arrays = tuple[mx.array, ...]
Size = tuple[int, int, int]


@dataclass(frozen=True)
class MetalKernel:
    """One Metal function.

    name:    MLX's name for it, unique in the package.
    body:    statements; inputs, outputs, template values and the thread attributes they name are in scope.
    header:  what the body calls.
    contiguous: False passes views as they are, and the body has to use `<input>_strides` (elements, int64).
    partial: outputs of which a launch may leave parts unwritten, that nothing reads.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    body: str
    header: str
    contiguous: bool = True
    partial: tuple[str, ...] = ()


@dataclass(frozen=True)
class Launch:
    """One call of a kernel.

    shapes, dtypes: of the outputs.
    grid:       in threads; threadgroups at its edges are whole (a multiple of `threadgroup` in every axis).
    threadgroup: at most 448 threads, which every chip takes.
    template:   compile-time values; none may change from token to token, since each new one is compiled.
    """

    inputs: Arrays
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[mx.Dtype, ...]
    grid: Size
    threadgroup: Size
    template: tuple[tuple[str, int | bool | mx.Dtype], ...] = ()


Runner = Callable[[MetalKernel, Launch], list[mx.array]]  # executes a launch: on Metal, or in tests on a CPU


def on_metal(kernel: MetalKernel, launch: Launch) -> list[mx.array]:
    """Submit a launch to the GPU, lazily.

    Raises:
        RuntimeError: there is no Metal; ValueError at evaluation: the threadgroup is larger than the pipeline takes.
    """
    return _built(kernel)(
        inputs=list(launch.inputs),
        output_shapes=list(launch.shapes),
        output_dtypes=list(launch.dtypes),
        grid=launch.grid,
        threadgroup=launch.threadgroup,
        template=list(launch.template),
    )


@cache
def _built(kernel: MetalKernel) -> Callable[..., list[mx.array]]:
    built: Callable[..., list[mx.array]] = mx.fast.metal_kernel(  # type: ignore[assignment]
        name=kernel.name,
        input_names=list(kernel.inputs),
        output_names=list(kernel.outputs),
        source=kernel.body,
        header=kernel.header,
        ensure_row_contiguous=kernel.contiguous,
    )
    return built


@dataclass(frozen=True)
class Case:
    """What a race is for: an operation at fixed sizes, whatever the number of rows, or for one class of numbers.

    sizes: by name, as the operation's `case` fills them and its `sample` reads them; "rows" is the class (`Rows`).
    """

    operation: str
    dtype: str  # "float16", "bfloat16", "float32"
    sizes: tuple[tuple[str, int], ...]

    @property
    def size(self) -> dict[str, int]:
        """The sizes by name."""
        return dict(self.sizes)

    @property
    def type(self) -> mx.Dtype:
        """What `dtype` names."""
        return _TYPES[self.dtype]


def name_of(dtype: mx.Dtype) -> str:
    """As a case has it: "bfloat16"."""
    return str(dtype).removeprefix("mlx.core.")


_TYPES = {name_of(dtype): dtype for dtype in (mx.float32, mx.float16, mx.bfloat16, mx.int32, mx.uint32)}


@dataclass(frozen=True)
class Rows:
    """Classes of numbers of rows that win or lose on their own: what MLX does changes between them.

    most: the largest number of each class, ascending. A class is called by it, and raced at its ends; 1 is in none of
          their races.
    """

    most: tuple[int, ...]

    def of(self, rows: int) -> int:
        """The class of a number of rows. The last one for more than there are."""
        return next((most for most in self.most if rows <= most), self.most[-1])

    def ends(self, most: int) -> tuple[int, int]:
        """The fewest and the most rows of a class."""
        return max((lower for lower in self.most if lower < most), default=1) + 1, most


@dataclass(frozen=True)
class Call:
    """The arguments of one call of an operation."""

    arguments: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Operation:
    """One operation; all functions take the operation's own arguments, which its file documents.

    kernels:    the Metal functions that a launch may use.
    why_not:    why these arguments are outside the kernel's contract, or None.
    reference:  the same result in MLX operations, the tests' standard, and what runs where the kernel does not.
    launch:     the same through kernels: launch(run, *arguments, **options).
    case:       what the race for these arguments is called.
    sample:     (case, rows, seed, hard) -> arguments for a race or a check; `hard` asks for awkward values (large,
                tiny, equal ones).
    first_rows: (call, rows) -> the call with only its first rows, whose results have to be bit-equal to the whole's
                first rows; None where an operation has no rows.
    floor:      bytes that each input has to be read at least, by the kernel's layout: name of the input -> bytes.
    widths:     case -> the two numbers of rows that its race is run at.
    newest:     case -> the last generation of chips on which it may open, or None for any; newer MLX kernels are as
                good there.
    stock:      what the race is against, where that is not the reference: the same arguments, results of no interest.
    matrix:     whether it uses simdgroup matrices, which start closed on M5 (generation 17) and newer.
    """

    name: str
    kernels: tuple[MetalKernel, ...]
    why_not: Callable[..., str | None]
    reference: Callable[..., Arrays]
    launch: Callable[..., Arrays]
    case: Callable[..., Case]
    sample: Callable[[Case, int, int, bool], Call]
    first_rows: Callable[[Call, int], Call] | None
    floor: Callable[..., dict[str, int]]
    widths: Callable[[Case], tuple[int, int]] = lambda case: (8, 16)
    newest: Callable[[Case], int | None] = lambda case: None
    stock: Callable[..., Arrays] | None = None
    matrix: bool = False
