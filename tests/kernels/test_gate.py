"""Which kernels run: wishes, rules about chips, and verdicts that hold until something in their key changes."""

from __future__ import annotations

import errno
import json
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from dflash_mlx.kernels import race_file
from dflash_mlx.kernels.chip import NO_METAL, Chip, this_chip
from dflash_mlx.kernels.choice import STOCK, references
from dflash_mlx.kernels.gate import UNRACED, Gate, parse_wish, select
from dflash_mlx.kernels.operation import Case
from dflash_mlx.kernels.race import Verdict
from dflash_mlx.kernels.race_file import RaceFile
from dflash_mlx.kernels.race_watch import Raced
from tests.kernels.fake_operation import CASE, M4, M5, Double

NOWHERE = Chip("Xeon", "x86_64", "Linux 6", closed=NO_METAL)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "kernels.json"


def _closed(gate: Gate, names: frozenset[str] | None = None) -> str | None:
    return gate.closed(gate.operations["double"], CASE, names)


def _never(cases: Sequence[Case]) -> Iterator[Raced]:
    raise AssertionError("nothing may be raced here")
    yield


def test_a_kernel_is_closed_until_it_was_raced_and_then_open_in_every_process(path: Path) -> None:
    """A race takes seconds: it is run once per machine, not once per start."""
    gate = Double().gate(path)
    assert _closed(gate) == UNRACED
    gate.prepare([CASE])
    assert _closed(gate) is None
    later = Double().gate(path, race=_never)
    later.prepare([CASE])
    assert _closed(later) is None


def test_a_refusal_is_remembered_with_its_reason(path: Path) -> None:
    Double(kernel_s=lambda rows: 1e-3).gate(path).prepare([CASE])
    later = Double().gate(path, race=_never)
    later.prepare([CASE])
    assert _closed(later) == "1.00 times as fast as stock at 8 rows, below 1.15"


CHANGES = {
    "MLX": dict(mlx="99.0"),
    "chip": dict(chip=replace(M4, architecture="applegpu_g15s")),
    "system": dict(chip=replace(M4, system="macOS 26.2")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_verdict_does_not_outlive_what_it_was_found_under(change: str, path: Path) -> None:
    """A kernel that won against an older MLX may lose against a newer one."""
    Double().gate(path).prepare([CASE])
    changed = Double(kernel_s=lambda rows: 1.0).gate(path, **CHANGES[change])
    assert _closed(changed) == UNRACED
    changed.prepare([CASE])
    assert "as fast as stock" in (_closed(changed) or "")
    assert _closed(Double().gate(path)) is None, "the verdict under the former conditions is kept"


def test_another_text_of_the_kernel_is_raced_again(path: Path) -> None:
    Double().gate(path).prepare([CASE])
    assert _closed(Double(body="y[0] = x[0] + 0;").gate(path)) == UNRACED


def test_a_damaged_file_counts_as_empty_and_is_replaced(path: Path) -> None:
    for damage in ("", "{", "[]", '{"format": 1, "verdicts": [3]}', '{"format": 99, "verdicts": []}', "\0\0"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(damage)
        gate = Double().gate(path)
        assert _closed(gate) == UNRACED and "is damaged" in (gate.file.note or "")
        gate.prepare([CASE])
        assert _closed(Double().gate(path, race=_never)) is None
        path.unlink()


def test_a_disk_that_cannot_be_written_leaves_the_verdicts_in_memory(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(target))

    monkeypatch.setattr(race_file, "whole_file", full)
    gate = Double().gate(path)
    gate.prepare([CASE])
    assert _closed(gate) is None and not path.exists()
    assert "in this process only" in (gate.file.note or "") and "No space left" in (gate.file.note or "")


def test_a_folder_that_cannot_be_made_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    gate = Double().gate(tmp_path / "file" / "kernels.json")
    gate.prepare([CASE])
    assert _closed(gate) is None and "in this process only" in (gate.file.note or "")


def test_two_processes_keep_each_others_verdicts(path: Path) -> None:
    """Two chats that load two models at once."""
    other = Case("double", "float16", (("width", 32),))
    one, two = Double().gate(path), Double().gate(path)
    assert _closed(one) == _closed(two) == UNRACED
    one.prepare([CASE])
    two.prepare([other])
    later = Double().gate(path, race=_never)
    later.prepare([CASE, other])
    assert [use.opened for use in later.uses([CASE, other])] == [2]


def test_what_another_process_found_meanwhile_is_not_raced_again(path: Path) -> None:
    waiting = Double().gate(path, race=_never)
    assert _closed(waiting) == UNRACED
    Double().gate(path).prepare([CASE])
    waiting.prepare([CASE])
    assert _closed(waiting) is None


def test_a_verdict_about_the_system_is_not_remembered(path: Path) -> None:
    def race(cases: Sequence[Case]) -> Iterator[Raced]:
        yield Raced(cases[0], Verdict("it could not be raced here", scope="moment"))

    gate = Double().gate(path, race=race)
    gate.prepare([CASE])
    assert _closed(gate) == "it could not be raced here"
    gate.prepare([CASE])  # in this process it is not tried again
    assert _closed(Double().gate(path)) == UNRACED


def test_a_kernel_that_hung_at_one_size_is_closed_at_every_size_and_not_tried_again(path: Path) -> None:
    """Every size of it may freeze the screen, those included that won before."""
    wide, third = replace(CASE, sizes=(("width", 64),)), replace(CASE, sizes=(("width", 96),))
    hung = "its work took more than 1 s"

    def race(cases: Sequence[Case]) -> Iterator[Raced]:
        assert list(cases) == [wide, third]
        yield Raced(wide, Verdict(hung, scope="kernel"))

    Double().gate(path).prepare([CASE])
    gate = Double().gate(path, race=race)
    gate.prepare([CASE, wide, third])
    double, other = Double().operation, replace(Double().operation, name="other")
    for known in (gate, Double().gate(path, race=_never, operations={"double": double, "other": other})):
        known.prepare([CASE, wide, third])
        assert {known.closed(double, case, None) for case in (CASE, wide, third)} == {hung}
        assert known.kernels_for(None).notes([CASE, third]) == (f"stock: double ({hung})",)
        assert known.closed(other, replace(CASE, operation="other"), None) == UNRACED


def test_what_was_found_before_an_interrupt_is_kept(path: Path) -> None:
    """Ctrl-C in a long race, or the chat's cancel, which `progress` raises."""
    other = replace(CASE, dtype="float16")

    def progress(message: str, share: float | None) -> None:
        assert message == "Racing kernels on this machine, once: double"
        if share:
            raise KeyboardInterrupt

    gate = Double().gate(path)
    with pytest.raises(KeyboardInterrupt):
        gate.prepare([CASE, other], progress=progress)
    later = Double().gate(path)
    assert [(use.opened, use.cases) for use in later.uses([CASE, other])] == [(1, 2)]


def test_without_metal_nothing_is_raced_started_or_noted(path: Path) -> None:
    gate = Double().gate(path, NOWHERE, race=_never)
    kernels = select("auto", gate)
    kernels.prepare([CASE])
    assert not kernels.wired and kernels.notes([CASE]) == () and _closed(gate) == NO_METAL
    assert not path.parent.exists()


def test_without_metal_someone_who_asks_for_a_kernel_is_told(path: Path) -> None:
    """By name they expect it to run; silence would look as if it did."""
    gate = Double().gate(path, NOWHERE, race=_never)
    kernels = gate.kernels_for(frozenset({"double"}))
    assert not kernels.wired and kernels.notes([]) == ("no kernel is used: no Metal on this machine",)


def test_this_machine_is_examined_by_running_a_kernel() -> None:
    chip = this_chip()
    assert (chip.closed is None) == (mx.metal.is_available() and mx.default_device() == mx.Device(mx.gpu))
    assert chip.closed is None or not select("auto").wired


def test_matrix_kernels_start_closed_on_an_m5_and_open_by_name_if_they_win(path: Path) -> None:
    """Peers' stalled it; an owner may try, and the race still decides."""
    double = Double(matrix=True)
    gate = double.gate(path, M5)
    gate.prepare([CASE])
    assert _closed(gate) == "matrix kernels start closed on generation 17 (M5) and newer" and double.calls == 0
    named = gate.kernels_for(frozenset({"double"}))
    named.prepare([CASE])
    assert _closed(gate, frozenset({"double"})) is None and _closed(gate) is not None
    slow = Double(matrix=True, kernel_s=lambda rows: 1.0).gate(path.with_name("slow.json"), M5)
    slow.prepare([CASE], frozenset({"double"}))
    assert "as fast as stock" in (_closed(slow, frozenset({"double"})) or "")


def test_what_mlx_does_as_well_on_newer_chips_is_raced_on_old_ones_only(path: Path) -> None:
    """A race costs seconds at load, and a note about every shape that stays with MLX would bury the others."""
    double = Double()
    old_only = {"double": replace(double.operation, newest=lambda case: 14)}
    for chip, opens in ((replace(M4, architecture="applegpu_g14s"), True), (M4, False), (M5, False)):
        gate = double.gate(path, chip, operations=old_only, race=double.race if opens else _never)
        gate.prepare([CASE])
        reason = _closed(gate)
        if opens:
            assert reason is None and gate.kernels_for(None).notes([CASE]) == ("kernels: double",)
        else:
            assert reason == "MLX's own kernels are as good for so few rows from generation 15 on"
            assert gate.kernels_for(None).notes([CASE]) == ()


def test_a_name_does_not_open_a_kernel_whose_numbers_are_wrong(path: Path) -> None:
    gate = Double(wrong_ids=1).gate(path)
    gate.prepare([CASE], frozenset({"double"}))
    assert "whole numbers" in (_closed(gate, frozenset({"double"})) or "")


def test_other_kernels_than_the_named_ones_stay_closed(path: Path) -> None:
    gate = Double().gate(path)
    gate.prepare([CASE])
    assert _closed(gate, frozenset({"other"})) == "not among the kernels that were asked for"


@pytest.mark.parametrize(
    ("architecture", "generation", "threads", "matrix"),
    [
        ("applegpu_g13s", 13, 448, True),
        ("applegpu_g14d", 14, 448, True),
        ("applegpu_g16g", 16, 1024, True),
        ("applegpu_g17s", 17, 1024, False),
        ("applegpu_g20p", 20, 1024, False),
        ("paravirtual", None, 1024, False),
    ],
)
def test_chips_are_told_apart(architecture: str, generation: int | None, threads: int, matrix: bool) -> None:
    chip = Chip("Apple", architecture, "macOS 26.1")
    assert (chip.generation, chip.threads, chip.matrix_closed is None) == (generation, threads, matrix)
    assert (chip.remark is not None) == (threads == 448)


def test_a_request_sees_what_a_race_after_it_opened(path: Path) -> None:
    """The same object serves requests before and after `load` has raced."""
    double = Double()
    kernels = double.gate(path).kernels_for(None)
    x = mx.ones((8, 32), mx.bfloat16)
    assert kernels.closed(double.operation, x) == UNRACED
    kernels.prepare([CASE])
    assert kernels.closed(double.operation, x) is None


def test_notes_say_what_runs_and_why_not_in_one_line(path: Path) -> None:
    narrow = replace(CASE, sizes=(("width", 16),))
    double = Double()
    kernels = double.gate(path).kernels_for(None)
    assert kernels.notes([CASE]) == (f"stock: double ({UNRACED})",)
    kernels.prepare([CASE])
    assert kernels.notes([CASE]) == ("kernels: double",)
    assert kernels.notes([CASE, narrow]) == (f"kernels: double (1 of 2 shapes; {UNRACED})",)
    assert kernels.notes([]) == ()


def test_notes_to_a_wish_by_name_are_about_these_names(path: Path) -> None:
    """That six others stay closed is what was asked for; that a named one is never called is not."""
    gate = Double().gate(path)
    gate.prepare([CASE])
    others = [CASE, Case("triple", "bfloat16", ())]
    assert gate.kernels_for(frozenset({"double"})).notes(others) == ("kernels: double",)
    assert gate.kernels_for(frozenset({"double", "other"})).notes(others) == (
        "kernels: double; stock: other (this pair does not call it)",
    )
    assert gate.kernels_for(frozenset({"other"})).notes([CASE]) == ("stock: other (this pair does not call it)",)
    old = {"double": replace(Double().operation, newest=lambda case: 16)}
    (note,) = Double().gate(path, M5, operations=old).kernels_for(frozenset({"double"})).notes([CASE])
    assert note.startswith("stock: double (MLX's own kernels are as good")


def test_wishes_are_auto_off_or_names() -> None:
    assert parse_wish("auto") is None and parse_wish("off") == frozenset()
    assert parse_wish("accept") == {"accept"} and parse_wish(" accept , accept") == {"accept"}
    assert select("off") is STOCK and select(STOCK) is STOCK
    kernels = references()
    assert select(kernels) is kernels and select("auto") is select("auto")


@pytest.mark.parametrize("wish", ["", "on", "accept,nope", "accept,", "auto,accept", "off,auto", None, 3])
def test_a_wish_that_is_none_is_refused_with_the_legal_ones(wish: object) -> None:
    with pytest.raises(ValueError, match=r"`kernels` has to be 'auto', 'off', or one or more of accept.*got"):
        parse_wish(wish)  # type: ignore[arg-type]


def test_the_file_can_be_read_by_people(path: Path) -> None:
    Double().gate(path).prepare([CASE])
    (entry,) = json.loads(path.read_text())["verdicts"]
    assert entry["case"] == ["double", "bfloat16", {"width": 32}] and entry["reason"] is None
    assert entry["conditions"]["architecture"] == "applegpu_g16g" and entry["speedups"]["8"] == pytest.approx(2.0)


def test_old_verdicts_make_room(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file would grow with every update of the system."""
    monkeypatch.setattr(race_file, "_MOST", 2)
    file = RaceFile(path)
    gate = Double().gate(path)
    conditions = gate.conditions(gate.operations["double"])
    cases = [replace(CASE, sizes=(("width", width),)) for width in (1, 2, 3)]
    with warnings.catch_warnings():
        for case in cases:
            file.add({(conditions, case): Verdict(None)})
    assert [case for _, case in RaceFile(path).read()] == cases[1:]
