"""Where the time of a cycle goes: the phases of a run that waits at the end of each."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import pytest

from dflash_mlx import stream_generate
from dflash_mlx.bench.arms import Models
from dflash_mlx.bench.form import BenchError
from dflash_mlx.bench.profile import PHASES, Cycle, Phases, Profile, Profiled, from_json, profile, profile_main, to_json
from dflash_mlx.bench.record import Limits, Pair, Prompt
from tests.bench.scripted import FakeClock
from tests.conftest import byte_tokenizer, draft_for
from tests.families import reference, tiny

PROMPT = Prompt("one", "code", tuple(range(40, 70)))


class Ticking:
    """Every look takes a second, so that the phases of a cycle can be counted by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_a_profiled_run_gives_the_text_of_an_ordinary_one(name: str) -> None:
    """A profile of another text would say nothing about the run it is held beside; rollback of hybrids included."""
    found = profile(Models(tiny(name), byte_tokenizer()), draft_for(name), PROMPT, Limits(max_tokens=40))
    assert list(found.tokens) == reference(name, PROMPT.ids, 40)
    responses = list(
        stream_generate(
            tiny(name), byte_tokenizer(), list(PROMPT.ids), 40, draft_for(name), mode="dflash", block_size=None
        )
    )
    assert list(found.tokens) == [each.token for each in responses]
    assert sum(cycle.accepted + 1 for cycle in found.cycles) + 1 == 40


def test_every_moment_of_a_cycle_belongs_to_one_phase() -> None:
    """Else the phases would not add up to the cycle, and what is left out would look free."""
    clock = FakeClock()
    phases = Phases(clock)
    for phase, seconds in (("draft", 1.0), ("verify", 2.0), ("commit", 0.5), ("draft", 0.25), ("rest", 4.0)):
        clock.work(seconds)
        phases.mark(phase)
    assert phases.seconds == {"draft": 1.25, "verify": 2.0, "commit": 0.5, "rest": 4.0, "proposed": 0.0}


def test_the_draft_of_a_cycle_is_counted_with_that_cycle() -> None:
    """The loop proposes before it hands out the cycle before. By a clock on which every look takes a second, a cycle
    proposes and takes in features (3 looks end in the draft), verifies (1) and commits (2)."""
    models = Models(tiny("llama"), byte_tokenizer(), Ticking())
    cycles = profile(models, draft_for("llama"), PROMPT, Limits(max_tokens=30)).cycles
    assert {(c.draft_s, c.verify_s, c.commit_s) for c in cycles} == {(3.0, 1.0, 2.0)}
    assert cycles[0].context == len(PROMPT.ids)
    assert cycles[1].context == len(PROMPT.ids) + cycles[0].accepted + 1


def test_without_a_profile_a_cycle_reads_the_device_once() -> None:
    """Waiting belongs to the profile: an ordinary request keeps its one host read per cycle."""
    *_, last = stream_generate(
        tiny("llama"), byte_tokenizer(), list(PROMPT.ids), 30, draft_for("llama"), mode="dflash", block_size=4
    )
    assert last.stats.host_syncs == last.stats.cycles


def test_a_phase_ends_only_when_the_device_is_done_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the wait the verification would be charged with the draft's work, which is what a profile is to split."""
    events: list[str] = []
    evaluate, mark = mx.eval, Phases.mark

    def wait(*arrays: object) -> None:
        events.append("wait")
        evaluate(*arrays)

    def note(self: Phases, phase: str) -> None:
        events.append(phase)
        mark(self, phase)

    monkeypatch.setattr(mx, "eval", wait)
    monkeypatch.setattr(Phases, "mark", note)
    profile(Models(tiny("llama"), byte_tokenizer()), draft_for("llama"), PROMPT, Limits(max_tokens=20))
    before = {(events[i - 1], phase) for i, phase in enumerate(events) if phase in ("proposed", "verify")}
    assert before == {("wait", "proposed"), ("wait", "verify")}
    commits = [events[i - 1] for i, phase in enumerate(events) if phase == "commit" and events[i - 2] == "draft"]
    assert commits and set(commits) == {"wait"}


def made() -> Profile:
    cycles = (
        Cycle(30, 3, 2, 0.25, 0.5, 0.125, 0.0),
        Cycle(33, 3, 0, 0.75, 1.5, 0.375, 0.0),
        Cycle(34, 0, 0, 9, 9, 9, 9),
    )
    return Profile("x", Pair("tiny", draft="d"), Limits(20), 4, {}, (Profiled("one", 30, (1, 2), cycles),))


def test_a_profile_is_the_median_of_cycles_that_drafted_and_comes_back_from_its_file(tmp_path: Path) -> None:
    """A last cycle without room for drafts has no phases to compare."""
    value = json.loads(json.dumps(to_json(made())))
    assert value["median"] == {"draft_s": 0.5, "verify_s": 1.0, "commit_s": 0.25, "rest_s": 0.0}
    assert from_json(value) == made()
    assert set(value["median"]) == {f"{phase}_s" for phase in PHASES}


@pytest.mark.parametrize(
    "value, message", [({"kind": "dflash-bench"}, "no profile"), ({"kind": "dflash-profile", "schema": 9}, "schema 9")]
)
def test_another_file_is_not_read_as_a_profile(value: dict[str, object], message: str) -> None:
    """Numbers of another kind would be drawn as phases."""
    with pytest.raises(BenchError, match=message):
        from_json(value)


def test_prompts_of_which_none_can_be_profiled_are_refused_before_anything_is_loaded(tmp_path: Path, capsys) -> None:
    """The second turn of a conversation follows an answer that a profile does not make."""
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": ["One?", "Two?"]}) + "\n")
    assert profile_main(["--prompts", f"mt-bench:{file}"]) == 1
    said = capsys.readouterr().err
    assert "has conversations only" in said and "Loading" not in said
    with pytest.raises(SystemExit):
        profile_main(["--limit", "0"])
    assert "has to be an integer of 1 or more, got '0'" in capsys.readouterr().err
