"""The simulator and the kernels of this package: MLX's text for each launch, and the mutation test's own tests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from bench.kernels import SMALL
from dflash_mlx.kernels.operation import Launch, MetalKernel, on_metal
from dflash_mlx.kernels.registry import OPERATIONS
from dflash_mlx.metal import names
from tests.kernels.checks import simulator
from tests.kernels.mutation import Spoiled, places
from tests.kernels.simulator import SimulatorError
from tests.kernels.simulator.generated import generated
from tests.kernels.simulator.snippets import launch
from tests.kernels.simulator.tokens import split


@pytest.fixture(autouse=True)
def needs_the_simulator() -> None:
    simulator()


def test_every_source_has_an_operation_of_its_name_and_its_tests():
    """A kernel is four pieces of one name; without one of them it is not tested, or not measured."""
    here = Path(__file__).parent
    assert names() == sorted(OPERATIONS) == sorted(SMALL)
    for name, operation in OPERATIONS.items():
        assert operation.name == name
        assert (here / f"test_{name}.py").is_file()


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_text_of_every_launch_is_what_mlx_generates_for_it(name: str, tmp_path):
    """What passes here is what Metal compiles: asked again with the launch's own arrays, in full."""
    operation, run = OPERATIONS[name], simulator()
    launches: list[tuple[MetalKernel, Launch]] = []

    def record(kernel: MetalKernel, one: Launch) -> list[mx.array]:
        launches.append((kernel, one))
        return run(kernel, one)

    for rows in operation.widths(SMALL[name]):
        call = operation.sample(SMALL[name], rows, 0, False)
        mx.eval(operation.launch(record, *call.arguments, **call.options))
    assert launches
    for kernel, one in launches:
        assert kernel in operation.kernels, f"{kernel.name} is not among the operation's kernels"
        path = tmp_path / f"{kernel.name}.mlxfn"
        mx.export_function(str(path), lambda *inputs: on_metal(kernel, replace(one, inputs=inputs)), *one.inputs)  # noqa: B023
        assert generated(kernel, one).text.encode() in path.read_bytes()


TEXT = """
#define TOP(p) p[0]
template <typename T>
inline T read(const device T* p, uint at) {
  float sums[4];
  vec<float, 4> rows[2];
  sums[at] = p[at + 1];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return at < 4 && 3 > sums[0] ? rows[1][at % 4] : f(at)[2];
}
"""


def test_the_places_to_spoil_are_subscripts_and_barriers_not_declarations():
    """A declaration that is taken for a subscript does not compile; a subscript that is overlooked is not tested."""
    assert [place.text for place in places(split(TEXT))] == [
        "sums[at]",
        "p[at + 1]",
        "threadgroup_barrier(mem_flags::mem_threadgroup)",
        "sums[0]",
        "rows[1]",
        "rows[1][at % 4]",
        "f(at)[2]",
    ]


def test_one_place_is_spoiled_at_a_time():
    """Two mistakes at once could hide each other."""
    spoiled = Spoiled(OPERATIONS["accept"])
    assert len({mutant.what for mutant in spoiled.mutants}) == len(spoiled.mutants)
    assert [mutant.number for mutant in spoiled.mutants] == list(range(1, len(spoiled.mutants) + 1))
    switched = spoiled.header + "".join(spoiled.bodies.values())
    for mutant in spoiled.mutants:
        assert switched.count(f"__msl_mutant({mutant.number}u)") == 1


def test_a_switched_barrier_is_there_until_it_is_spoiled():
    """The switch replaces the text of a barrier; the race that it prevents appears with the mutant and not before."""
    body = """
    uint i = thread_index_in_threadgroup;
    threadgroup float s[64];
    s[i] = x[i];
    (__msl_mutant(7u) ? (void)0 : threadgroup_barrier(mem_flags::mem_threadgroup));
    out[i] = s[63 - i];
    """
    run = simulator()
    assert run(*launch(body))[0].tolist() == list(range(63, -1, -1))
    run.mutant = 7
    with pytest.raises(SimulatorError) as caught:
        run(*launch(body))
    assert caught.value.kind in ("data-race", "uninitialised-read")
