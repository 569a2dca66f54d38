"""The race's process may hang, crash or be killed; the kernel that did it stays closed and the others are raced."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest

from dflash_mlx.kernels import race_watch
from dflash_mlx.kernels.operation import Case
from dflash_mlx.kernels.race import Verdict
from dflash_mlx.kernels.race_child import case_of, plain_case, plain_verdict, verdict_of
from dflash_mlx.kernels.race_watch import Ending, race_all, spawn
from tests.kernels.fake_operation import CASE, Double, FakeChild, said, watched

OTHER = replace(CASE, sizes=(("width", 64),))
THIRD = replace(CASE, sizes=(("width", 96),))
ELSE = replace(CASE, operation="else")


def test_what_a_child_finds_arrives() -> None:
    raced, asked = watched([CASE, OTHER], FakeChild(said(Double(), [CASE, OTHER])))
    assert [found.case for found in raced] == [CASE, OTHER] and asked == [[CASE, OTHER]]
    assert all(found.verdict.reason is None and len(found.verdict.speedups) == 2 for found in raced)


def test_a_launch_that_does_not_end_in_a_second_closes_the_kernel_and_others_are_raced() -> None:
    """A peer's kernel stalled an M5 for 105 seconds: nobody waits for that, and nobody tries it at another size."""
    lines = said(Double(), [CASE])
    begun = next(i for i, line in enumerate(lines) if line and json.loads(line).get("begin") == 1.0)
    hung = FakeChild([*lines[: begun + 1], None])
    raced, asked = watched([CASE, OTHER, ELSE], hung, FakeChild(said(Double(), [ELSE])))
    assert asked == [[CASE, OTHER, ELSE], [ELSE]] and hung.killed
    assert hung.waited[-1] <= 2.0, "the watchdog waits for a launch of one second at most, and for the message"
    assert [found.case for found in raced] == [CASE, ELSE] and raced[1].verdict.reason is None
    assert raced[0].verdict.scope == "kernel" and "took more than 1 s" in (raced[0].verdict.reason or "")


def test_a_launch_that_ends_after_a_second_closes_the_kernel_too() -> None:
    """Its other sizes would freeze the screen one after the other."""
    slow = FakeChild([*said(Double(kernel_s=lambda rows: 1.2), [CASE]), *said(Double(), [OTHER])])
    raced, asked = watched([CASE, OTHER, ELSE], slow, FakeChild(said(Double(), [ELSE])))
    assert asked == [[CASE, OTHER, ELSE], [ELSE]] and slow.killed
    assert [found.verdict.scope for found in raced] == ["kernel", "shape"]


def test_a_child_that_is_silent_between_launches_is_ended_too() -> None:
    """Stock may hang as well, and loading a model would wait for it forever."""
    raced, asked = watched([CASE, OTHER], FakeChild(['{"case": 0}', None]))
    assert len(asked) == len(raced) == 1 and raced[0].verdict.scope == "kernel"
    assert "said nothing for 120 s" in (raced[0].verdict.reason or "")


def test_a_crash_closes_the_kernel_that_ran_and_no_other() -> None:
    """Metal aborts the process for an invalid command, which Python cannot catch."""
    crashed = FakeChild([*said(Double(), [CASE]), '{"case": 1}', '{"begin": 1.0}', ""])
    raced, asked = watched([CASE, OTHER, THIRD], crashed, FakeChild(said(Double(), [THIRD])))
    assert asked == [[CASE, OTHER, THIRD], [THIRD]]
    reasons = [found.verdict.reason for found in raced]
    assert reasons == [None, "the race's process was ended by signal 11", None]
    assert all(found.verdict.scope == "shape" for found in raced)


@pytest.mark.parametrize(
    "ended", [Ending(-9), Ending(-6, "libc++abi: ... [METAL] Command buffer execution failed: Insufficient Memory")]
)
def test_a_process_that_had_no_memory_left_says_nothing_about_the_kernel(ended: Ending) -> None:
    """The system kills with signal 9; Metal's own error ends the process, since it is raised in a thread of Metal's."""
    killed = FakeChild(['{"case": 0}', '{"begin": 1.0}', ""], ended)
    raced, asked = watched([CASE, OTHER], killed, FakeChild(said(Double(), [OTHER])))
    assert asked == [[CASE, OTHER], [OTHER]], "the others are raced"
    assert raced[0].verdict.scope == "moment" and raced[1].verdict.reason is None
    assert (raced[0].verdict.reason or "").startswith("there was no memory to race it (the race's process was ended by")


@pytest.mark.parametrize("line", ['{"case": 7}', '{"verdict": {"reason": 3, "speedups": {}}}', '{"begin": "x"}', "[1]"])
def test_a_line_that_is_no_message_closes_the_kernel_and_no_load_fails_for_it(line: str) -> None:
    raced, asked = watched([CASE, OTHER], FakeChild(['{"case": 0}', line]), FakeChild(said(Double(), [OTHER])))
    assert asked == [[CASE, OTHER], [OTHER]]
    assert [found.verdict.reason for found in raced] == ["the race's process was ended by signal 11", None]


def test_a_process_that_never_begins_closes_the_kernels_for_now_only() -> None:
    """An import that fails says nothing about a kernel: the next process tries again. What it said helps to mend it."""
    raced, asked = watched([CASE, OTHER], FakeChild([""], Ending(1, "ImportError: no mlx")))
    assert len(asked) == 1 and all(found.verdict.scope == "moment" for found in raced)
    text = "it could not be raced here (the race's process ended with status 1 before it began: ImportError: no mlx)"
    assert [found.verdict.reason for found in raced] == [text] * 2


def test_a_system_without_processes_closes_the_kernels_for_now_only() -> None:
    def start(cases: Sequence[Case]) -> FakeChild:
        raise OSError(11, "Resource temporarily unavailable")

    (raced,) = race_all([CASE], start)
    assert raced.verdict.scope == "moment" and "Resource temporarily unavailable" in (raced.verdict.reason or "")


def test_a_packed_program_does_not_start_itself_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """There sys.executable is the program: a chat would open a second chat, and that one a third."""
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    monkeypatch.setattr(race_watch.subprocess, "Popen", lambda *a, **k: pytest.fail("something was started"))
    (raced,) = race_all([CASE])
    assert raced.verdict.scope == "moment" and "packed into one file" in (raced.verdict.reason or "")


def test_leaving_ends_the_child() -> None:
    """Ctrl-C while a model loads must not leave a race behind that slows the machine."""
    child = FakeChild(said(Double(), [CASE, OTHER]))
    found = race_all([CASE, OTHER], lambda cases: child)
    next(found)
    found.close()
    assert child.killed


def test_messages_carry_cases_and_verdicts_whole() -> None:
    verdict = Verdict("slow", ((8, 1.25), (16, 0.5)), "kernel")
    assert verdict_of(json.loads(json.dumps(plain_verdict(verdict)))) == verdict
    assert case_of(json.loads(json.dumps(plain_case(CASE)))) == CASE


BEGIN = "import json, os, sys, time; json.load(sys.stdin); print(json.dumps({'case': 0}), flush=True); "
CHILDREN = {
    "hangs": (BEGIN + "print(json.dumps({'begin': 0.2}), flush=True); time.sleep(600)", "took more than"),
    "aborts": (BEGIN + "os.abort()", "was ended by signal 6"),
    "exits": (BEGIN + "os._exit(3)", "ended with status 3"),
    "babbles": (BEGIN + "print('Segmentation', flush=True); time.sleep(600)", "was ended"),
}


@pytest.mark.parametrize("kind", CHILDREN)
def test_real_processes_are_ended_and_waited_for(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With processes instead of fakes: no zombie and no hang is left behind."""
    code, text = CHILDREN[kind]
    started = list[race_watch.Process]()

    def start(cases: Sequence[Case]) -> race_watch.Process:
        started.append(spawn(cases, [sys.executable, "-c", code]))
        return started[-1]

    (raced,) = race_all([CASE], start)
    assert (raced.verdict.scope == "kernel") == (kind == "hangs") and text in (raced.verdict.reason or "")
    assert started[0]._process.returncode is not None


def test_a_real_process_is_quoted_where_it_never_began() -> None:
    """Long complaints may not fill a pipe that nobody reads, either."""
    code = "import sys; sys.stderr.buffer.write(b'x' * 200_000 + b'\\n\\xff\\n'); import mlx_that_is_not_there"
    (raced,) = race_all([CASE], lambda cases: spawn(cases, [sys.executable, "-c", code]))
    text = "ended with status 1 before it began: ModuleNotFoundError: No module named 'mlx_that_is_not_there')"
    assert (raced.verdict.reason or "").endswith(text)


def test_the_real_child_starts_and_says_why_a_kernel_does_not_run_here() -> None:
    """`python -m dflash_mlx.kernels.race_child` from start to end; on a machine with Metal it races for real."""
    from dflash_mlx.kernels.gate import all_operations

    case = Case("accept", "int32", ())
    assert "accept" in all_operations()
    (raced,) = race_all([case])
    assert raced.case == case and raced.verdict.scope == "shape"
    reason = raced.verdict.reason
    assert reason is None or "No Metal back-end" in reason or "as fast as stock" in reason
