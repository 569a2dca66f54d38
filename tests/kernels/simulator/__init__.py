"""Runs a custom Metal kernel on a CPU, from the exact source that MLX generates, and watches every access it makes.

A kernel is compiled by clang in its "C++ for OpenCL" mode against a Metal look-alike (`include/msl.h`), so address
spaces, vectors, half and bfloat are checked as in Metal. Every GPU thread is a fiber, threadgroups run one after the
other (`runtime/`), and each load and store goes through a check: bounds, uninitialised memory, races between threads.

What it cannot show: speed, register pressure, Apple's compiler, fast mathematics. It is for tests only.

Files, in the order of a launch: `generated` asks MLX for its text, `translate` turns it into what clang reads, `unit`
puts the parts together, `compiler` builds and keeps them, `memory` lays out the arrays, `launch` runs and reports.
"""

from tests.kernels.simulator.compiler import why_unavailable
from tests.kernels.simulator.errors import CompileError, SimulatorError
from tests.kernels.simulator.launch import Counts, Rules, Simulator

__all__ = ["CompileError", "Counts", "Rules", "Simulator", "SimulatorError", "why_unavailable"]
