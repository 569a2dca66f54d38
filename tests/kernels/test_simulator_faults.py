"""What the simulator says of kernels that are wrong: each of these would be silent on a GPU, at least sometimes."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from tests.kernels.checks import numbers, simulator
from tests.kernels.simulator import CompileError, Rules, Simulator, SimulatorError
from tests.kernels.simulator.snippets import X, launch, run

I = "uint i = thread_index_in_threadgroup;\n"  # noqa: E741
G = "uint g = thread_position_in_grid.x;\n"
SYNC = "threadgroup_barrier(mem_flags::mem_threadgroup);\n"
TWO = dict(grid=(128, 1, 1))  # two threadgroups


@pytest.fixture(autouse=True)
def needs_the_simulator() -> None:
    simulator()


SUM = """
threadgroup float part[2];
float s = simd_sum(x[i]);
if (thread_index_in_simdgroup == 0) part[simdgroup_index_in_threadgroup] = s;
BARRIER
out[i] = part[0] + part[1];
"""
SHIFT = f"threadgroup float s[64]; s[i] = x[i]; {SYNC} float v = s[63 - i];\nBARRIER s[i] = v; {SYNC} out[i] = s[i];"

RUNNING = {
    "a missing barrier": ("uninitialised-read", SUM.replace("BARRIER", ""), {}),
    "a missing barrier before writing again": ("data-race", SHIFT.replace("BARRIER", ""), {}),
    "a missing barrier after which nobody reads again": (
        "data-race",
        f"threadgroup float s[64]; s[i] = x[i]; {SYNC} float v = s[63]; if (i == 63) s[63] = 1; out[i] = v;",
        {},
    ),
    "a barrier for device memory, where it is threadgroup memory": (
        "data-race",
        SUM.replace("BARRIER", "threadgroup_barrier(mem_flags::mem_device);"),
        {},
    ),
    "a barrier of SIMD-groups, where two of them share": (
        "data-race",
        SUM.replace("BARRIER", "simdgroup_barrier(mem_flags::mem_threadgroup);"),
        {},
    ),
    "a barrier in a branch": (
        "barrier-divergence",
        f"threadgroup float s[64]; s[i] = x[i]; if (i < 32) {SYNC} out[i] = s[i];",
        {},
    ),
    "two barriers in two branches": ("barrier-divergence", f"if (i < 32) {SYNC}\nelse {SYNC} out[i] = x[i];", {}),
    "a return before a barrier": (
        "barrier-divergence",
        f"threadgroup float s[64]; if (i >= 40) return; s[i] = x[i]; {SYNC} out[i] = s[i];",
        {},
    ),
    "a SIMD-group that waits for lanes at a barrier": (
        "deadlock",
        f"float r = 0; if (i % 2) {SYNC} else r = simd_sum(x[i]); out[i] = r;",
        {},
    ),
    "a SIMD-group function in a branch": (
        "simd-divergence",
        "float r = 0; if (i % 2) r = simd_sum(x[i]);\n else r = simd_max(x[i]); out[i] = r;",
        {},
    ),
    "a shuffle from a lane that has returned": (
        "simd-divergence",
        "if (i >= 40) { out[i] = 0; return; } out[i] = simd_shuffle_xor(x[i], 16);",
        {},
    ),
    "a matrix product by half a SIMD-group": (
        "simd-divergence",
        "simdgroup_matrix<float, 8, 8> m(1.0f), d; if (i % 32 < 16) { simdgroup_multiply(d, m, m);"
        "out[i] = d.thread_elements()[0]; } else out[i] = 0;",
        {},
    ),
    "a read past the end": ("out-of-bounds", "out[i] = x[i] + x[i + 1];", {}),
    "a read before the start, by an index that wraps": ("out-of-bounds", "out[i] = x[i] + x[i - 1];", {}),
    "a write past the end": ("out-of-bounds", "out[i + 1] = x[i];", {}),
    "a read past the end of a small input": (
        "out-of-bounds",
        "out[i] = c[i % 4];",
        dict(inputs={"c": mx.array([1.0, 2.0, 3.0])}),
    ),
    "an index of a threadgroup array": ("out-of-bounds", "threadgroup float s[32]; s[i] = x[i]; out[i] = s[i];", {}),
    "a pointer into a threadgroup array": (
        "out-of-bounds",
        "threadgroup float s[32], t[32]; threadgroup float* p = s; p[i] = x[i]; out[i] = p[i];",
        {},
    ),
    "an index of a thread's array": (
        "out-of-bounds",
        "float r[4]; for (int j = 0; j < 4; j++) r[j] = x[i]; out[i] = r[(i & 3) + int(x[0]) + 1];",
        {},
    ),
    "a write to an input": ("out-of-bounds", "device float* p = (device float*)x; p[i] = 1; out[i] = 0;", {}),
    "a read of threadgroup memory that nobody wrote": (
        "uninitialised-read",
        f"threadgroup float s[64]; if (i < 63) s[i] = x[i]; {SYNC} out[i] = s[63 - i];",
        {},
    ),
    "a read of an output before it is written": ("uninitialised-read", "out[i] += x[i];", {}),
    "an output that is not written in full": ("unwritten-output", "if (i) out[i] = x[i];", {}),
    "an element written by two threads": ("data-race", "out[i / 2] = x[i]; out[32 + i / 2] = 0;", {}),
    "an element written by two threadgroups": ("data-race", f"{G} out[g % 64] = float(g);", TWO),
    "a read of what another threadgroup wrote": (
        "data-race",
        f"{G} out[g] = 1; if (g >= 64) out[g] = out[g - 64];",
        TWO | dict(shape=(128,)),
    ),
    "a misaligned vector": (
        "misaligned",
        "const device float4* p = (const device float4*)(x + 1); out[i] = (i < 8) ? p[i].x : 0;",
        {},
    ),
    "too much threadgroup memory": ("resource-limit", "threadgroup float s[8704]; s[i] = x[i]; out[i] = s[i];", {}),
    "a division by zero": ("undefined-arithmetic", "int z = int(x[0]); out[i] = float(int(i) / z);", {}),
    "a float too large for its integer": ("undefined-arithmetic", "out[i] = float(int(x[i] * 1e9f));", {}),
    "an endless loop": ("runaway", "while (x[0] == 0.0f) {} out[i] = 0;", dict(rules=Rules(seconds=1))),
    "too many accesses": (
        "runaway",
        "float s = 0; for (int k = 0; k < 9999; k++) s += x[(k + i) % 64]; out[i] = s;",
        dict(rules=Rules(accesses=100_000)),
    ),
    "a grid that is not whole threadgroups": ("resource-limit", "out[i] = 0;", dict(grid=(96, 1, 1))),
    "a threadgroup that not every chip takes": (
        "resource-limit",
        "out[i] = 0;",
        dict(grid=(480, 1, 1), threadgroup=(480, 1, 1), shape=(480,)),
    ),
}

COMPILING = {
    "a device pointer for a thread's": (
        "out[i] = f(x + i);",
        dict(header="float f(thread const float* p) { return *p; }\n"),
    ),
    "a device pointer for a threadgroup's": ("const threadgroup float* p = x; out[i] = p[i];", {}),
    "a pointer without address space in a helper": (
        "out[i] = f(x + i);",
        dict(header="float f(const float* p) { return *p; }\n"),
    ),
    "a pointer without address space in the body": ("const float* p = x; out[i] = p[i];", {}),
    "float stored to bfloat": ("out[i] = x[i] * 2.0f;", dict(dtype=mx.bfloat16)),
    "float and int to one max": ("out[i] = metal::max(x[i], 1);", {}),
    "float4 to half4": ("half4 h = float4(x[i]); out[i] = h.x;", {}),
    "double": ("double d = x[i]; out[i] = d;", {}),
    "std": ("out[i] = std::exp(x[i]);", {}),
    "a header of C++": ("out[i] = expf(x[i]);", dict(header="#include <cmath>\n")),
    "new": ("thread float* p = new float[4]; out[i] = p[0];", {}),
    "goto": ("goto e; e: out[i] = 0;", {}),
    "virtual": ("out[i] = 0;", dict(header="struct A { virtual int f() { return 1; } };\n")),
    "a function pointer": (
        "float (*fp)(float) = g; out[i] = fp(x[i]);",
        dict(header="float g(float a) { return a; }\n"),
    ),
    "an initialised threadgroup variable": ("threadgroup float s[2] = {0, 0}; out[i] = s[0];", {}),
    "a write to a const input": ("x[i] = 1; out[i] = 0;", {}),
    "an attribute that is none": ("out[i] = thread_position_in_gridd.x;", {}),
    "a static variable": ("static int n = 0; n++; out[i] = n;", {}),
    "printf": ('printf("%d", i); out[i] = 0;', {}),
}


@pytest.mark.parametrize("name", RUNNING)
@pytest.mark.parametrize("seed", [0, 5])
def test_what_metal_leaves_undefined_is_reported(name: str, seed: int):
    """Unreported, such a kernel gives right answers here and wrong ones on some chip, some day."""
    kind, body, options = RUNNING[name]
    same = {"data-race", "uninitialised-read"}  # one mistake, depending on which thread comes first
    kinds = same if kind in same else {kind}
    with pytest.raises(SimulatorError) as caught:
        run(I + body, seed=seed, **options)
    assert caught.value.kind in kinds, str(caught.value)


@pytest.mark.parametrize("name", COMPILING)
def test_what_metal_refuses_is_refused(name: str):
    """A kernel that only this compiler takes would fail on a Mac, where its tests were not run."""
    body, options = COMPILING[name]
    with pytest.raises(CompileError, match=r"(kernel|header):.*error"):
        run(I + body, **options)


def test_only_an_output_that_is_said_to_be_partial_may_stay_unwritten():
    """Splits in which nothing is seen leave their part of the partial results alone, and their reader skips it."""
    kernel, call = launch(I + "if (i) out[i] = x[i];")
    (output,) = Simulator()(replace(kernel, partial=("out",)), call)
    assert output.tolist()[1:] == X.tolist()[1:]
    with pytest.raises(SimulatorError):
        Simulator()(kernel, call)


def test_the_same_kernels_are_right_with_their_barriers():
    """A simulator that reported everything would pass the tests above."""
    total = float(np.arange(64).sum())
    assert run(I + SUM.replace("BARRIER", SYNC)).tolist() == [total] * 64
    assert run(I + SHIFT.replace("BARRIER", SYNC)).tolist() == numbers(X)[::-1].tolist()


def test_a_race_is_found_though_the_result_is_right():
    """The threads of one SIMD-group happen to run in step on today's chips; nothing promises it."""
    body = "threadgroup float s[64]; s[i] = x[i]; out[i] = s[i ^ 1];"
    for seed in range(4):
        with pytest.raises(SimulatorError):
            run(I + body, seed=seed)


def test_the_same_value_written_twice_is_no_race():
    """Kernels write a shared maximum from every lane; a report would make them worse, not better."""
    assert run(I + "out[i / 2] = x[i / 2 * 2]; out[32 + i / 2] = 0;").tolist()[:3] == [0, 2, 4]


@pytest.mark.parametrize(
    "line, body",
    [(2, "out[i] = x[i] + x[i + 64];"), (4, "int a = 1;\nint b = a;\nout[i] = x[i + 64] + b;")],
)
def test_a_report_names_the_line_the_thread_and_the_buffer(line: int, body: str):
    """Without them a mistake in a long kernel takes an afternoon to find."""
    with pytest.raises(SimulatorError) as caught:
        run(I + body, seed=0)
    message = str(caught.value)
    assert f"at kernel:{line}" in message
    assert "`x` (256 bytes)" in message
    assert "thread 0 (simdgroup 0, lane 0)" in message


def test_a_report_from_a_header_names_the_header():
    """The functions of metal/*.metal are the header; the body is a few lines in Python."""
    header = "template <typename P>\nfloat second(P p) {\n  return p[64];\n}\n"
    with pytest.raises(SimulatorError, match="at header:3"):
        run(I + "out[i] = second(x);", header=header)


def test_a_stack_that_is_too_small_is_said():
    """A thread's array of 200 KB would be spilled on a GPU; here it would run into the next thread."""
    with pytest.raises(SimulatorError, match=r"stack overflow|out of bounds"):
        run(I + "float a[50000]; for (int k = 0; k < 50000; k++) a[k] = x[k % 64]; out[i] = a[int(x[i])];")


def test_the_process_survives_and_the_next_kernel_is_right():
    """An error leaves fibers and signal handlers where they are; the next launch has to start clean."""
    with pytest.raises(SimulatorError):
        run(I + "out[i] = x[i + 64];")
    assert mx.array_equal(run(I + "out[i] = x[i];"), X)
