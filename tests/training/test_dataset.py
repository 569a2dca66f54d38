"""A data set is resumed to the same bytes, is never of two kinds, and is read as it was made."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

from dflash_mlx.training import columns as columns_module
from dflash_mlx.training.batching import Answer, Sample
from dflash_mlx.training.dataset import Dataset, DatasetError
from dflash_mlx.training.features import columns_of, narrow, rounded
from dflash_mlx.training.generate import Settings, generate, main
from dflash_mlx.training.prompts import Prompt
from tests.families import tiny
from tests.folders import target_folder

PROMPTS = [Prompt(f"say {n * n}", "code" if n % 2 else "story", f"topic {n}", held_out=n % 5 == 0) for n in range(12)]
SETTINGS = Settings(seed=1, samples=2, batch=4, max_tokens=6, top=3, features=(0, 2))
SHARDS = 6  # 12 greedy answers and 9 drawn ones, four a shard


def run(folder: Path, tokenizer: TokenizerWrapper, settings: Settings = SETTINGS, **options: Any) -> Dataset:
    prompts = options.pop("prompts", PROMPTS)
    target = {"name": "tiny"}
    return generate(tiny("llama"), tokenizer, prompts, folder, settings, target=target, source="test", **options)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_interrupted_run_is_resumed_to_the_same_bytes(tmp_path: Path, tokenizer: TokenizerWrapper) -> None:
    """Interrupted between and within shards; what is there already is not made again."""
    whole = contents(run(tmp_path / "whole", tokenizer).folder)
    lines: list[str] = []

    def interrupt_after(count: int) -> Any:
        def tell(line: str) -> None:
            lines.append(line)
            if len(lines) == count:
                raise KeyboardInterrupt

        return tell

    for count in (1, 3):
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "parts", tokenizer, tell=interrupt_after(count))
    assert len(Dataset.open(tmp_path / "parts").numbers()) == 3
    run(tmp_path / "parts", tokenizer, tell=lines.append)
    assert len(lines) == SHARDS
    assert contents(tmp_path / "parts") == whole


def test_an_interrupt_while_a_shard_is_written_leaves_no_part_of_it(
    tmp_path: Path, tokenizer: TokenizerWrapper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens are written last: distributions without tokens are written again, tokens without them never appear."""
    whole = contents(run(tmp_path / "whole", tokenizer).folder)
    save = columns_module.save_file
    written: list[Path] = []

    def full(columns: dict[str, np.ndarray], path: Path, metadata: dict[str, str] | None) -> None:
        written.append(path)
        save({name: column[:1] for name, column in columns.items()}, path, metadata)
        if len(written) == 6:  # the tokens of the second shard
            raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(columns_module, "save_file", full)
        with pytest.raises(OSError, match="full"):
            run(tmp_path / "parts", tokenizer)
    found = Dataset.open(tmp_path / "parts")
    assert found.numbers() == [0] and not list((tmp_path / "parts").rglob(".*"))
    (tmp_path / "parts" / "shards" / "00000.safetensors").unlink()
    run(tmp_path / "parts", tokenizer)
    assert contents(tmp_path / "parts") == whole


def test_processes_that_share_the_work_make_the_same_data_set(tmp_path: Path, tokenizer: TokenizerWrapper) -> None:
    """One per core, or on another machine."""
    whole = contents(run(tmp_path / "whole", tokenizer).folder)
    run(tmp_path / "parts", tokenizer, part=(2, 2))
    assert Dataset.open(tmp_path / "parts").numbers() == [1, 3, 5]
    run(tmp_path / "parts", tokenizer, part=(1, 2))
    assert contents(tmp_path / "parts") == whole


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (dict(settings=Settings(seed=2, batch=4, max_tokens=6)), "settings.seed"),
        (dict(settings=Settings(seed=1, batch=4, max_tokens=7)), "settings.max_tokens"),
        (dict(prompts=PROMPTS[:-1]), "prompts.count"),
        (dict(prompts=[*PROMPTS[:-1], Prompt("say 122", "code", "topic 11")]), "prompts.sha256"),
    ],
)
def test_a_folder_never_holds_two_kinds_of_data(
    tmp_path: Path, tokenizer: TokenizerWrapper, changed: dict[str, Any], named: str
) -> None:
    """The message names what differs, and nothing is written."""
    run(tmp_path, tokenizer, prompts=PROMPTS)
    before = contents(tmp_path)
    with pytest.raises(DatasetError, match=f"made otherwise: its {named} is .* asked for is"):
        run(tmp_path, tokenizer, **changed)
    assert contents(tmp_path) == before


def test_what_is_beside_the_tokens_may_be_missing_and_may_differ(tmp_path: Path, tokenizer: TokenizerWrapper) -> None:
    """Only tokens go to a repository; other layers' features lie beside, not among, those that are there."""
    run(tmp_path, tokenizer)
    assert Dataset.open(tmp_path).shard(0, top=9, layers=(1,)).features is None
    for path in (tmp_path / "features-0-2").iterdir():
        path.unlink()
    shard = Dataset.open(tmp_path).shard(0, top=3, layers=(0, 2))
    assert shard.features is None and shard.top_ids is not None
    run(tmp_path, tokenizer, Settings(seed=1, samples=2, batch=4, max_tokens=6, top=9))  # all is there, nothing to do
    assert not (tmp_path / "soft-9").exists()


def test_shards_hold_what_was_asked_and_answered(tmp_path: Path, tokenizer: TokenizerWrapper) -> None:
    """Prompts through the template, topics beside them, and offsets that cut tokens, distributions and features."""
    found: dict[tuple[str, int], str] = {}
    for shard in run(tmp_path, tokenizer).shards(top=3, layers=(0, 2)):
        assert shard.tokens.dtype == np.uint16 and shard.top_ids is not None and shard.features is not None
        assert shard.top_ids.dtype == np.uint16 and shard.top_logprobs.dtype == np.float16  # type: ignore[union-attr]
        assert shard.response_offsets[-1] == len(shard.top_ids) and shard.feature_offsets[-1] == len(shard.features)
        for index in range(len(shard)):
            tokens = shard.sequence(index)
            length = int(shard.prompt_lengths[index])
            found[shard.topics[index], int(shard.numbers[index])] = tokenizer.decode(tokens[:length].tolist())
            start, end = shard.response_offsets[index : index + 2]
            assert end - start == len(tokens) - length == 6
            if shard.numbers[index] == 0:
                assert np.array_equal(shard.top_ids[start:end, 0], tokens[length:])
            prompt = next(each for each in PROMPTS if each.topic == shard.topics[index])
            assert shard.prompts[index] == prompt.key and shard.held_out[index] == prompt.held_out
            assert shard.categories[index] == prompt.category
    expected = {(p.topic, n): f"user: {p.text}\nassistant: " for p in PROMPTS for n in range(1 if p.held_out else 2)}
    assert found == expected


def test_a_damaged_shard_is_named_with_its_cure(tmp_path: Path, tokenizer: TokenizerWrapper) -> None:
    """Deleted, it is made again like it was."""
    dataset = run(tmp_path, tokenizer)
    before = contents(tmp_path)
    path = tmp_path / "shards" / "00002.safetensors"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DatasetError, match=r"00002.safetensors is damaged .* Delete it"):
        list(dataset.shards())
    path.unlink()
    run(tmp_path, tokenizer)
    assert contents(tmp_path) == before


def test_what_lies_beside_the_tokens_has_a_cure_of_its_own(tmp_path: Path, tokenizer: TokenizerWrapper) -> None:
    """Generating again would leave it out, since the tokens are there; rows of other answers are not taken for them."""
    dataset = run(tmp_path, tokenizer)
    sizes = [len(shard) for shard in dataset.shards()]
    whole, smaller = sizes.index(4), sizes.index(1)
    first, second = (tmp_path / "soft-3" / f"{number:05d}.safetensors" for number in (whole, smaller))
    first.write_bytes(second.read_bytes())
    with pytest.raises(DatasetError, match=r"of other answers\. Delete .* complete the data set"):
        dataset.shard(whole, top=3)
    first.write_bytes(first.read_bytes()[:-20])
    with pytest.raises(DatasetError, match=r"damaged .* Delete it, and complete the data set"):
        dataset.shard(whole, top=3)


def test_shards_that_nothing_describes_are_not_continued(tmp_path: Path, tokenizer: TokenizerWrapper) -> None:
    """They could be of any target."""
    run(tmp_path, tokenizer)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(DatasetError, match="has shards, but no manifest"):
        run(tmp_path, tokenizer)
    assert not (tmp_path / "manifest.json").exists()


def test_a_full_disk_is_an_error_of_the_disk(tmp_path: Path, tokenizer: TokenizerWrapper) -> None:
    """safetensors has an error of its own for it, which a command would show as a traceback."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, before[1]))  # room for the manifest only
    try:
        with pytest.raises(OSError, match="Is the disk full"):
            run(tmp_path, tokenizer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert Dataset.open(tmp_path).numbers() == [] and not list(tmp_path.rglob(".*"))


def test_ids_beyond_the_tokenizers_are_stored_whole(tmp_path: Path) -> None:
    """A padded head may have rows past 65535 where the tokenizer has not."""
    dataset = Dataset.create_or_resume(tmp_path, {"vocabulary": 2**16})
    prompt, top = Prompt("a"), np.array([[2**16 + 1]], np.uint32)
    answer = Answer(Sample(prompt), 1, np.array([1, 2], np.uint32), False, top, np.zeros((1, 1), np.float16), None)
    dataset.write(0, [answer])
    found = dataset.shard(0, top=1)
    assert found.top_ids is not None and found.top_ids.tolist() == [[2**16 + 1]] and found.tokens.dtype == np.uint16


@pytest.mark.parametrize(
    ("changed", "message"),
    [(dict(features=(0, 9)), "`features` has to be layers in 0.."), (dict(max_tokens=10**6), "`max_tokens` has to be")],
)
def test_what_the_target_has_no_room_for_is_refused_before_anything_is_written(
    tmp_path: Path, tokenizer: TokenizerWrapper, changed: dict[str, Any], message: str
) -> None:
    """Else the folder would be bound to settings that cannot be carried out."""
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "data", tokenizer, replace(SETTINGS, **changed))
    assert not (tmp_path / "data").exists()


def test_what_is_no_data_set_is_said(tmp_path: Path) -> None:
    """And a newer format is not read as if it were this one."""
    with pytest.raises(DatasetError, match=r"no manifest\.json"):
        Dataset.open(tmp_path)
    (tmp_path / "manifest.json").write_text('{"format": 99}')
    with pytest.raises(DatasetError, match="format 99"):
        Dataset.open(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(DatasetError, match="cannot be read"):
        Dataset.open(tmp_path)
    (tmp_path / "manifest.json").write_text("[]")
    with pytest.raises(DatasetError, match="format None"):
        Dataset.open(tmp_path)


@pytest.mark.parametrize(
    ("field", "value"),
    [("samples", 0), ("temperature", 0.0), ("min_p", 1.5), ("max_tokens", 0), ("batch", 0), ("top", -1)],
)
def test_settings_out_of_range_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"`{field}` has to be"):
        Settings(**{field: value})  # type: ignore[arg-type]


def test_the_command_answers_the_prompts_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its path on stdout, progress on stderr; the same command again has nothing to do; another seed is refused."""
    target = target_folder(tmp_path / "model")
    rows = [*({"prompt": f"count to {n}"} for n in range(5)), {"answer": "5"}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "data"
    command = ["--target", str(target), "--prompts", str(tmp_path / "prompts.jsonl"), "--out", str(out)]
    command += ["--batch", "4", "--max-tokens", "5", "--samples", "1"]
    assert main(command) == 0
    said = capsys.readouterr()
    assert said.out == f"{out}\n" and "shard 1 (2 of 2): 1 answers" in said.err
    assert "note: 1 of 6 rows of prompts.jsonl was skipped; the first, line 6, has only answer" in said.err
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["target"]["name"] == str(target) and len(manifest["target"]["weights"]) == 64
    before = contents(out)
    assert main(command) == 0
    assert "shard" not in capsys.readouterr().err and contents(out) == before
    assert main([*command, "--seed", "5"]) == 1
    assert "settings.seed is 0, asked for is 5" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--part", "3/2"], "--part: has to be K/N with K in 1..N, as in 2/4, got '3/2'"),
        (["--part", "3"], "got '3'"),
        (["--features", "1,x"], "--features: has to be numbers of layers, as in 1,8,14, got '1,x'"),
        (["--samples", "0"], "`samples` has to be 1 or more, got 0"),
    ],
)
def test_options_that_cannot_be_meant_are_refused_at_once(
    option: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the target is loaded; "invalid literal for int()" helps nobody."""
    with pytest.raises(SystemExit) as end:
        main(["--out", "never", *option])
    assert end.value.code == 2 and message in capsys.readouterr().err


def test_a_prompt_that_is_too_long_is_left_out_and_counted(
    tmp_path: Path, tokenizer: TokenizerWrapper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One long text must not make room for itself in every row; the rest is answered and can be continued."""
    monkeypatch.setattr("dflash_mlx.training.generate.LONGEST_PROMPT", 40)
    prompts = [Prompt("say " + "a" * (10 * n), topic=f"{n}") for n in range(8)]
    lines: list[str] = []
    settings = Settings(samples=1, batch=3, max_tokens=3)
    for _ in range(2):
        dataset = run(tmp_path, tokenizer, settings, prompts=prompts, tell=lines.append)
        assert max(len(shard.sequence(0)) for shard in dataset.shards()) <= 43
        assert sum(len(shard) for shard in dataset.shards()) == 2
    assert lines[0].startswith("6 samples left out")


# --- The same data set elsewhere ---

IDENTITY = {"name": "here/target", "dtype": "float32", "weights": "ab" * 32, "revision": None}


def manifest(**target: Any) -> dict[str, Any]:
    prompts = {"source": "prompts.jsonl", "count": 3, "sha256": "cd" * 32}
    return {"target": IDENTITY | target, "vocabulary": 258, "tokenizer_sha256": "ef" * 32, "prompts": prompts}


def test_a_data_set_is_continued_where_target_and_prompts_lie_elsewhere(tmp_path: Path) -> None:
    """Copied to another machine it would otherwise have to be made again; its own manifest stays."""
    Dataset.create_or_resume(tmp_path, manifest())
    before = contents(tmp_path)
    moved = manifest(name="/elsewhere/copy", revision="main")
    moved["prompts"] |= {"source": "/elsewhere/prompts.jsonl"}
    assert Dataset.create_or_resume(tmp_path, moved).manifest["target"]["name"] == "here/target"
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (manifest(weights="ff" * 32), "target.weights"),
        (manifest(dtype="bfloat16"), "target.dtype"),
        (manifest() | {"tokenizer_sha256": "00"}, "tokenizer_sha256"),
        (manifest() | {"prompts": {"source": "prompts.jsonl", "count": 3, "sha256": "00"}}, "prompts.sha256"),
        ({"target": {"name": "other"}}, "target"),
    ],
)
def test_another_target_of_the_same_name_is_not_continued(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    """A fine-tune in the same place answers otherwise."""
    Dataset.create_or_resume(tmp_path, manifest())
    with pytest.raises(DatasetError, match=f"made otherwise: its {named}"):
        Dataset.create_or_resume(tmp_path, manifest() | change)


# --- Features of any size ---


def large(rows: int, sizes: tuple[float, ...]) -> np.ndarray:
    """[rows, 8 per tap] float32, as large as `sizes`."""
    values = np.random.default_rng(3).uniform(-1, 1, size=(rows, len(sizes), 8)) * np.array(sizes)[:, None]
    return values.reshape(rows, -1).astype(np.float32)


def stored(folder: Path, features: np.ndarray, layers: tuple[int, ...]) -> Dataset:
    dataset = Dataset.create_or_resume(folder, {"vocabulary": 300})
    length = len(features) + 1
    top = np.zeros((length - 2, 2), np.uint32)
    tokens = np.arange(length, dtype=np.uint32)
    answer = Answer(Sample(Prompt("a")), 2, tokens, False, top, top.astype(np.float16), features)
    dataset.write(0, [answer], layers)
    return dataset


@pytest.mark.parametrize("whole", [True, False])
def test_features_that_overflow_float16_are_read_as_the_target_gave_them(tmp_path: Path, whole: bool) -> None:
    """Stored as infinities, a draft would learn from NaN; scaled all alike, small taps would lose their digits."""
    features = large(20, (3.0, 2.0**30, 70000.0))
    dataset = stored(tmp_path, features, (0, 1, 2))
    found = dataset.shard(0, layers=(0, 1, 2)).features if whole else dataset.feature_rows(0, (0, 1, 2), 0, 20)
    assert found is not None and found.dtype == np.float32
    np.testing.assert_allclose(found, features, rtol=2**-11, atol=1e-3)
    small = found[:, :8]
    assert np.array_equal(small, features[:, :8].astype(np.float16).astype(np.float32)), "scaled without need"


def test_features_that_are_computed_have_the_digits_of_stored_ones(tmp_path: Path) -> None:
    """Else a run with a cache of features would learn otherwise than one without; whatever else is in the shard."""
    features = large(20, (3.0, 2.0**18))
    dataset = stored(tmp_path, np.concatenate([features, features * 8]), (0, 2))
    assert np.array_equal(rounded(features, 2), dataset.feature_rows(0, (0, 2), 0, 20))
    fitting = narrow(large(20, (3.0, 9.0)))
    assert rounded(fitting, 2) is fitting


def test_features_that_fit_are_stored_as_before(tmp_path: Path) -> None:
    """float16, without scales: what older versions wrote reads the same, and what this one writes reads there."""
    features = narrow(large(20, (3.0, 65504.0)))
    assert features.dtype == np.float16 and columns_of(features, 2).keys() == {"features"}
    found = stored(tmp_path, features, (0, 2)).shard(0, layers=(0, 2)).features
    assert found is not None and found.dtype == np.float16 and np.array_equal(found, features)
    assert columns_of(features.astype(np.float32), 2).keys() == {"features"}


def test_one_broken_number_does_not_scale_the_others_away() -> None:
    """An infinity of the target itself stays one, and its tap keeps its digits."""
    features = large(20, (3.0, 5.0))
    features[4, 9] = np.inf
    assert narrow(features).dtype == np.float32
    columns = columns_of(features, 2)
    assert columns.keys() == {"features"} and np.isinf(columns["features"]).sum() == 1


def test_rows_are_read_without_the_rest_of_a_shard(tmp_path: Path, tokenizer: TokenizerWrapper) -> None:
    """Training jumps between answers; whole shards for each would be gigabytes a step."""
    dataset = run(tmp_path, tokenizer)
    number = next(n for n in dataset.numbers() if len(dataset.shard(n)) == 4)
    shard = dataset.shard(number, top=3, layers=(0, 2))
    assert shard.features is not None and shard.top_ids is not None and shard.top_logprobs is not None
    for start, stop in ((0, 5), (7, 8), (3, 3), (0, len(shard.features))):
        assert np.array_equal(dataset.feature_rows(number, (0, 2), start, stop), shard.features[start:stop])
    ids, logprobs = dataset.soft_rows(number, 3, 4, 9)
    assert np.array_equal(ids, shard.top_ids[4:9]) and np.array_equal(logprobs, shard.top_logprobs[4:9])
    for start, stop in ((0, len(shard.features) + 1), (-1, 2), (5, 4)):
        with pytest.raises(ValueError, match="`start` and `stop` have to be in"):
            dataset.feature_rows(number, (0, 2), start, stop)
    with pytest.raises(DatasetError, match=r"features-1/.* is not there\. To have it, complete"):
        dataset.feature_rows(number, (1,), 0, 1)


# --- Being stopped ---


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=["TERM", "HUP"])
def test_a_signal_ends_generation_like_an_interrupt(tmp_path: Path, number: signal.Signals) -> None:
    """As `kill`, a system that shuts down and a closed terminal send it: no half-written file is left, and it can be
    gone on with."""
    script = (
        "import os, signal, sys\n"
        "from dflash_mlx.training import columns, generate\n"
        "save = columns.save_file\n"
        "def killed(*arguments):\n"
        "    save(*arguments)\n"
        f"    os.kill(os.getpid(), {number})\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # the tests may run under nohup
        "columns.save_file = killed\n"
        "sys.exit(generate.main(sys.argv[1:]))\n"
    )
    target = target_folder(tmp_path / "model")
    (tmp_path / "prompts.txt").write_text("count to 3\ncount to 4\n")
    command = ["--target", str(target), "--prompts", str(tmp_path / "prompts.txt"), "--out", str(tmp_path / "data")]
    command += ["--max-tokens", "4", "--samples", "1"]
    done = subprocess.run([sys.executable, "-c", script, *command], capture_output=True, text=True)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (128 + number, "Interrupted.")
    assert not list((tmp_path / "data").rglob(".*")) and Dataset.open(tmp_path / "data").numbers() == []
    before = signal.getsignal(number)
    assert main(command) == 0
    assert signal.getsignal(number) == before and Dataset.open(tmp_path / "data").numbers() == [0]
