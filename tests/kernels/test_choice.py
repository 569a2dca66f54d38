"""What is decided before any kernel runs: on which device, by whom, and at no cost where none is wanted."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from dflash_mlx import request, stream_generate
from dflash_mlx.kernels import chip
from dflash_mlx.kernels.choice import STOCK, references
from dflash_mlx.kernels.race_file import RaceFile, Verdicts
from tests.families import tiny
from tests.generating import DRAFT, PROMPT
from tests.kernels.fake_operation import CASE, Double


def test_where_no_kernels_are_wanted_nobody_asks_what_an_operation_would_take() -> None:
    """The draft's layers ask in every cycle, on machines without Metal too."""
    double = Double()
    x = mx.ones((8, 32), mx.bfloat16)
    asked = {**vars(double.operation), "why_not": None, "case": None}
    operation = type(double.operation)(**asked)
    assert mx.array_equal(STOCK.run(operation, x)[0], x * 2 + 1) and not STOCK.reasons
    with pytest.raises(TypeError):
        references().run(operation, x)


def test_metal_is_looked_for_on_the_gpu_whatever_the_default_device_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found out once per process: a default of the CPU at that moment would close kernels for good."""
    on = ["CPU"]

    @contextlib.contextmanager
    def stream(device: Any) -> Iterator[None]:
        on[:] = ["GPU"] if device == mx.gpu else ["CPU"]
        yield
        on[:] = ["CPU"]

    def on_metal(kernel: Any, launch: Any) -> list[mx.array]:
        if on != ["GPU"]:
            raise ValueError("[metal_kernel] Only supports the GPU.")
        return [launch.inputs[0] + 1]

    monkeypatch.setattr(chip, "on_metal", on_metal)
    monkeypatch.setattr(mx, "stream", stream)
    monkeypatch.setattr(mx, "is_available", lambda device: True)
    assert chip.why_no_metal.__wrapped__() is None


def test_what_may_run_is_decided_on_the_device_of_the_callers_stream(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels over a stream of the CPU would raise in mid-answer: MLX launches them on a GPU only."""
    theirs, found = mx.new_stream(mx.cpu), list[mx.Stream]()
    plan = request.plan

    def spy(*arguments: Any) -> Any:
        found.append(mx.default_stream(mx.default_device()))
        return plan(*arguments)

    monkeypatch.setitem(stream_generate.__globals__, "plan", spy)
    responses = stream_generate(tiny("llama"), tokenizer, PROMPT, 3, DRAFT, theirs, mode="dflash")
    assert len(list(responses)) == 3 and found == [theirs]
    stream_generate(tiny("llama"), tokenizer, PROMPT, 3, DRAFT).close()
    assert found[1] != theirs


def test_a_second_thread_does_not_find_verdicts_that_are_being_read_missing(tmp_path: Path) -> None:
    """It would remember that nothing was raced, and decode on stock until the process ends."""
    path = tmp_path / "kernels.json"
    Double().gate(path).prepare([CASE])
    reading, go_on = threading.Event(), threading.Event()

    class Slow(RaceFile):
        def read(self) -> Verdicts:
            reading.set()
            assert go_on.wait(10)
            return super().read()

    double = Double()
    gate = double.gate(path)
    gate.file = Slow(path)
    first = threading.Thread(target=lambda: gate.held)
    first.start()
    assert reading.wait(10)
    reasons: list[str | None] = []
    second = threading.Thread(target=lambda: reasons.append(gate.closed(double.operation, CASE, None)))
    second.start()
    second.join(0.2)
    go_on.set()
    first.join(10), second.join(10)
    assert reasons == [None]


def test_what_was_found_before_an_interrupt_serves_the_next_request(tmp_path: Path) -> None:
    """Of the same process, which was told before that nothing had been raced."""

    def progress(message: str, share: float | None) -> None:
        if share:
            raise KeyboardInterrupt

    double = Double()
    kernels = double.gate(tmp_path / "kernels.json").kernels_for(None)
    x = mx.ones((8, 32), mx.bfloat16)
    assert kernels.closed(double.operation, x) is not None
    with pytest.raises(KeyboardInterrupt):
        kernels.prepare([CASE], progress)
    assert kernels.closed(double.operation, x) is None
