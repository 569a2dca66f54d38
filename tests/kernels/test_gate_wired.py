"""How a choice of kernels reaches a request: arguments, the environment of the commands, load's races, notes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from dflash_mlx import load, stream_generate
from dflash_mlx.cli import generate_main, generate_parser, load_options
from dflash_mlx.doctor_command import doctor_parser
from dflash_mlx.kernels import gate as gate_file
from dflash_mlx.kernels import view
from dflash_mlx.kernels.chip import NO_METAL, Chip
from dflash_mlx.kernels.choice import STOCK, references
from dflash_mlx.kernels.gate import Gate
from dflash_mlx.kernels.operation import Case
from dflash_mlx.kernels.race import Verdict
from dflash_mlx.kernels.race_file import RaceFile
from dflash_mlx.kernels.race_watch import Raced
from dflash_mlx.options import Options
from dflash_mlx.request import plan
from tests.conftest import tiny_draft
from tests.families import tiny
from tests.folders import draft_folder, target_folder
from tests.generating import DRAFT, PROMPT, stream
from tests.kernels.fake_operation import CASE, Double, mark


@pytest.fixture
def no_metal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nowhere = Gate(Chip("Xeon", "x86_64", "Linux 6", closed=NO_METAL), RaceFile(tmp_path / "kernels.json"))
    monkeypatch.setattr(gate_file, "this_gate", lambda: nowhere)


def _tokens(tokenizer, **kwargs) -> tuple[list[int], tuple[str, ...]]:  # type: ignore[no-untyped-def]
    responses = list(stream("llama", tokenizer, max_tokens=24, **kwargs))
    return [response.token for response in responses], responses[-1].notes


def test_without_metal_every_wish_is_todays_path(tokenizer, no_metal: None) -> None:  # type: ignore[no-untyped-def]
    """The same modules of mlx_lm's, and not a word about kernels unless somebody asked for one by name."""
    for wish in ("auto", "off", "sdpa_rows"):
        request = plan(tiny("llama"), DRAFT, Options(mode="dflash", kernels=wish))
        assert request.target.embedding is tiny("llama").model.embed_tokens and not request.kernels.wired
        assert [note for note in request.notes if "kernel" in note] == (
            ["no kernel is used: no Metal on this machine"] if wish == "sdpa_rows" else []
        )


def test_who_asks_for_a_kernel_and_gets_plain_decoding_is_told() -> None:
    """Kernels run blocks of drafts: with `--draft none` a named one would stay away without a word."""
    told = "no kernel is used: they run blocks of drafts, and decoding is plain"
    for draft in (DRAFT, None):
        for wish, notes in (("accept", [told]), ("auto", []), ("off", [])):
            request = plan(tiny("llama"), draft, Options(mode="plain", kernels=wish))
            assert [note for note in request.notes if "kernel" in note] == notes


def test_kernels_change_nothing_but_who_computes(tokenizer) -> None:  # type: ignore[no-untyped-def]
    """With references in their place the tokens are those of plain decoding."""
    plain, _ = _tokens(tokenizer, mode="plain", kernels=references())
    wired, notes = _tokens(tokenizer, kernels=references())
    assert plain == wired == _tokens(tokenizer)[0] and len(set(plain)) > 8
    assert not [note for note in notes if "kernel" in note]


def test_plain_decoding_is_mlx_lms_whatever_was_asked(tokenizer) -> None:  # type: ignore[no-untyped-def]
    """It is what drafts are measured against: its short prompts may not go through kernels either."""
    request = plan(tiny("llama"), DRAFT, Options(mode="plain", kernels=references()))
    assert request.kernels is STOCK and request.target.embedding is tiny("llama").model.embed_tokens
    drafts = plan(tiny("llama"), DRAFT, Options(mode="dflash", kernels=references()))
    assert drafts.target.embedding is not tiny("llama").model.embed_tokens and drafts.target.model is tiny("llama")


@pytest.mark.parametrize("wish", ["fast", "", 3])
def test_a_wrong_wish_is_refused_by_name_before_anything_runs(wish: object, tokenizer, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match="`kernels` has to be 'auto', 'off', or one or more of accept"):
        stream_generate(tiny("llama"), tokenizer, PROMPT, kernels=wish)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`kernels` has to be"):
        load(str(target_folder(tmp_path / "t")), kernels=wish, blas="off")


class Racing:
    """This machine is an M4 on which a kernel of the target's MLPs loses, and remembers what was raced."""

    def __init__(self, path: Path) -> None:
        self.cases: list[Case] = []
        self.gate = Double().gate(path, race=self._race)

    def _race(self, cases: Sequence[Case]) -> Iterator[Raced]:
        self.cases += cases
        yield from (Raced(case, Verdict("1.02 times as fast as stock at 8 rows, below 1.15")) for case in cases)


@pytest.fixture
def racing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Racing:
    found = Racing(tmp_path / "cache" / "kernels.json")
    monkeypatch.setattr(gate_file, "this_gate", lambda: found.gate)
    monkeypatch.setattr(view, "SWAPS", (mark,))
    return found


@pytest.fixture
def pair(tmp_path: Path) -> tuple[str, str]:
    return str(target_folder(tmp_path / "tiny")), str(draft_folder(tmp_path / "tiny-draft"))


def test_load_races_what_the_pair_needs_and_a_request_only_looks_it_up(
    pair: tuple[str, str], racing: Racing, tokenizer
) -> None:  # type: ignore[no-untyped-def]
    """Seconds of racing belong where progress is shown, not before the first token."""
    told: list[str] = []
    models = load(pair[0], draft=pair[1], blas="off", progress=lambda text, share: told.append(text))
    assert racing.cases == [CASE] and "Racing kernels on this machine, once: double" in told
    model, tokenizer, draft = models
    responses = stream_generate(model, tokenizer, "hello", draft_model=draft, mode="dflash", max_tokens=4)
    assert "stock: double (1.02 times as fast as stock at 8 rows, below 1.15)" in list(responses)[-1].notes
    load(pair[0], draft=pair[1], blas="off")
    assert racing.cases == [CASE], "a second load raced again"


def test_a_machine_on_which_every_race_was_lost_runs_mlx_lms_modules(
    racing: Racing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asking closed kernels cost 52 us per layer of a draft and cycle, for nothing; and the note still says why."""
    model, options = tiny("llama"), Options(mode="dflash")
    walks = list[object]()
    monkeypatch.setattr(view, "_below", lambda model: walks.append(model) or iter(()))
    for verdict, wired in ((Verdict("1.02 times as fast"), False), (Verdict(None), True)):
        racing.gate.held[CASE] = verdict
        walks.clear()
        request = plan(model, DRAFT, options)
        assert walks == [model], "the model is walked once"
        assert request.kernels.wired == wired and (request.kernels is STOCK) != wired
        assert (request.target.embedding is model.model.embed_tokens) != wired and request.target.model is model
        note = "kernels: double" if wired else "stock: double (1.02 times as fast)"
        assert note in request.notes


@pytest.mark.parametrize("arguments", [dict(kernels="off"), dict(draft=None), dict(kernels="accept")])
def test_load_races_nothing_that_will_not_run(arguments: dict, pair: tuple[str, str], racing: Racing) -> None:
    """Off, plain decoding, or another kernel than the modules'."""
    load(pair[0], **{"draft": pair[1], "blas": "off", **arguments})
    assert racing.cases == []


def test_a_model_that_was_not_raced_is_served_by_stock_and_says_how_to_change_that(racing: Racing, tokenizer) -> None:  # type: ignore[no-untyped-def]
    """Loaded with mlx_lm, say."""
    tokens, notes = _tokens(tokenizer, draft_model=tiny_draft())
    assert racing.cases == [] and tokens == _tokens(tokenizer, kernels="off")[0]
    assert any("not raced here yet, which dflash_mlx.load does" in note for note in notes)


def test_the_commands_read_the_environment_and_the_library_does_not(
    monkeypatch: pytest.MonkeyPatch, pair: tuple[str, str], capsys: pytest.CaptureFixture[str], racing: Racing
) -> None:
    assert generate_parser().parse_args([]).kernels == "auto"
    monkeypatch.setenv("DFLASH_KERNELS", "off")
    for parser in (generate_parser(), doctor_parser()):
        assert parser.parse_args([]).kernels == "off"
        assert parser.parse_args(["--kernels", "accept"]).kernels == "accept"
    assert load_options(generate_parser().parse_args([]))["kernels"] == "off"
    for empty in (["--kernels", ""], []):
        monkeypatch.setenv("DFLASH_KERNELS", "off" if empty else "")
        assert generate_parser().parse_args(empty).kernels == doctor_parser().parse_args(empty).kernels == "auto"
    monkeypatch.setenv("DFLASH_KERNELS", "off")
    command = ["--model", pair[0], "--draft", pair[1], "--blas", "off", "--mode", "dflash", "--prompt", "hi", "--json"]
    assert generate_main([*command, "--max-tokens", "3"]) == 0
    assert racing.cases == [] and "stock" not in capsys.readouterr().out
    assert generate_main([*command, "--max-tokens", "3", "--kernels", "auto"]) == 0
    assert racing.cases and any("stock: " in note for note in json.loads(capsys.readouterr().out)["notes"])
    racing.cases.clear()
    racing.gate.held.clear()
    racing.gate.file.path.unlink()
    load(pair[0], draft=pair[1], blas="off")
    assert racing.cases, "the library read DFLASH_KERNELS"


def test_a_wrong_name_on_the_command_line_ends_with_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DFLASH_KERNELS", "qmm")
    with pytest.raises(SystemExit, match="2"):
        generate_main(["--prompt", "hi"])
    assert "--kernels or DFLASH_KERNELS has to be 'auto', 'off', or one or more of accept" in capsys.readouterr().err
