"""What a kernel is given: MLX's own text, views with their strides, and what it is counted to have read."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from tests.kernels.checks import numbers, simulator
from tests.kernels.simulator import Simulator, SimulatorError
from tests.kernels.simulator.generated import generated
from tests.kernels.simulator.memory import extent
from tests.kernels.simulator.snippets import launch, run

I = "uint i = thread_position_in_grid.x;\n"  # noqa: E741
BLOCK = mx.arange(2 * 3 * 8 * 4, dtype=mx.float32).reshape(2, 3, 8, 4)
VIEWS: dict[str, Callable[[], mx.array]] = {
    "whole": lambda: BLOCK,
    "first keys of a cache": lambda: BLOCK[:, :, :5],
    "later keys": lambda: BLOCK[:, :, 3:],
    "heads and positions swapped": lambda: BLOCK.transpose(0, 2, 1, 3),
    "broadcast over heads": lambda: mx.broadcast_to(BLOCK[:, :1], (2, 3, 8, 4)),
    "reversed": lambda: BLOCK[..., ::-1],
    "every second": lambda: BLOCK[:, :, ::2],
    "one element": lambda: BLOCK[1:, 2:, 7:, 3:],
}
GATHER = """
int r = int(i);
int d = r % x_shape[3]; r /= x_shape[3];
int c = r % x_shape[2]; r /= x_shape[2];
int b = r % x_shape[1];
int a = r / x_shape[1];
out[i] = T(x[a * x_strides[0] + b * x_strides[1] + c * x_strides[2] + d * x_strides[3]]);
"""


@pytest.fixture(autouse=True)
def needs_the_simulator() -> None:
    simulator()


@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.uint8, mx.int64])
@pytest.mark.parametrize("name", VIEWS)
def test_a_view_is_read_through_its_strides(name: str, dtype: mx.Dtype, contiguous: bool):
    """K/V caches are views; a kernel that gets the strides of a copy would read other heads' keys on Metal."""
    view = VIEWS[name]().astype(dtype) if dtype != mx.float32 else VIEWS[name]()
    size = (view.size, 1, 1)
    options = dict(grid=size, threadgroup=(1, 1, 1), shape=view.shape, dtype=dtype, template=[("T", dtype)])
    assert mx.array_equal(run(I + GATHER, {"x": view}, contiguous=contiguous, **options), view)


def test_the_strides_are_the_views_own():
    """MLX makes no copy where a kernel says that it wants none."""
    for name, view in VIEWS.items():
        got = run(
            I + "if (i < 4) out[i] = float(x_strides[i]); else out[i] = float(x_shape[i - 4]);",
            {"x": view()},
            grid=(8, 1, 1),
            threadgroup=(8, 1, 1),
            shape=(8,),
            contiguous=False,
        )
        strides, shape = got.tolist()[:4], got.tolist()[4:]
        mine = np.asarray(memoryview(view()))
        assert (strides, shape) == ([s // 4 for s in mine.strides], list(mine.shape)), name


def test_a_copy_is_made_where_the_kernel_wants_rows():
    """MLX copies such an input before the launch, and the kernel may index it as if it were whole."""
    view = BLOCK.transpose(0, 2, 1, 3)
    got = run(I + "out[i] = x[i];", {"x": view}, grid=(192, 1, 1), threadgroup=(32, 1, 1), shape=view.shape)
    assert mx.array_equal(got, view)


@pytest.mark.parametrize("step", [1, -1])
def test_reads_outside_a_views_extent_are_errors(step: int):
    """The next sequence's keys lie there, or nothing at all."""
    view = mx.arange(100, dtype=mx.float32)[20:84:4] if step == 1 else mx.arange(100, dtype=mx.float32)[80:16:-4]
    size = dict(grid=(16, 1, 1), threadgroup=(16, 1, 1), shape=(16,), contiguous=False)
    for offset in (-1, 16):
        with pytest.raises(SimulatorError) as caught:
            run(I + f"out[i] = x[(int(i) + {offset}) * x_strides[0]];", {"x": view}, **size)
        assert caught.value.kind == "out-of-bounds"


def test_what_lies_between_a_views_elements_is_not_a_number():
    """A kernel that reads past the valid keys of a cache gets what is there; it must not matter, so here it is NaN."""
    size = dict(grid=(180, 1, 1), threadgroup=(12, 1, 1), shape=(180,))
    got = run(I + "out[i] = x[i];", {"x": BLOCK[:, :, :5]}, contiguous=False, **size)
    valid = np.zeros((2, 3, 8, 4), bool)
    valid[:, :, :5] = True
    np.testing.assert_array_equal(np.isnan(numbers(got)), ~valid.ravel()[:180])


@pytest.mark.parametrize("start", [0, 1, 2, 4])
def test_a_vector_load_is_aligned_or_not_as_it_would_be_on_metal(start: int):
    """A slice along the last axis starts where it starts; loads of four floats need a multiple of 16 bytes."""
    x = mx.arange(128, dtype=mx.float32)[start : start + 64]
    body = I + "float4 v = ((const device float4*)x)[i / 4]; out[i] = v.x + v.y + v.z + v.w;"
    if start % 4 == 0:
        assert mx.array_equal(run(body, {"x": x}), mx.repeat(x.reshape(16, 4).sum(1), 4))
        return
    with pytest.raises(SimulatorError) as caught:
        run(body, {"x": x})
    assert caught.value.kind == "misaligned"


def test_an_extent_is_from_the_lowest_to_the_highest_byte():
    """Bounds are checked over it."""
    reverse = extent(mx.arange(10, dtype=mx.float32)[8:2:-2], contiguous=False)
    assert (len(reverse.data), reverse.first, reverse.strides.tolist()) == (4 * 5, 16, [-2])
    assert len(extent(mx.broadcast_to(mx.array([1.0]), (9,)), contiguous=False).data) == 4
    assert len(extent(BLOCK[:0], contiguous=False).data) == 0


SHAPES = {
    "one array": [mx.zeros((3, 4), mx.bfloat16)],
    "a scalar, a small and a larger one": [mx.array(2.0), mx.zeros((7,)), mx.zeros((8,), mx.uint8)],
    "more types": [mx.zeros((2, 2), mx.bool_), mx.array(3), mx.zeros((5, 5, 5), mx.float16)],
}
TEMPLATES = {
    "none": [],
    "type": [("T", mx.bfloat16)],
    "three": [("T", mx.float32), ("N", -3), ("B", False)],
    "wide": [("A", mx.int64), ("C", True)],
}
SOURCES = {
    "plain": "out[0] = 0;",
    "properties": "out[i] = a0_strides[0] + a0_ndim + a0_shape[0] + thread_position_in_grid.x;",
    "attributes": (
        "uint l = thread_index_in_simdgroup + dispatch_threads_per_threadgroup.x + simdgroups_per_threadgroup;"
    ),
}


@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("shapes", SHAPES)
def test_the_text_is_mlxs_for_the_arrays_at_hand(shapes: str, template: str, source: str, contiguous: bool, tmp_path):
    """The simulator asks MLX with stand-ins of the same kind; another signature would be another kernel."""
    arrays = {f"a{index}": array for index, array in enumerate(SHAPES[shapes])}
    kernel, call = launch(SOURCES[source], arrays, header="// h\n", template=TEMPLATES[template], contiguous=contiguous)
    text = generated(kernel, call)
    built = mx.fast.metal_kernel(
        name=kernel.name,
        input_names=list(kernel.inputs),
        output_names=list(kernel.outputs),
        source=kernel.body,
        header=kernel.header,
        ensure_row_contiguous=contiguous,
    )
    path = tmp_path / "kernel.mlxfn"
    mx.export_function(
        str(path),
        lambda *inputs: built(
            inputs=list(inputs),
            template=list(call.template),
            grid=call.grid,
            threadgroup=call.threadgroup,
            output_shapes=list(call.shapes),
            output_dtypes=list(call.dtypes),
        ),
        *call.inputs,
    )
    assert text.text.encode() in path.read_bytes()
    assert text.text.startswith(text.header + text.signature + text.body)
    assert [p.array for p in text.parameters if p.role == "input"] == list(kernel.inputs)
    assert [p.array for p in text.parameters if p.role == "output"] == ["out"]
    assert len(text.parameters) == text.text.count("[[buffer(")
    assert len(text.attributes) + len(text.parameters) == text.signature.count("[[") - 1


def test_mlx_refuses_a_wrong_call_here_as_on_metal():
    """A launch with an input too few would otherwise pass its tests and fail on a Mac."""
    kernel, call = launch("out[0] = 0;", {"x": BLOCK, "y": BLOCK})
    with pytest.raises(ValueError, match="inputs"):
        Simulator()(kernel, call.__class__(call.inputs[:1], *list(vars(call).values())[1:]))


def test_a_byte_counts_once_for_each_simdgroup():
    """That is the traffic a kernel's layout asks for; lanes that read the same byte share it."""
    run_ = Simulator(1)
    body = I + "float s = 0; for (int k = 0; k < 3; k++) s += x[0] + x[i % 32]; out[i] = s + x[i];"
    run_(*launch(body, {"x": mx.ones((128,))}, grid=(128, 1, 1), threadgroup=(64, 1, 1), shape=(128,)))
    (counts,) = run_.counts
    # Group 0 of either threadgroup reads x[0..31] and its own; group 1 x[0..31] and its own.
    own = 32 * 4
    assert counts.fetched == {"x": own + 3 * 2 * own}
    assert counts.stored == {"out": 128 * 4}
    assert counts.loaded >= counts.fetched["x"]
    assert counts.matrix_operations == 0


def test_shapes_strides_and_threadgroup_memory_do_not_count():
    """They are not what a kernel is bound by."""
    run_ = Simulator()
    body = I + (
        "threadgroup float s[64]; s[i] = x[i * x_strides[0]] + x_shape[0];"
        "threadgroup_barrier(mem_flags::mem_threadgroup); out[i] = s[63 - i];"
    )
    run_(*launch(body, {"x": mx.arange(128, dtype=mx.float32)[::2]}, contiguous=False))
    assert run_.counts[0].fetched == {"x": 256}
    assert run_.counts[0].loaded == 256


def test_matrix_products_are_counted_by_simdgroup():
    """One product of two 8x8 matrices is one, though 32 lanes take part."""
    run_ = Simulator()
    body = """
    simdgroup_matrix<float, 8, 8> a, c(0.0f);
    simdgroup_load(a, x, 8);
    for (int k = 0; k < 3; k++) simdgroup_multiply_accumulate(c, a, a, c);
    simdgroup_store(c, out + 64 * simdgroup_index_in_threadgroup);
    """
    run_(*launch(body, shape=(128,)))
    assert run_.counts[0].matrix_operations == 6
    assert run_.counts[0].fetched == {"x": 2 * 256}
