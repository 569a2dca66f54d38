"""Conditions as data, and numbers of others beside ours with what differs."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_mlx.bench import public_sets
from dflash_mlx.bench.form import BenchError
from dflash_mlx.bench.measure import measure
from dflash_mlx.bench.presets import Settings, parts_of, preset, presets
from dflash_mlx.bench.prompt_sets import OWN
from dflash_mlx.bench.published import MEASURES, beside, differing, published, published_table
from dflash_mlx.bench.record import Pair, Record
from dflash_mlx.bench_command import PRESETS
from dflash_mlx.pairing.registry import base_name, draft_for, is_copy
from tests.bench.scripted import FakeClock, Scripted, dflash, prompt, record

ROW = dict(
    source="a paper",
    engine="MLX",
    machine="M5 Max",
    baseline="mlx_lm",
    target="Qwen3-4B",
    weights="4 bits",
    draft_weights="bfloat16",
    block=4,
    n=2,
    template="chat",
    thinking=False,
    max_tokens=9,
    ignore_eos=False,
    temperature=0.0,
    category="gsm8k",
    numbers={"tokens_per_cycle": 3.0, "decode_speedup": 2.0},
)
PAIR = Pair("mlx-community/Qwen3-4B-4bit", draft="d", target_weights="4 bits, groups of 64", draft_weights="bfloat16")


def run(**changes: Any) -> Record:
    """Two prompts, measured by the scripted engine under the conditions of `ROW`."""
    clock, made = FakeClock(), record("stock", "dflash")
    given: dict[str, Any] = dict(
        pair=PAIR, preset="x", prompt_set="gsm8k", template="chat", thinking=False, machine={"chip": "Apple M5 Max"}
    )
    made.run = replace(made.run, **(given | changes))
    category = changes.get("prompt_set", "gsm8k")
    return measure(made, [Scripted(clock), dflash(clock)], [prompt("a", category), prompt("b", category)])


def rows(**changes: Any) -> Any:
    return published([ROW | changes], {}, "test")


def test_presets_are_what_the_command_offers() -> None:
    """The command line lists them without reading the file."""
    assert tuple(presets()) == PRESETS


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_asks_for_what_there_is(name: str) -> None:
    """Sets, arms and measures by their names; targets that have a draft."""
    made = preset(name)
    for part in made.parts:
        kinds = [each.partition(":")[0] for each in part.prompts]
        assert all(kind in (*OWN, *public_sets.SETS, "context") for kind in kinds)
        assert set(part.limits) <= set(part.prompts) and part.arms[0] == "stock"
    assert len({part.name for part in made.parts}) == len(made.parts)
    for target in made.targets:
        assert target == "demo" or draft_for(target) is not None
    for row in made.published:
        theirs = row.conditions
        assert row.numbers.keys() <= MEASURES.keys()
        assert theirs.source and theirs.engine and theirs.machine and theirs.target
        assert any(is_copy(base_name(target), theirs.target) for target in made.targets)
        assert row.part in (None, *(part.name for part in made.parts))
        assert row.category in (None, *(each for part in made.parts for each in part.prompts))


def test_the_papers_table_is_the_papers() -> None:
    """Its means of tokens per cycle are printed there too: 6.54 for 4B and 6.49 for 8B."""
    for target, mean in (("Qwen3-4B", 6.54), ("Qwen3-8B", 6.49)):
        own = [row for row in preset("paper").published if row.conditions.target == target]
        assert len(own) == 7
        assert sum(row.numbers["tokens_per_cycle_of_requests"] for row in own) / 7 == pytest.approx(mean, abs=0.005)


def test_conditions_of_quoted_runs_are_theirs() -> None:
    """What makes a result comparable, set by set."""
    (paper,) = preset("paper").parts
    assert (paper.max_tokens, paper.thinking, paper.block_sizes, paper.limit_of("humaneval")) == (
        2048,
        False,
        (16,),
        164,
    )
    assert paper.limit_of("gsm8k") == 128 and not paper.ignore_eos and paper.temperature == 0
    (lucebox,) = preset("lucebox").parts
    assert (lucebox.template, lucebox.max_tokens, lucebox.limit, set(lucebox.block_sizes)) == (
        "raw",
        256,
        10,
        {4, 8, 16},
    )
    reddit = {part.name: part for part in preset("reddit").parts}
    assert [(p.max_tokens, p.ignore_eos) for p in reddit.values()] == [
        (1024, True),
        (2048, True),
        (1024, False),
        (2048, False),
        (256, False),
    ]
    assert reddit["context"].prompts == tuple(f"context:{n * 1024}" for n in (1, 2, 4, 8, 16))


def test_a_part_is_chosen_by_its_name() -> None:
    """A preset takes hours: one point of it must be had alone."""
    made = preset("reddit")
    assert [part.name for part in parts_of(made, ("2048",))] == ["2048"] and parts_of(made, ()) == made.parts
    with pytest.raises(BenchError, match="has no part 'x': its parts are 1024, 2048,"):
        parts_of(made, ("x",))
    with pytest.raises(BenchError, match="The preset quick has no part 'x': it has no parts"):
        parts_of(preset("quick"), ("x",))


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(arms=("stock", "fast")), "`arms` has to be some of stock, .* got 'stock, fast'"),
        (dict(arms=("stock", "stock")), "`arms` has to be .*each once"),
        (dict(limit=0), "`limit` has to be 1 or more, got 0"),
        (dict(block_sizes=(4, 4)), "`block_sizes` have to be 2 or more .*each once"),
    ],
)
def test_settings_that_cannot_be_are_refused(change: dict[str, Any], message: str) -> None:
    """Before a model is loaded."""
    with pytest.raises(ValueError, match=message):
        Settings(**change)


# Beside ours.


def test_a_published_number_stands_beside_ours_by_the_same_definition() -> None:
    """Three cycles accept 5 of 9 drafts: 8/3 tokens per cycle; eight steps of 0.5 s against 0.5 s and three."""
    found = beside(run(), rows())
    assert [(each.measure, each.published, each.ours) for each in found] == [
        ("tokens_per_cycle", 3.0, pytest.approx(8 / 3)),
        ("decode_speedup", 2.0, pytest.approx(4.0 / 2.0)),
    ]
    assert {(each.arm, each.source, each.category, each.differs) for each in found} == {
        ("dflash", "a paper", "gsm8k", ())
    }


def test_every_measure_reads_the_number_of_its_name() -> None:
    """The four acceptances, and speeds on two clocks by two formulas, are easily mistaken for each other."""
    ratio = lambda value: SimpleNamespace(ratio=value)  # noqa: E731
    accepted = dict(mean_acceptance_length=1.0, draft_acceptance_rate=2.0, accepted_share=3.0, cycle_efficiency=4.0)
    arm = SimpleNamespace(
        acceptance=accepted,
        of_requests=5.0,
        speedup={"request": ratio(6.0), "decode": ratio(7.0)},
        decode_tps=8.0,
        mlx_lm_tps=9.0,
    )
    base: Any = SimpleNamespace(acceptance=None, of_requests=None, speedup=None, decode_tps=10.0, mlx_lm_tps=11.0)
    found = {name: read(arm, base) for name, read in MEASURES.items()}  # type: ignore[arg-type]
    assert found == {
        "tokens_per_cycle": 1.0,
        "tokens_per_cycle_of_requests": 5.0,
        "draft_acceptance_rate": 2.0,
        "accepted_share": 3.0,
        "decode_speedup": 7.0,
        "request_speedup": 6.0,
        "decode_tps": 8.0,
        "baseline_decode_tps": 10.0,
        "mlx_lm_tps": 9.0,
        "baseline_mlx_lm_tps": 11.0,
    }
    own = {name for name in MEASURES if not name.startswith("baseline")}
    assert {name for name in own if MEASURES[name](base, base) is None} == own - {"decode_tps", "mlx_lm_tps"}


@pytest.mark.parametrize(
    "theirs, ours, said",
    [
        (dict(target="Qwen3-8B"), {}, "model: Qwen3-8B, here Qwen3-4B-4bit"),
        (dict(weights="bfloat16"), {}, "weights: bfloat16, here 4 bits, groups of 64"),
        (dict(draft_weights="4 bits"), {}, "draft: 4 bits, here bfloat16"),
        (dict(engine="CUDA, ggml"), {}, "backend: CUDA, ggml, here MLX"),
        (dict(machine="H200"), {}, "machine: H200, here Apple M5 Max"),
        (dict(baseline="a slow loop"), {}, "baseline: a slow loop, here mlx_lm"),
        (dict(averaging="of rates"), {}, "rates and speed-ups: of rates, here sums over sums"),
        (dict(block=16), {}, "block: 16, here 4"),
        (dict(drafting="tree of 22 nodes"), {}, "drafting: tree of 22 nodes, here chain"),
        (dict(prompts="one problem"), {}, "prompts: one problem, here gsm8k"),
        ({}, dict(prompt_set="offline"), "prompts: gsm8k, here offline"),
        (dict(n=128), {}, "n: 128, here 2"),
        (dict(template="raw"), {}, "template: raw, here chat"),
        ({}, dict(thinking=None), "thinking: off, here unknown"),
        ({}, dict(thinking=True), "thinking: off, here on"),
        (dict(max_tokens=2048), {}, "max tokens: 2048, here 9"),
        (dict(ignore_eos=True), {}, "ignoring ends: on, here off"),
        (dict(temperature=1.0), {}, "temperature: 1, here 0"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value.partition(":")[0],
)
def test_a_condition_that_differs_is_said_with_both_sides(
    theirs: dict[str, Any], ours: dict[str, Any], said: str
) -> None:
    """A number beside another one is read as a comparison, whatever was measured."""
    made, against = run(**ours), rows(**theirs)
    assert {each.differs for each in beside(made, against)} == {(said,)}
    assert differing(made, against).run.conditions_differ == (said,)
    assert said in published_table(beside(made, against)).markdown()


def test_what_nobody_stated_is_not_made_up() -> None:
    """Unknown is neither the same nor another."""
    bare = published([{k: v for k, v in ROW.items() if k not in ("n", "thinking", "weights")}], {}, "test")
    assert beside(run(thinking=True), bare)[0].differs == ()


def test_rows_of_the_target_come_before_those_of_others_and_each_part_has_its_own() -> None:
    """Two models of one paper, two lengths of one post."""
    own, other = ROW, ROW | {"target": "Qwen3-8B"}
    both = published([own, other], {}, "test")
    assert len(beside(run(), both)) == 2
    assert len(beside(run(pair=Pair("demo")), both)) == 4  # of neither: all are shown, marked
    assert beside(run(preset="x/2048"), rows(part="1024")) == []
    assert len(beside(run(preset="x/1024"), rows(part="1024"))) == 2


def test_an_incomplete_run_says_so_beside_what_was_published() -> None:
    """Half of the prompts may be the easy half."""
    made = run()
    made.complete = False
    assert "the run here is not complete" in beside(made, rows())[0].differs


def test_of_several_blocks_the_published_one_is_compared() -> None:
    """A sweep has an arm for each."""
    clock, made = FakeClock(), record("stock", "dflash-8", "dflash-4")
    made.run = replace(made.run, pair=PAIR, preset="x")
    arms = [Scripted(clock), dflash(clock, name="dflash-8", block_size=8), dflash(clock, name="dflash-4")]
    done = measure(made, arms, [prompt("a", "gsm8k")])
    assert {each.arm for each in beside(done, rows())} == {"dflash-4"}
