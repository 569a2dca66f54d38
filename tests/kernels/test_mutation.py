"""Every barrier of every kernel is needed and every index is right: spoil one, and some witness notices.

A witness is a small call with a known result, in `WITNESSES` of `tests/kernels/test_<name>.py`. A mutant that survives
is a place that no witness looks at, or one that makes no difference, which EQUIVALENT says with its reason.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module

import pytest

from dflash_mlx.kernels.operation import Runner
from dflash_mlx.kernels.registry import OPERATIONS
from tests.kernels.checks import simulator
from tests.kernels.mutation import Mutant, Spoiled
from tests.kernels.simulator import SimulatorError

# Places that make no difference when spoiled, as `<operation>: <what>`, and why.
EQUIVALENT: dict[str, str] = {}


@pytest.fixture(autouse=True)
def needs_the_simulator() -> None:
    simulator()


@cache
def spoiled(name: str) -> Spoiled:
    return Spoiled(OPERATIONS[name])


def witnesses(name: str) -> list[Callable[[Runner], None]]:
    module = import_module(f"tests.kernels.test_{name}")
    return list(module.WITNESSES)


def noticed(name: str, mutant: Mutant) -> bool:
    """Whether a witness fails; a kernel that does not compile is no notice, but an error of the test."""
    for witness in witnesses(name):
        try:
            witness(spoiled(name).runner(mutant))
        except (AssertionError, SimulatorError):
            return True
    return False


ALL = [(name, mutant) for name in OPERATIONS for mutant in spoiled(name).mutants]


@pytest.mark.parametrize("name", OPERATIONS)
def test_witnesses_pass_on_the_kernel_itself(name: str):
    """With the switches in place and all off; otherwise every mutant would be noticed for nothing."""
    assert witnesses(name)
    for witness in witnesses(name):
        witness(spoiled(name).runner())


@pytest.mark.parametrize("name, mutant", ALL, ids=[f"{name}: {mutant.what}" for name, mutant in ALL])
def test_a_spoiled_place_is_noticed(name: str, mutant: Mutant):
    """Where it is not, a kernel can be wrong there and every test of it passes."""
    expected = f"{name}: {mutant.what}" not in EQUIVALENT
    assert noticed(name, mutant) == expected, f"{name}, line {mutant.line} of its text: {mutant.what}"


def test_the_table_of_exceptions_names_places_that_exist():
    """A stale row would let a new mistake pass."""
    assert set(EQUIVALENT) <= {f"{name}: {mutant.what}" for name, mutant in ALL}
