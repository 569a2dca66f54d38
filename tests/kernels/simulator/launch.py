"""The simulator: a Runner that executes a launch on the CPU, reports what is undefined, and counts."""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass
from math import prod

import mlx.core as mx
import numpy as np

from dflash_mlx.kernels.operation import Launch, MetalKernel
from tests.kernels.simulator import memory
from tests.kernels.simulator.compiler import Image, build
from tests.kernels.simulator.config import COUNTED, POISONED, WRITABLE, Config, Flag
from tests.kernels.simulator.errors import KINDS, CompileError, SimulatorError
from tests.kernels.simulator.generated import Generated, generated
from tests.kernels.simulator.unit import unit

_RETRY = 99  # the runtime's number for "this needs a shadow of single bytes"
_one_at_a_time = threading.Lock()  # stacks, signal handlers and the runtime's variables are shared


@dataclass(frozen=True)
class Rules:
    """What a launch is held to. The defaults are this project's; MLX's own kernels need others.

    threads:       most threads of a threadgroup.
    memory:        most bytes of threadgroup memory.
    whole_groups:  the grid has to be a multiple of the threadgroup.
    initialised:   reads of memory that nobody wrote are errors.
    written:       outputs have to be written in full.
    linted:        the syntax tree is checked for what clang lets pass.
    whole_kernels: the header may declare threadgroup variables.
    seconds:       CPU time of a launch.
    accesses:      loads and stores of a launch.
    """

    threads: int = 448
    memory: int = 32768
    whole_groups: bool = True
    initialised: bool = True
    written: bool = True
    linted: bool = True
    whole_kernels: bool = False
    seconds: int = 60
    accesses: int = 1 << 34


@dataclass(frozen=True)
class Counts:
    """What one launch read and wrote of its arrays, in bytes; shapes, strides and threadgroup memory do not count.

    fetched: by input, what its SIMD-groups have to have: each counts a byte once, however many lanes read it and how
             often.
    loaded:  what all loads from inputs ask for.
    stored:  by output, what all stores write.
    matrix_operations: products of two 8x8 matrices.
    accesses: loads and stores of any memory that is not a thread's own.
    """

    kernel: str
    fetched: dict[str, int]
    loaded: int
    stored: dict[str, int]
    matrix_operations: int
    accesses: int


class Simulator:
    """Executes launches eagerly. `seed` orders threads and threadgroups: 0 is ascending, others random.

    counts: one for each launch so far.
    mutant: which of the switched places of a spoiled kernel is spoiled (tests/kernels/mutation.py); 0 is none.
    """

    def __init__(self, seed: int = 0, rules: Rules | None = None, mutant: int = 0) -> None:
        self.seed, self.rules, self.mutant = seed, rules or Rules(), mutant
        self.counts: list[Counts] = []

    def __call__(self, kernel: MetalKernel, launch: Launch) -> list[mx.array]:
        """The outputs.

        Raises:
            CompileError: the kernel is not Metal; SimulatorError: it does what Metal leaves undefined, or the launch
                breaks a rule; ValueError: MLX refuses the call.
        """
        _check(launch, self.rules)
        text = generated(kernel, launch)
        if len(text.parameters) > 31:
            raise CompileError(f"signature: error: {len(text.parameters)} buffers, and Metal takes 31")
        image = build(unit(text, self.rules.whole_kernels), self.rules.linted)
        buffers = _buffers(text, kernel, launch)
        config = _run(image, buffers, launch, self)
        self._report(config, image, buffers, kernel.partial)
        outputs = [buffer for buffer in buffers if buffer.role == "output"]
        self.counts.append(
            Counts(
                kernel=kernel.name,
                fetched={b.array: config.fetched[i] for i, b in enumerate(buffers) if b.role == "input"},
                loaded=config.loaded,
                stored={b.array: config.stored[i] for i, b in enumerate(buffers) if b.role == "output"},
                matrix_operations=config.matrix_operations,
                accesses=config.steps,
            )
        )
        return [memory.array(buffer.bits, dtype) for buffer, dtype in zip(outputs, launch.dtypes, strict=True)]

    def _report(self, config: Config, image: Image, buffers: list[_Buffer], partial: tuple[str, ...]) -> None:
        if config.error:
            raise SimulatorError(KINDS.get(config.error, str(config.error)), _message(config, image))
        for index, buffer in enumerate(buffers):
            if self.rules.written and config.unwritten[index] and buffer.array not in partial:
                raise SimulatorError(
                    "unwritten-output",
                    f"{config.unwritten[index]} of {buffer.bits.nbytes} bytes of output `{buffer.array}` were never "
                    "written",
                )


@dataclass(frozen=True)
class _Buffer:
    """One parameter's memory: its bits, where its first element lies in them, and the alignment of the whole."""

    array: str
    role: str
    bits: np.ndarray
    first: int = 0
    skew: int = 0

    @property
    def name(self) -> str:
        return self.array if self.role in ("input", "output") else f"{self.array}_{self.role}"

    @property
    def mode(self) -> int:
        return {"input": COUNTED, "output": WRITABLE | POISONED}.get(self.role, 0)


def _check(launch: Launch, rules: Rules) -> None:
    grid, group = launch.grid, launch.threadgroup
    if min(grid) < 1 or min(group) < 1:
        raise SimulatorError("resource-limit", f"grid {grid} and threadgroup {group} have to be positive")
    if prod(group) > rules.threads:
        raise SimulatorError(
            "resource-limit", f"threadgroup {group} has {prod(group)} threads, and {rules.threads} run on every chip"
        )
    if rules.whole_groups and any(size % part for size, part in zip(grid, group, strict=True)):
        raise SimulatorError(
            "resource-limit",
            f"grid {grid} is not a multiple of threadgroup {group}: the last threadgroups would be partial, and what "
            "their barriers and SIMD-groups do is not defined by the kernels' contract",
        )


def _buffers(text: Generated, kernel: MetalKernel, launch: Launch) -> list[_Buffer]:
    """The memory of every parameter, in the signature's order."""
    extents = {
        name: memory.extent(array, kernel.contiguous) for name, array in zip(kernel.inputs, launch.inputs, strict=True)
    }
    outputs = {
        name: memory.empty(shape, dtype)
        for name, shape, dtype in zip(kernel.outputs, launch.shapes, launch.dtypes, strict=True)
    }
    buffers = []
    for parameter in text.parameters:
        name, role = parameter.array, parameter.role
        if role == "output":
            buffers.append(_Buffer(name, role, outputs[name]))
        elif role == "input":
            one = extents[name]
            buffers.append(_Buffer(name, role, one.data, one.first, one.skew))
        else:
            one = extents[name]
            values = {"shape": one.shape, "strides": one.strides, "ndim": np.array(len(one.shape), np.int32)}
            buffers.append(_Buffer(name, role, values[role]))
    return buffers


def _run(image: Image, buffers: list[_Buffer], launch: Launch, simulator: Simulator) -> Config:
    """Fill in the runtime's structure and call it; a second time with a finer shadow where it asks for that."""
    rules, names = simulator.rules, [ctypes.create_string_buffer(b.name.encode()) for b in buffers]
    config = Config()
    for fine in (False, True):
        config = Config(
            entry=image.entry,
            grid=launch.grid,
            threadgroup=tuple(min(a, b) for a, b in zip(launch.threadgroup, launch.grid, strict=True)),
            seed=simulator.seed,
            mutant=simulator.mutant,
            max_steps=rules.accesses,
            seconds=rules.seconds,
            threadgroup_limit=rules.memory,
            flags=Flag.NONE if rules.initialised else Flag.ANY_MEMORY,
            image_first=image.first,
            image_end=image.end,
            buffers=len(buffers),
            threadgroup_granule=1 if fine else 2,
        )
        for index, (buffer, name) in enumerate(zip(buffers, names, strict=True)):
            config.size[index], config.source[index] = buffer.bits.nbytes, buffer.bits.ctypes.data
            config.first[index], config.skew[index] = buffer.first, buffer.skew
            config.mode[index], config.name[index] = buffer.mode, ctypes.addressof(name)
            config.granule[index] = 1 if fine else min(4, buffer.bits.itemsize)
        with _one_at_a_time:
            config.stacks = _stacks(image)
            image.library.msl_run(ctypes.byref(config))
        if config.error != _RETRY:
            break
    return config


_stack_space: list[int] = []


def _stacks(image: Image) -> int:
    """The fibers' stacks, mapped once for all kernels: their many mappings count against a limit of the system."""
    if not _stack_space:
        image.library.msl_stacks.restype = ctypes.c_uint64
        _stack_space.append(image.library.msl_stacks())
    return _stack_space[0]


def _message(config: Config, image: Image) -> str:
    where = [image.line(config.pc) or (f"kernel:{config.line}" if config.line else "?")]
    if config.other_pc:
        where.append(f"conflicts with {image.line(config.other_pc) or '?'} by thread {config.other_thread}")
    thread = config.thread
    return (
        f"{config.message.decode()}; at {', '.join(where)}; threadgroup {tuple(config.group)}, thread {thread} "
        f"(simdgroup {thread // 32}, lane {thread % 32})"
    )
