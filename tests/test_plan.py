"""`dflash-metal plan`: what is said of a pair before anything large is fetched, and whether it is so."""

from __future__ import annotations

import gc
import json
import shlex
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest
from huggingface_hub.errors import OfflineModeIsEnabled
from mlx.utils import tree_flatten

from dflash_mlx import chips, demo, load, make_prompt_cache, stream_generate
from dflash_mlx.__main__ import main
from dflash_mlx.chips import AppleChip, apple_chip
from dflash_mlx.config import DraftConfig
from dflash_mlx.fit import DraftNeed, Settings
from dflash_mlx.hub.cache import TARGET as TARGET_FILES
from dflash_mlx.hub.repository import find
from dflash_mlx.layer_sizes import sizes_of
from dflash_mlx.machine import Machine, this_machine
from dflash_mlx.needs import StoredDraft, target_weights
from dflash_mlx.plan import plan
from dflash_mlx.planned import Asked
from dflash_mlx.regime import bytes_per_weight, reads, regime
from dflash_mlx.stored_weights import Stored, read_stored
from tests import checkpoints
from tests.conftest import DRAFT_CONFIG
from tests.fake_hub import FakeHub
from tests.families import BY_NAME, tiny
from tests.folders import draft_folder, target_folder
from tests.test_load_shells import BESIDE, PUBLISHED, published_folder

README = (Path(__file__).parent.parent / "dflash_mlx" / "README.md").read_text()
MAC = ("--chip", "M4 Pro", "--memory", "24GB")
TARGET, DRAFT = "org/Qwen3-4B-8bit", "z-lab/Qwen3-4B-DFlash-b16"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    """The target is said to have 4 GB of weights."""
    made = FakeHub(tmp_path / "cache")
    made.install(monkeypatch)
    made.add(TARGET, target_folder(tmp_path / "target"), sizes={"model.safetensors": 4 * 10**9})
    made.add(DRAFT, checkpoints.v1(tmp_path / "draft"), sizes={"model.safetensors": 10**9})
    return made


def asked(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Exit status, stdout with its spaces squeezed, stderr."""
    status = main(["plan", *words])
    out, err = capsys.readouterr()
    return status, "\n".join(" ".join(line.split()) for line in out.splitlines()), err


def found(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict]:
    status, out, _ = asked(capsys, *words, "--json")
    return status, json.loads(out)


# What is said ---------------------------------------------------------------------------------------------


def test_the_verdict_comes_first_and_nothing_large_is_fetched(hub: FakeHub, capsys) -> None:
    """The four questions before a download: is there a draft, does it run, does it fit, can it pay."""
    status, out, _ = asked(capsys, TARGET, *MAC)
    first, *rest = out.splitlines()
    assert status == 0 and first.startswith("Fits: about 5.") and "of the 17.18 GB that a model may use" in first
    assert f"Draft {DRAFT} pays above" in first and "(calculated, not measured)" in first
    text = "\n".join(rest)
    for line in (
        "target 4.00 weights",
        "draft 1.00 weights",
        "runs here yes",
        f"draft {DRAFT}, 1.00 GB to fetch",
        "why the registry lists it for qwen3-4b",
        "machine M4 Pro, 273 GB/s by its specification",
        "benchmark reports total time of mlx_lm.stream_generate divided by that of dflash",
    ):
        assert line in text, line
    assert "snapshot" not in [what for what, _ in hub.asked]


def _keys(value: object) -> set[str]:
    if isinstance(value, dict):
        return set(value).union(*(_keys(part) for part in value.values()))
    return set().union(*map(_keys, value)) if isinstance(value, list) else set()


def test_json_is_one_object_whose_keys_are_documented(hub: FakeHub, capsys) -> None:
    status, plan = found(capsys, TARGET, *MAC)
    section = README.split("## Keys of `plan --json`")[1].split("## ")[0]
    own = {name: value for name, value in plan.items() if name not in ("target", "draft")}
    assert {key for key in _keys(own) if f"`{key}`" not in section} == set()
    assert status == 0 and plan["calculated"] is True
    parts = {name: size for name, size in plan["memory"].items() if name not in ("block_buffers", "system_reserve")}
    beyond = max(0, plan["memory"]["block_buffers"] - parts["activations"])
    assert plan["needed_bytes"] == sum(parts.values()) + beyond
    assert plan["memory"]["system_reserve"] == 24 * 2**30 - plan["machine"]["usable_bytes"]


def test_what_does_not_fit_says_which_context_would(tmp_path: Path, capsys) -> None:
    folder = str(target_folder(tmp_path / "target"))
    status, plan = found(capsys, folder, "--draft", "none", "--memory", "9MB", "--context", "2000")
    longest = plan["largest_context"]
    assert status == 1 and plan["verdict"] == "too large" and 0 < longest < 2000 and longest % 256 == 0
    assert plan["line"].endswith(f"the longest context that fits is {longest:,}.")
    for context, fits in ((longest, True), (longest + 256, False)):
        status, again = found(capsys, folder, "--draft", "none", "--memory", "9MB", "--context", str(context))
        assert (status == 0) is fits and (again["needed_bytes"] <= again["machine"]["usable_bytes"]) is fits
    status, out, _ = asked(capsys, folder, "--draft", "none", "--memory", "0.5MB")
    assert status == 1 and out.startswith("Does not fit") and "no context fits, it is the weights." in out


def test_a_context_is_never_longer_than_the_model_was_made_for(tmp_path: Path, capsys) -> None:
    status, out, _ = asked(capsys, str(target_folder(tmp_path / "target")), "--memory", "64GB")
    assert status == 0 and "context up to 2,048 tokens fit (as long as the model was made for)" in out
    assert "No draft is known, so decoding is plain." in out.splitlines()[0]


def test_a_pair_that_is_refused_is_not_said_to_fit(hub: FakeHub, tmp_path: Path, capsys) -> None:
    hub.add("org/other", checkpoints.v1(tmp_path / "other", hidden_size=128))
    status, out, _ = asked(capsys, TARGET, "--draft", "org/other", *MAC)
    assert status == 1 and out.startswith("Cannot be loaded here: The draft org/other was made for another target")
    hub.down = True
    status, plan = found(capsys, "moonshotai/Kimi-K2.5", *MAC)
    assert status == 1 and plan["verdict"] == "unsupported" and "multi-head latent attention" in plan["line"]


def test_without_a_network_it_is_not_known_rather_than_not_supported(hub: FakeHub, capsys) -> None:
    hub.down = True
    status, plan = found(capsys, TARGET, *MAC)
    assert status == 1 and plan["verdict"] == "unknown" and plan["memory"] is plan["largest_context"] is None
    assert plan["line"].startswith("Not known: There is no folder") and plan["draft"]["name"] == DRAFT


def wide_heads(folder: Path, key: str = "head_dim") -> None:
    """64 wide, as many models have them, and not 16: nothing but the config is read for it."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {key: 64}))


def test_quantising_makes_the_parts_it_is_about_smaller(hub: FakeHub, tmp_path: Path, capsys) -> None:
    wide_heads(tmp_path / "target")
    plain = found(capsys, TARGET, *MAC, "--context", "8192")[1]["memory"]
    keys = found(capsys, TARGET, *MAC, "--context", "8192", "--kv-bits", "4")[1]["memory"]
    draft = found(capsys, TARGET, *MAC, "--context", "8192", "--draft-bits", "4")[1]["memory"]
    assert keys["keys_values"] < plain["keys_values"] and draft["draft"] < 0.3 * plain["draft"]
    assert "no keys are quantised at this context" in asked(capsys, TARGET, *MAC, "--kv-bits", "4")[1]
    assert keys["draft"] == plain["draft"] and draft["keys_values"] == plain["keys_values"]


def test_a_group_of_keys_that_does_not_divide_the_heads_is_refused_as_generation_refuses_it(
    tmp_path: Path, capsys
) -> None:
    """It was planned as if it worked, and generation refused it after the download."""
    folder = target_folder(tmp_path / "target", "qwen3")
    wide_heads(folder)
    words = ["plan", str(folder), "--draft", "none", "--memory", "64GB", "--kv-group-size", "128"]
    assert main(words) == 0, "nothing is quantised"
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        main([*words, "--kv-bits", "4"])
    said = " ".join(capsys.readouterr().err.split())
    assert (
        caught.value.code == 2 and "`kv_group_size` has to divide the width of the target's heads, 64, got 128" in said
    )
    assert "Choose 32 or 64, or leave `kv_bits` out." in said
    assert main([*words[:-1], "32", "--kv-bits", "4"]) == 0


def test_heads_that_no_group_divides_are_said_to_be_so(tmp_path: Path, capsys) -> None:
    """Else each of the three is tried in turn."""
    with pytest.raises(SystemExit):
        main(["plan", str(target_folder(tmp_path / "target")), "--draft", "none", "--kv-bits", "8"])
    assert "16, got 64" in (said := capsys.readouterr().err)
    assert "No group of 32, 64, 128 does, or leave" not in said and "No group of 32, 64, 128 does: leave" in said


@pytest.mark.parametrize(("name", "key"), [("qwen3_5", "head_dim"), ("gemma4_text", "global_head_dim")])
def test_only_heads_whose_keys_are_quantised_have_to_be_divided(tmp_path: Path, name: str, key: str, capsys) -> None:
    """Recurrent states, and windows with heads of 16 values, stay as they are, so their sizes refuse nothing."""
    folder = target_folder(tmp_path / "target", name)
    wide_heads(folder, key)
    assert main(["plan", str(folder), "--draft", "none", "--memory", "64GB", "--kv-bits", "8"]) == 0


def test_the_command_of_the_benchmark_can_be_pasted(tmp_path: Path, capsys) -> None:
    """A folder with a space would be two arguments."""
    folder = str(target_folder(tmp_path / "my models" / "tiny"))
    _, plan = found(capsys, folder, "--draft", "none")
    assert shlex.split(plan["benchmark"]["command"]) == ["dflash-metal", "bench", "--model", folder, "--draft", "none"]


def test_the_benchmark_is_of_the_revision_that_was_planned(hub: FakeHub, capsys) -> None:
    """Another revision can be another model."""
    _, plan = found(capsys, TARGET, *MAC, "--revision", "main")
    assert plan["benchmark"]["command"].startswith(f"dflash-metal bench --model {TARGET} --revision main")


def test_wrong_usage_ends_with_status_2_and_says_what_is_legal(tmp_path: Path, capsys) -> None:
    target, draft = str(target_folder(tmp_path / "target")), str(draft_folder(tmp_path / "draft"))
    for words, text in (
        (("--memory", "lots"), "has to be a size such as 64GB, got 'lots'"),
        (("--chip", "M9", "--memory", "64GB"), "--chip has to be one of M1, M1 Pro"),
        (("--context", "0"), "has to be an integer of 1 or more, got '0'"),
        (("--draft", draft, "--block-size", "17"), "`block_size` has to be in 2..16"),
        (("--draft", "none", "--draft-revision", "main"), "`draft_revision` is not honoured without a draft"),
    ):
        with pytest.raises(SystemExit) as caught:
            main(["plan", target, *words])
        assert caught.value.code == 2 and text in capsys.readouterr().err
    if not this_machine().metal:
        with pytest.raises(SystemExit, match="2"):
            main(["plan", target, "--chip", "M4"])
        assert "--chip needs --memory" in capsys.readouterr().err


def test_on_a_cpu_nothing_is_said_of_speed(tmp_path: Path, capsys) -> None:
    """Bytes do not bound it there: a cycle of the demo costs 1.7 plain steps, not 1.1."""
    target, draft = str(target_folder(tmp_path / "target")), str(draft_folder(tmp_path / "draft"))
    asking = Asked(target, Machine.other(2**34), draft=draft)
    made = plan(asking)
    assert made["regime"].keys() == {"reason"} and "arithmetic, not memory" in made["regime"]["reason"]
    assert made["draft_bits"]["choose"] is None and made["verdict"] == "fits"


# What it costs --------------------------------------------------------------------------------------------

_SIZES = sizes_of(BY_NAME["llama"].config | {"hidden_size": 1000, "vocab_size": 10_000, "num_attention_heads": 10})
_DRAFT = replace(DraftConfig.from_dict(DRAFT_CONFIG), block_size=8)


def test_the_cost_of_a_cycle_is_the_bytes_that_it_reads() -> None:
    """By hand: 100 MB of weights, 20 MB of them an embedding that is not read; the head's 20 MB are read by both."""
    assert _SIZES is not None
    settings = Settings(1024, 2)
    kept, context = settings.kept(_SIZES, 1024, 1), DraftNeed(_DRAFT, 0).context(1024, 2)
    chip = AppleChip("M4 Pro", 273, 16)
    made = regime(_SIZES, 10**8, {}, DraftNeed(_DRAFT, 10**7), settings, chip)
    assert made.step_bytes == made.verify_bytes == 80_000_000 + kept
    assert made.draft_bytes == 10**7 + 20_000_000 + context
    assert made.low == made.high == (made.draft_bytes + made.verify_bytes) / made.step_bytes
    assert made.best == 8 / made.low and made.plain_tps == 273e9 / made.step_bytes
    tied = regime(replace(_SIZES, tied=True), 10**8, {}, DraftNeed(_DRAFT, 10**7), settings, chip)
    assert tied.step_bytes == made.step_bytes + 20_000_000
    few = regime(_SIZES, 10**8, {}, DraftNeed(_DRAFT, 10**7, listed=5_000), settings, chip)
    assert few.draft_bytes == made.draft_bytes - 10_000_000


def test_a_block_wakes_more_experts_than_a_token() -> None:
    """Why a mixture of experts gains least: eight tokens with 2 of 64 each want up to 16."""
    assert _SIZES is not None
    sizes = replace(_SIZES, mlp=replace(_SIZES.mlp, dense=0, experts=2, expert=10, held=64, layers=4), tied=True)
    experts = 4 * 64 * 3 * 1000 * 10 * 2  # bytes
    made = regime(sizes, experts, {}, DraftNeed(_DRAFT, 0), Settings(1, 2), None)
    beside = Settings(1, 2).kept(sizes, 1, 1)
    assert made.step_bytes - beside == pytest.approx(experts * 2 / 64)
    assert made.verify_bytes - beside == pytest.approx(experts * (1 - (62 / 64) ** 8), rel=1e-6)
    assert made.low > 6


@pytest.mark.parametrize(("name", "layers"), [("qwen3_moe", 3), ("lfm2_moe", 3), ("gpt_oss", 4), ("nemotron_h-moe", 2)])
def test_layers_without_experts_are_not_taken_for_some_that_have_them(name: str, layers: int) -> None:
    sizes = sizes_of(BY_NAME[name].config)
    assert sizes is not None and sizes.mlp.layers == layers and sizes.mlp.held == 4
    if name != "nemotron_h-moe":  # whose experts are two matrices
        held = [
            array for path, array in tree_flatten(tiny(name).parameters()) if "experts" in path or "switch_mlp" in path
        ]
        weights = sum(array.size for array in held if array.ndim == 3)
        assert sizes.mlp.layers * sizes.mlp.held * 3 * sizes.hidden * sizes.mlp.expert == weights


@pytest.mark.parametrize(
    ("chip", "rows", "packed", "times"),
    [("M1 Max", 8, True, 8), ("M2", 3, True, 3), ("M3", 5, True, 1), ("M4", 6, True, 2), ("M5", 16, True, 4)]
    + [("M1 Max", 16, False, 1)],
)
def test_older_chips_read_packed_weights_once_for_every_row(chip: str, rows: int, packed: bool, times: int) -> None:
    """Where others measured a loss with 4-bit targets."""
    assert reads(rows, packed, apple_chip(chip, 2**35)) == times
    assert reads(rows, packed, None) == (-(-rows // 5) if packed else 1)


def test_a_weight_is_counted_with_its_scale() -> None:
    assert bytes_per_weight({}, 2) == (2.0, False)
    assert bytes_per_weight({"quantization": {"bits": 4, "group_size": 64}}, 2) == (0.5625, True)


def test_draft_bits_are_chosen_to_fit_or_where_they_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft of a fifth of its target's bytes is worth packing, one of a hundredth is not."""
    folder, small = str(target_folder(tmp_path / "target")), str(draft_folder(tmp_path / "draft"))

    def chosen(parameters: int, target: int, memory: int = 2**36) -> dict:
        stored = StoredDraft(DraftConfig.from_dict(DRAFT_CONFIG), Stored(2 * parameters, parameters, 2), 0)
        monkeypatch.setattr("dflash_mlx.planned.stored_draft", lambda source: stored)
        monkeypatch.setattr("dflash_mlx.planned.target_weights", lambda *_: (target, 2))
        chip = AppleChip("M4", 120, 16)
        return plan(Asked(folder, Machine.mac(memory), chip, draft=small, context=256))["draft_bits"]

    assert chosen(10**9, 10 * 10**9)["choose"] == 4 and "a cycle then reads" in chosen(10**9, 10 * 10**9)["reason"]
    assert chosen(10**7, 10**10)["choose"] is None
    tight = chosen(10**9, 10**10, int(11.2e9 * 3 / 2))
    assert tight["choose"] == 8 and tight["reason"] == "so that it fits"
    assert [each["bits"] for each in tight["choices"]] == [None, 8, 4]
    assert chosen(10**9, 10**10, 10**10)["reason"] == "it fits in no bits"


def test_the_bandwidth_is_that_of_the_chip_with_this_memory() -> None:
    """An M4 Max is sold in two widths, told apart by what memory they come with."""
    found = {(name, size): apple_chip(name, size * 2**30) for name, size in (("Apple M4 Max", 36), ("m4 max", 64))}
    assert [chip and chip.bandwidth for chip in found.values()] == [410, 546]
    assert apple_chip("M1", 2**33) == AppleChip("M1", 68, 13) and apple_chip("M3 Ultra", 2**39) is not None
    assert apple_chip("M4 Ultra", 2**39) is apple_chip("Intel(R) Xeon(R)", 2**35) is apple_chip("", 1) is None
    assert {chip.name for name in chips.NAMES if (chip := apple_chip(name, 2**36))} == set(chips.NAMES)


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_a_model_is_loaded_without_does_not_count(tmp_path: Path, name: str) -> None:
    """A tower for pictures may be a gigabyte, for which a model would be said not to fit; it is never in memory."""
    folder = published_folder(tmp_path / "model", name, BESIDE[name])
    config = json.loads((folder / "config.json").read_text())
    model, _ = load(str(folder), blas="off")
    held = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    stored = read_stored(folder, config, TARGET_FILES.weights)
    assert stored.held == held == target_weights(find(str(folder), TARGET_FILES), config, this_machine())[0]
    assert stored.bytes - held == sum(4 * (8 if "norm" in each else 64) for each in BESIDE[name])


def test_a_tower_that_is_loaded_counts(tmp_path: Path) -> None:
    """mlx_lm's muse_spark sees; its name and that of muse_glimmer, which does not, are alike."""
    names = ["model.vision_tower.blocks.0.weight", "model.vision_projection.weight"]
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {name: mx.zeros((8, 8)) for name in names})
    held = {kind: read_stored(tmp_path, {"model_type": kind}).held for kind in ("muse_spark", "muse_glimmer")}
    assert held == {"muse_spark": 2 * 64 * 4, "muse_glimmer": 0}


@pytest.mark.parametrize("files", [1, 2])
def test_nor_does_it_count_before_the_download(tmp_path: Path, hub: FakeHub, files: int, capsys) -> None:
    """Heads of files say what is in them; of several only those are asked for that have some of it."""
    folder = published_folder(tmp_path / "model", "gemma4", BESIDE["gemma4"], vision_config={})
    _, here = found(capsys, str(folder), "--draft", "none", *MAC)
    tensors = mx.load(str(folder / "model.safetensors"))
    total = sum(array.nbytes for array in tensors.values())
    sizes = {"model.safetensors": total}
    if files == 2:
        (folder / "model.safetensors").unlink()
        parts = {False: {}, True: {}}
        for key, array in tensors.items():
            parts["vision" in key or "audio" in key][key] = array
        names = {of: f"model-{1 + of}-of-2.safetensors" for of in parts}
        for of, some in parts.items():
            mx.save_safetensors(str(folder / names[of]), some)
        index = {"weight_map": {key: names[of] for of, some in parts.items() for key in some}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        sizes = {names[of]: sum(array.nbytes for array in some.values()) for of, some in parts.items()}
    hub.add("org/seeing", folder, sizes=sizes)
    _, there = found(capsys, "org/seeing", "--draft", "none", *MAC)
    assert there["memory"]["target"] == here["memory"]["target"] == total - 3 * 64 * 4
    assert [what for what, name in hub.asked if name == "org/seeing"].count("head") == 1


def test_where_heads_of_files_cannot_be_had_everything_counts(
    tmp_path: Path, hub: FakeHub, monkeypatch, capsys
) -> None:
    """Too much is said to be needed rather than nothing."""
    folder = published_folder(tmp_path / "model", "gemma4", BESIDE["gemma4"], vision_config={})
    hub.add("org/seeing", folder, sizes={"model.safetensors": 10**9})

    def fail(*args: object, **rest: object) -> None:
        raise OfflineModeIsEnabled("no network in this test")

    monkeypatch.setattr("huggingface_hub.parse_safetensors_file_metadata", fail)
    assert found(capsys, "org/seeing", "--draft", "none", *MAC)[1]["memory"]["target"] == 10**9


def test_a_model_that_is_only_text_is_asked_for_no_heads(hub: FakeHub, capsys) -> None:
    """Each is a request, of which a large model would take a hundred."""
    found(capsys, TARGET, "--draft", "none", *MAC)
    assert "head" not in [what for what, name in hub.asked if name == TARGET]


# Whether it is so -----------------------------------------------------------------------------------------


@pytest.mark.skipif(demo.converted_folder() is None, reason="the demo target is not in the cache")
@pytest.mark.skipif(this_machine().metal, reason="the formula was never held to Metal")
def test_the_demo_needs_what_its_plan_says() -> None:
    """What is beside its weights within a tenth, all of it within a hundredth."""
    gc.collect()
    mx.clear_cache()
    others = mx.get_active_memory()  # of tests that ran in this process before
    model, tokenizer, draft = load("demo", draft="auto")
    ids = [(7919 * index) % 40_000 + 100 for index in range(300)]

    def generate(length: int) -> None:
        cache = make_prompt_cache(model, draft)
        for _ in stream_generate(model, tokenizer, ids[:length], 4, draft, prompt_cache=cache, prefill_step_size=256):
            pass

    generate(8)
    gc.collect()
    mx.clear_cache()
    held = mx.get_active_memory()
    foretold = plan(Asked("demo", this_machine(), context=304))
    measured = 0
    for _ in range(3):  # on a busy machine arrays may be given back earlier: the highest counts
        mx.reset_peak_memory()
        generate(300)
        measured = max(measured, mx.get_peak_memory())
        if foretold["needed_bytes"] <= 1.01 * (measured - others):
            break
    weights = foretold["memory"]["target"] + foretold["memory"]["draft"]
    assert foretold["needed_bytes"] == pytest.approx(measured - others, rel=0.01)
    assert foretold["needed_bytes"] - weights == pytest.approx(measured - held, rel=0.1)
