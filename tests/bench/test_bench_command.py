"""`dflash-metal bench` as a user runs it, on a tiny pair in folders."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_mlx.__main__ import main
from dflash_mlx.bench import pair as bench_pair
from dflash_mlx.bench.arms import Ours, Stock
from dflash_mlx.bench.command import run
from dflash_mlx.bench.pair import Wanted, check_memory, find_pair, memory_parts, weights_of
from dflash_mlx.bench.presets import Preset, Settings
from dflash_mlx.bench.record import Measured, Record, from_json, load
from dflash_mlx.bench_command import SUBCOMMANDS, bench_main, bench_parser, command
from dflash_mlx.errors import FetchError
from dflash_mlx.fit import Parts
from dflash_mlx.machine import Machine
from tests.families import tiny
from tests.folders import draft_folder, target_folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A target called as the paper's, and a draft."""
    root = tmp_path_factory.mktemp("pair")
    return str(target_folder(root / "Qwen3-4B-bf16")), str(draft_folder(root / "draft"))


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    rows = [
        {"name": "one", "prompt": "Which number is it?", "category": "numbers", "task": "number", "answer": "7"},
        {"name": "two", "prompt": "And what is this about?", "category": "talk"},
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


@pytest.fixture
def bench(folders: tuple[str, str]) -> Any:
    """The command over the tiny pair; what it is given later wins."""
    target, draft = folders
    return lambda *words: main(["bench", "--model", target, "--draft", draft, "--blas", "off", *words])


def printed(capsys: pytest.CaptureFixture[str]) -> list[Record]:
    return [from_json(json.loads(line)) for line in capsys.readouterr().out.splitlines()]


def test_a_run_gives_one_record_of_every_arm(bench: Any, prompts: str, tmp_path: Path, capsys: Any) -> None:
    """What is printed with --json is what the file holds."""
    out = tmp_path / "record.json"
    assert bench("--prompts", prompts, "--max-tokens", "24", "--json", "--out", str(out)) == 0
    (found,) = printed(capsys)
    assert found == load(out) and found.complete
    assert list(found.run.arms) == ["stock", "plain", "dflash", "auto"] and len(found.measured) == 16
    assert all(row.divergence == "identical" for row in found.compared)
    pair = found.run.pair
    assert (pair.target_weights, pair.draft_weights, pair.target_revision) == ("float32", "float32", None)
    assert found.run.conditions.keys() == {"before", "after"} and found.run.prompt_set == prompts
    assert found.run.command.startswith("dflash-metal bench --model ") and found.run.template == "chat"
    assert [asked.category for asked in found.prompts] == ["numbers", "talk"]


def test_without_json_tables_are_printed_and_the_record_is_kept(
    bench: Any, prompts: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of an hour must not end as lines on a screen that is closed."""
    monkeypatch.chdir(tmp_path)
    assert bench("--prompts", prompts, "--max-tokens", "8", "--arms", "stock,dflash", "--limit", "1") == 0
    said = capsys.readouterr()
    (file,) = tmp_path.glob("bench-*.json")
    assert load(file).complete and f"The record is in {file.name}." in said.err
    assert "Speed-up over `stock`" in said.out and "(worst)" in said.out
    assert "2 prompts of" in said.err and "greedy; arms stock, dflash" in said.err
    assert re.search(r"^12/13 two stock: 8 tokens in [\d.]+ s, [\d.]+ tok/s generation only$", said.err, re.M)


def test_blocks_are_swept_in_arms_of_their_own(bench: Any, prompts: str, capsys: Any) -> None:
    """All of them against the same baseline, in one run."""
    words = ("--max-tokens", "8", "--arms", "stock,dflash", "--block-size", "4,8", "--json")
    assert bench("--prompts", prompts, *words) == 0
    (found,) = printed(capsys)
    assert list(found.run.arms) == ["stock", "dflash-4", "dflash-8"]
    assert {each.arm: each.block_size for each in found.measured} == {"stock": 1, "dflash-4": 4, "dflash-8": 8}


def test_the_sequential_arm_drafts_with_an_ordinary_model(
    bench: Any, folders: tuple[str, str], prompts: str, capsys: Any
) -> None:
    """So that parallel and sequential drafting are measured on one machine; here the target drafts for itself."""
    small = ("--sequential-draft", folders[0], "--sequential-tokens", "2")
    assert bench("--prompts", prompts, "--max-tokens", "8", "--arms", "stock,sequential", *small, "--json") == 0
    (found,) = printed(capsys)
    assert {each.block_size for each in found.measured if each.arm == "sequential"} == {3}
    assert found.run.pair.sequential_draft == folders[0]


def test_settings_reach_the_requests(bench: Any, prompts: str, capsys: Any) -> None:
    """A seed, a template and an end that are not what the record says would make it wrong."""
    words = ("--temperature", "0.8", "--no-eos", "--raw", "--trials", "2", "--arms", "stock,plain", "--limit", "1")
    assert bench("--prompts", prompts, "--max-tokens", "6", *words, "--json") == 0
    (found,) = printed(capsys)
    limits = found.run.limits
    assert (limits.temperature, limits.seed, limits.ignore_eos, found.run.pairs) == (0.8, 0, True, 2)
    assert found.run.template == "raw" and [each.tokens for each in found.prompts] == [19, 23]
    assert len(found.measured) == 16 and found.compared[1].divergence is None


# What ends a run early.


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ctrl-C in the eleventh request: after four warm-ups of two prompts and one prompt of two."""
    count, real = [0], Stock.run

    def run(self: Stock, *args: Any) -> Measured:
        count[0] += 1
        if count[0] == 5:
            raise KeyboardInterrupt
        return real(self, *args)

    monkeypatch.setattr(Stock, "run", run)
    yield


@pytest.mark.usefixtures("interrupted")
def test_an_interrupt_writes_what_was_measured_and_exits_with_130(
    bench: Any, prompts: str, tmp_path: Path, capsys: Any
) -> None:
    """Marked, so that half a run does not pass for a whole one."""
    out = tmp_path / "record.json"
    words = ("--max-tokens", "8", "--arms", "stock,dflash", "--json", "--out", str(out))
    assert bench("--prompts", prompts, *words) == 130
    found = load(out)
    assert not found.complete and found.ended == "interrupted" and len(found.of("one", "dflash")) == 2
    said = capsys.readouterr()
    assert from_json(json.loads(said.out)) == found and "Interrupted in part 1 of 1: what was measured" in said.err


@pytest.mark.parametrize("ends, status", [(ValueError("no"), 1), (KeyboardInterrupt(), 130)])
def test_a_run_that_ends_in_its_warm_up_leaves_no_empty_record(
    ends: BaseException, status: int, bench: Any, prompts: str, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    """A file without a number in it would look like a result."""

    def run(*_: Any) -> Measured:
        raise ends

    monkeypatch.setattr(Stock, "run", run)
    monkeypatch.chdir(tmp_path)
    assert bench("--prompts", prompts, "--max-tokens", "8") == status
    said = capsys.readouterr()
    assert not list(tmp_path.glob("bench-*.json")) and said.out == ""
    assert ("Error: no" if status == 1 else "nothing was measured of it yet") in said.err


def test_numbers_that_do_not_agree_end_the_run_with_an_error(
    bench: Any, prompts: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that counts one accepted draft too many; the record is kept to look at."""
    real = Ours.run

    def run(self: Ours, *args: Any) -> Measured:
        seen = real(self, *args)
        return replace(seen, reported=replace(seen.reported, accepted=(seen.reported.accepted or 0) + 1))

    monkeypatch.setattr(Ours, "run", run)
    out = tmp_path / "record.json"
    assert bench("--prompts", prompts, "--max-tokens", "8", "--arms", "stock,plain", "--out", str(out)) == 1
    assert "Error: Prompt 'one', arm 'plain': tokens = accepted + cycles" in capsys.readouterr().err
    found = load(out)
    assert not found.complete and "arm 'plain'" in (found.ended or "")


@pytest.mark.parametrize("place, why", [("", "it is a folder"), ("missing/record.json", "is no folder that can be")])
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_loaded(
    bench: Any, prompts: str, place: str, why: str, tmp_path: Path, capsys: Any
) -> None:
    """A slip in --out would be found out when the run is over."""
    assert bench("--prompts", prompts, "--out", str(tmp_path / place)) == 1
    said = capsys.readouterr().err
    assert why in said and "Loading" not in said


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_a_record_that_cannot_be_written_is_shown_all_the_same(
    folders: tuple[str, str], prompts: str, more: list[str], capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk at the end of an hour must not take the numbers with it."""

    def full(*_: Any, **more: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dflash_mlx.bench.output.save", full)
    words = ["--model", folders[0], "--draft", "none", "--blas", "off", "--prompts", prompts, "--max-tokens", "8"]
    args = bench_parser().parse_args([*words, "--out", "record.json", *more])
    with pytest.raises(OSError, match="No space left"):  # which becomes a line and exit status 1
        run(args, command(words))
    if more:
        assert printed(capsys)[0].complete
    else:
        assert "Speed-up over `stock`" in capsys.readouterr().out


def test_each_part_is_judged_by_its_own_temperature(
    folders: tuple[str, str], prompts: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drawn text differs by chance: held to the greedy part before it, it would end the run as a bug."""
    parts = (Settings("cold", (prompts,), 1, max_tokens=6), Settings("warm", (prompts,), 1, max_tokens=6, seed=0))
    parts = (parts[0], replace(parts[1], temperature=1.0))
    made = Preset("quick", "Two temperatures.", (folders[0],), parts)
    monkeypatch.setattr("dflash_mlx.bench.command.preset", lambda name: made)
    words = ["--preset", "quick", "--draft", folders[1], "--blas", "off", "--arms", "stock,dflash", "--json"]
    assert bench_main(words) == 0
    cold, warm = printed(capsys)
    assert {row.divergence for row in cold.compared} == {"identical"}
    assert None in {row.divergence for row in warm.compared}


def test_an_arm_without_a_draft_is_refused(bench: Any, prompts: str, capsys: Any) -> None:
    """And left out where nobody asked for it by name."""
    small = ("--prompts", prompts, "--max-tokens", "4", "--draft", "none")
    assert bench(*small, "--arms", "stock,dflash") == 1
    assert "The arm 'dflash' needs a draft, and there is none" in capsys.readouterr().err
    assert bench(*small, "--json") == 0
    (found,) = printed(capsys)
    assert list(found.run.arms) == ["stock", "plain"] and found.run.pair.draft is None


def test_a_block_that_the_draft_was_not_trained_with_is_refused_before_measuring(
    bench: Any, prompts: str, capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not after the other arms have run for an hour."""
    monkeypatch.chdir(tmp_path)
    assert bench("--prompts", prompts, "--block-size", "4,32") == 1
    assert "`--block-size` 32 is more than the 16 that the draft was trained with" in capsys.readouterr().err
    assert not list(tmp_path.glob("bench-*"))


@pytest.mark.parametrize(
    "words, message",
    [
        (["--block-size", "1"], "has to be integers of 2 or more"),
        (["--trials", "0"], "has to be an integer of 1 or more, got '0'"),
        (["--part", "1024"], "--part is of a preset"),
        (["--arms", "stock,sequential"], "the arm sequential needs a small model"),
        (["--preset", "fast"], "invalid choice: 'fast'"),
        (["--arms", ","], "has to name something"),
        (["--temperature", "-1"], "has to be a number of 0 or more, got '-1'"),
        (["--temp", "inf"], "has to be a number of 0 or more, got 'inf'"),
    ],
)
def test_wrong_usage_exits_with_2(words: list[str], message: str, capsys: Any) -> None:
    """At once, before anything heavy is imported."""
    with pytest.raises(SystemExit) as end:
        bench_main(words)
    assert end.value.code == 2 and message in capsys.readouterr().err


def test_arms_that_there_are_not_are_named(bench: Any, prompts: str, capsys: Any) -> None:
    """One line, not a traceback."""
    assert bench("--prompts", prompts, "--arms", "stock,fast") == 1
    assert "`arms` has to be some of stock, plain" in capsys.readouterr().err


# What has to be here.


def test_models_that_are_not_here_are_named_with_the_commands_that_fetch_them(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All of them at once, prompts too; nothing is fetched."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    held = lambda *_, **kept: _nothing(kept)  # noqa: E731
    monkeypatch.setattr("dflash_mlx.bench.command.find_spec", lambda name: None)
    monkeypatch.setattr("huggingface_hub.snapshot_download", held)
    assert bench_main(["--preset", "paper"]) == 1
    said = capsys.readouterr().err
    assert "hf download Qwen/Qwen3-4B\n" in said
    assert "hf download z-lab/Qwen3-4B-DFlash-b16 --revision b74e3a32" in said
    for name in ("openai/gsm8k", "HuggingFaceH4/MATH-500", "MathArena/aime_2025", "HuggingFaceH4/mt_bench_prompts"):
        assert f"hf download {name} --repo-type dataset --include" in said
    assert said.endswith("\n  pip install pyarrow\n")  # which reads most of them
    assert bench_main(["--preset", "lucebox"]) == 1
    assert (
        "hf download mlx-community/Qwen3.5-27B-4bit\n  hf download z-lab/Qwen3.5-27B-DFlash" in capsys.readouterr().err
    )


def _nothing(kept: dict[str, Any]) -> str:
    from huggingface_hub.errors import LocalEntryNotFoundError

    assert kept["local_files_only"], "a benchmark asked the hub for files"
    raise LocalEntryNotFoundError("nothing here")


def test_a_draft_or_small_model_that_is_not_here_is_named_too(
    folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target alone would be loaded, and the run would end behind it."""
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **kept: _nothing(kept))
    with pytest.raises(FetchError, match="hf download org/small\n  hf download org/draft --revision v2"):
        find_pair(Wanted(folders[0], "org/draft", draft_revision="v2", sequential="org/small"))


def test_a_pair_that_does_not_fit_is_refused_by_its_parts(folders: tuple[str, str]) -> None:
    """Before minutes of loading and hours of swapping."""
    found = find_pair(Wanted(*folders))
    assert check_memory(found, 512, Machine.other(10**9)) is None
    with pytest.raises(bench_pair.BenchError, match=r"context of 512 tokens would take about 0\.0 GB of the 0\.0 GB"):
        check_memory(found, 512, Machine.other(2 * 10**6))
    remark = next(said for size in range(2, 60) if "tight" in (said := _tried(found, size * 10**6)))
    assert remark.startswith("memory is tight: about ") and "target" in remark and "context" in remark


def test_a_draft_is_counted_in_the_bits_that_it_is_loaded_in_and_a_small_model_too(
    folders: tuple[str, str],
) -> None:
    """The refusal advises --draft-bits: the next try has to need less. Nothing of a conversation is kept here."""
    target, draft = folders
    mac = Machine.mac(64 * 2**30)

    def parts(**wanted: Any) -> Parts:
        found = find_pair(Wanted(target, draft, **wanted))
        assert found.target is not None
        made = memory_parts(found, found.target, 512, mac)
        assert made is not None
        return made

    stored, packed, beside = parts(), parts(draft_bits=4), parts(sequential=target)
    assert packed.draft < stored.draft / 2 and packed.target == stored.target
    assert beside.draft == stored.draft + stored.target and beside.draft_context >= stored.context
    assert stored.snapshots == 0


def _tried(found: Any, memory: int) -> str:
    try:
        return check_memory(found, 512, Machine.other(memory)) or "fits"
    except bench_pair.BenchError:
        return "too large"


def test_the_weights_of_a_record_are_those_in_memory() -> None:
    """Comparing another quantisation unawares is how numbers mislead."""
    import mlx.core as mx
    import mlx.nn as nn

    assert weights_of(tiny("llama", mx.bfloat16)) == "bfloat16"
    packed = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    nn.quantize(packed, group_size=32, bits=4)
    assert weights_of(packed) == "4 bits, groups of 32"


# Presets.


def rows_of(name: str, folder: Path) -> str:
    """A file with two rows of a public set."""
    row: dict[str, Any] = {"question": "How many?", "answer": "#### 7", "problem": "Find x."}
    row |= {"prompt": "def f(x):\n", "test": "def check(f):\n    pass", "entry_point": "f"}
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps(row | {"question": f"How many {n}?"}) + "\n" for n in range(2)))
    return f"{name}:{file}"


def test_a_paper_run_puts_the_papers_numbers_beside_ours_and_says_what_differs(
    bench: Any, tmp_path: Path, capsys: Any
) -> None:
    """Other weights, prompts and lengths than the paper's, and not a word of it missing."""
    sets = ",".join(rows_of(name, tmp_path) for name in ("gsm8k", "humaneval"))
    words = ("--preset", "paper", "--prompts", sets, "--max-tokens", "8", "--limit", "1")
    assert bench(*words, "--json") == 0
    said = capsys.readouterr()
    content = json.loads(said.out)
    assert content["run"]["preset"] == "paper" and content["run"]["thinking"] is None
    differ = content["run"]["conditions_differ"]
    for expected in (
        "weights: bfloat16, here float32",
        "backend: Transformers, here MLX",
        "n: 128, here 1",
        "n: 164, here 1",
        "thinking: off, here unknown",
        "max tokens: 2048, here 8",
    ):
        assert expected in differ
    assert not any(each.startswith(("model", "block", "template")) for each in differ)
    table = {(row["category"], row["measure"]): row for row in content["published"]}
    gsm8k = table["gsm8k", "tokens_per_cycle_of_requests"]
    ours = content["summary"]["categories"]["gsm8k"]["dflash"]["of_requests"]
    assert (gsm8k["published"], gsm8k["ours"]) == (6.53, ours) and gsm8k["differs"]
    assert gsm8k["source"] == "arXiv 2602.06036 v2, table 1"
    assert "paper: Table 1 of the DFlash paper." in said.err


def test_a_raw_sweep_as_lucebox_runs_it(bench: Any, tmp_path: Path, capsys: Any) -> None:
    """Its tree is not our chain, and both of its rows of HumanEval say so or not."""
    file = rows_of("humaneval-raw", tmp_path)
    words = ("--preset", "lucebox", "--prompts", file, "--max-tokens", "6", "--block-size", "4,16")
    assert bench(*words, "--json") == 0
    content = json.loads(capsys.readouterr().out)
    assert list(content["run"]["arms"]) == ["stock", "dflash-4", "dflash-16"] and content["run"]["template"] == "raw"
    rows = [each for each in content["published"] if each["category"] == "humaneval-raw"]
    assert {each["arm"] for each in rows} == {"dflash-16"} and [each["published"] for each in rows][-1] == 112.8
    tree = "drafting: tree of 22 nodes, here chain"
    assert tree in rows[0]["differs"] and tree not in rows[-1]["differs"]


def test_parts_of_a_preset_are_records_of_their_own(bench: Any, prompts: str, tmp_path: Path, capsys: Any) -> None:
    """Two lengths, two records, two files, and each has its own published rows."""
    out = tmp_path / "reddit.json"
    words = ("--preset", "reddit", "--part", "1024", "--part", "2048", "--prompts", prompts, "--limit", "1")
    assert bench(*words, "--max-tokens", "6", "--arms", "stock,dflash", "--out", str(out)) == 0
    parts = [load(tmp_path / f"reddit-{name}.json") for name in ("1024", "2048")]
    assert [part.run.preset for part in parts] == ["reddit/1024", "reddit/2048"]
    assert all(part.run.limits.ignore_eos for part in parts)
    said = capsys.readouterr()
    assert "Published numbers beside these" in said.out and "one problem of 102 tokens" in said.out


def test_the_fade_over_contexts_has_a_category_for_each(bench: Any, capsys: Any) -> None:
    """The curve is in one record, so that the machine was the same."""
    words = ("--preset", "reddit", "--part", "context", "--prompts", "context:1024,context:1536", "--limit", "1")
    assert bench(*words, "--max-tokens", "4", "--arms", "stock,dflash", "--json") == 0
    (found,) = printed(capsys)
    assert [(each.category, each.tokens) for each in found.prompts] == [("context-1024", 1024), ("context-1536", 1536)]
    assert found.summary is not None and found.summary.longest_prompt_tokens == 1536


def test_each_subcommand_is_one_of_its_own() -> None:
    """`bench openai` and the others take their own arguments."""
    import importlib

    assert {"openai", "report", "import"} <= set(SUBCOMMANDS)
    for place in SUBCOMMANDS.values():
        module, _, function = place.partition(":")
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError as error:
            pytest.skip(f"{error}")
        assert callable(getattr(found, function))


def test_a_record_holds_the_command_without_where_it_went() -> None:
    """Whoever repeats it has other folders, and a path of this machine is nobody's business."""
    words = ["--preset", "demo", "--out", "/home/me/x.json", "--json"]
    assert (
        command(words)
        == command(["--preset", "demo", "--out=/x", "--json"])
        == "dflash-metal bench --preset demo --json"
    )


def test_help_names_presets_and_subcommands(capsys: Any) -> None:
    """What there is has to be found without the source."""
    with pytest.raises(SystemExit):
        bench_parser().parse_args(["--help"])
    said = capsys.readouterr().out
    assert "quick,demo,paper,reddit,lucebox" in said and "bench openai" in said and "bench report" in said
