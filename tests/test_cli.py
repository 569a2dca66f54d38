"""The command line: text on stdout, statistics on stderr, one JSON object, exit statuses, no traceback."""

from __future__ import annotations

import io
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_mlx import load, stream_generate
from dflash_mlx.__main__ import main
from dflash_mlx.accept import Matching
from dflash_mlx.cli import INTERRUPTED, generate_main, printable
from dflash_mlx.divergence import Divergence
from dflash_mlx.errors import DraftFault
from dflash_mlx.proposal import Verdict
from tests.folders import draft_folder, target_folder

ROOT = Path(__file__).parent.parent
KEYS = {
    *("text", "tokens", "finish_reason", "mode", "notes", "prompt_tokens", "generation_tokens"),
    *("prefill_s", "ttft_s", "decode_s", "total_s", "prompt_tps", "decode_tps", "request_tps"),
    *("cycles", "drafted", "accepted", "mean_acceptance_length", "draft_acceptance_rate"),
    *("acceptance_histogram", "block_size", "blocks", "host_syncs", "peak_memory_gb", "check", "rechecked"),
    *("reasoning", "answer", "tool_calls", "unfinished", "cached_tokens", "recomputed_tokens", "plain_steps"),
}
CHECK_KEYS = {"kind", "index", "gap", "rounding", "expected_token", "got_token", "explanation"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("models")
    target, draft = target_folder(root / "tiny"), draft_folder(root / "tiny-draft")
    return ["--model", str(target), "--draft", str(draft), "--blas", "off", "--mode", "dflash"]


def test_text_to_stdout_and_statistics_to_stderr(models: list[str], capsys) -> None:
    assert generate_main([*models, "--prompt", "hello", "--max-tokens", "20"]) == 0
    out, err = capsys.readouterr()
    assert generate_main([*models, "--prompt", "hello", "--max-tokens", "20", "--mode", "plain"]) == 0
    plain, plain_err = capsys.readouterr()
    assert out == plain and out.endswith("\n")
    assert "generation only" in err and "prefill-inclusive" in err and "dflash: block 16" in err
    assert "tokens verified by cycles: " in err, "the last ones have no room for 16"
    assert "plain decoding" in plain_err


def test_json_is_exactly_one_object_with_the_documented_keys(models: list[str], capsys) -> None:
    assert generate_main([*models, "--prompt", "hello", "--max-tokens", "20", "--json", "--block-size", "4"]) == 0
    out, _ = capsys.readouterr()
    result = json.loads(out)
    assert result.keys() >= KEYS
    keys = (ROOT / "dflash_mlx" / "README.md").read_text().split("## Keys of")[1].split("## Words")[0]
    assert {key for key in result if f"`{key}`" not in keys} == set(), "every key is explained"
    assert len(result["tokens"]) == result["generation_tokens"] == 20
    assert result["finish_reason"] == "length" and result["mode"] == "dflash" and result["block_size"] == 4
    assert result["accepted"] + result["cycles"] + 1 == 20
    assert result["host_syncs"] == result["cycles"]
    assert sum(int(k) * n for k, n in result["acceptance_histogram"].items()) == result["accepted"]
    assert sum((int(size) - 1) * n for size, n in result["blocks"].items()) == result["drafted"]
    assert result["request_tps"] <= result["decode_tps"]
    assert result["total_s"] >= result["ttft_s"] >= result["prefill_s"] > 0
    assert abs(result["total_s"] - result["prefill_s"] - result["decode_s"]) < 0.01
    assert result["check"] is None


def test_json_splits_reasoning_answer_and_tool_calls() -> None:
    """A script need not know the markers."""
    from types import SimpleNamespace

    from dflash_mlx.report import Answer
    from dflash_mlx.segments import Markers, Segments

    markers = Markers("<think>", "</think>", "<tool_call>", "</tool_call>")
    answer = Answer(Segments(markers))
    for piece in ("<thi", "nk>hm</th", "ink>So: <tool_", "call>{}</tool_call> done"):
        answer.add(SimpleNamespace(text=piece, token=1))
    answer.finish("stop")
    assert answer.of("reasoning") == ["hm"] and answer.of("tool_call") == ["{}"]
    assert "".join(answer.of("answer")) == "So:  done" and answer.tokens == [1] * 4


def test_exact_and_quantised_keys_reach_the_request(models: list[str], capsys) -> None:
    assert generate_main([*models, "--prompt", "hello", "--max-tokens", "20", "--exact", "--check", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["check"]["kind"] == "identical"
    for extra, message in (
        (["--exact", "--temp", "1"], "`exact` is for greedy decoding"),
        (["--kv-bits", "7"], "`kv_bits` has to be one of"),
        (["--kv-bits", "8"], "`kv_bits` 8 in groups of 64 is not honoured for this llama target"),
    ):
        assert generate_main([*models, "--prompt", "hello", *extra]) == 1
        assert message in capsys.readouterr().err


def test_a_prompt_cache_file_saves_the_common_beginning(models: list[str], capsys, tmp_path) -> None:
    """Two questions on one long text: the text is read once, and the answer is that of a cold run."""
    path, text = tmp_path / "text", "a long text. " * 20  # the suffix is added
    run = [*models, "--raw", "--max-tokens", "12", "--json"]
    first = json.loads(_out(capsys, [*run, "--prompt", text + "one?", "--prompt-cache", str(path)]))
    warm = json.loads(_out(capsys, [*run, "--prompt", text + "two?", "--prompt-cache", str(path)]))
    cold = json.loads(_out(capsys, [*run, "--prompt", text + "two?"]))
    assert first["cached_tokens"] == 0 and warm["cached_tokens"] == len(text)
    assert warm["tokens"] == cold["tokens"] and warm["acceptance_histogram"] == cold["acceptance_histogram"]
    path = path.with_suffix(".safetensors")
    path.write_bytes(path.read_bytes()[:1000])
    assert generate_main([*run, "--prompt", "x", "--prompt-cache", str(path)]) == 1
    assert "cannot be used as a prompt cache" in capsys.readouterr().err
    assert generate_main([*run, "--prompt", "x", "--prompt-cache", str(path), "--check"]) == 1
    assert "Leave one of the two out" in capsys.readouterr().err


def _out(capsys, argv: list[str]) -> str:
    assert generate_main(argv) == 0
    return capsys.readouterr().out


def test_unknown_is_null(models: list[str], capsys) -> None:
    generate_main([*models, "--prompt", "x", "--max-tokens", "1", "--json"])
    result = json.loads(capsys.readouterr().out)
    for key in ("decode_tps", "request_tps", "mean_acceptance_length", "draft_acceptance_rate"):
        assert result[key] is None
    assert result["cycles"] == 0 and result["acceptance_histogram"] == {}


def test_a_piped_prompt_is_read(models: list[str], capsys, monkeypatch) -> None:
    generate_main([*models, "--prompt", "piped words", "--json", "--max-tokens", "5"])
    expected = json.loads(capsys.readouterr().out)
    for extra in ([], ["--prompt", "-"]):
        monkeypatch.setattr("sys.stdin", io.StringIO("piped words\n"))  # echo's newline is not part of it
        assert generate_main([*models, *extra, "--json", "--max-tokens", "5"]) == 0
        assert json.loads(capsys.readouterr().out)["tokens"] == expected["tokens"]


def test_the_chat_template_is_applied_unless_raw(models: list[str], capsys) -> None:
    counts = []
    for extra in ([], ["--raw"], ["--system-prompt", "Be brief."]):
        generate_main([*models, "--prompt", "hello", "--max-tokens", "1", "--json", *extra])
        counts.append(json.loads(capsys.readouterr().out)["prompt_tokens"])
    assert counts == [len("user: hello\nassistant: "), 5, len("system: Be brief.\nuser: hello\nassistant: ")]


def test_a_seed_repeats_the_text(models: list[str], capsys) -> None:
    texts = []
    for seed in ("5", "5", "6"):
        generate_main([*models, "--prompt", "hello", "--temp", "1", "--top-p", "0.9", "--seed", seed, "--json"])
        texts.append(json.loads(capsys.readouterr().out)["tokens"])
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--block-size", "99"], "`block_size` has to be in 2..16"),
        (["--max-tokens", "0"], "`max_tokens` has to be 1 or more"),
        (["--prefill-step-size", "0"], "`prefill_step_size` has to be 1 or more"),
        (["--stop", ""], "empty string"),
        (["--prompt", ""], "The prompt is empty"),
        (["--prompt", "\udcff"], "not readable text"),
        (["--temp", "-1"], "`temperature` has to be 0 or more"),
        (["--model", "./nope"], "does not exist"),
        (["--draft", "./nope"], "does not exist"),
        (["--raw", "--system-prompt", "x"], "needs a chat template"),
        (["--draft", "none", "--mode", "dflash"], "no `draft_model` was given"),
        (["--draft", "none", "--strict", "--model", "./nope"], "`--strict` forbids"),
        (["--mode", "plain", "--strict", "--model", "./nope"], "and --mode plain asks for that"),
        (["--block-size", "1", "--strict", "--model", "./nope"], "and --block-size 1 asks for that"),
        (["--draft-bits", "4", "--draft-group-size", "128"], "Groups of 128 weights fit no matrix"),
        (["--model", "./nope", "--json"], "does not exist"),
        (["--check", "--temp", "1", "--seed", "5", "--model", "./nope"], "`--check` compares tokens"),
        (["--check", "--temp", "1", "--rule", "match", "--model", "./nope"], "`--check` compares tokens"),
    ],
)
def test_an_explained_error_is_one_message_and_status_1(models, extra, message, capsys) -> None:
    assert generate_main([*models, "--prompt", "x", *extra]) == 1
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    assert [line for line in err.splitlines() if line.startswith("Error: ") and message in line]


@pytest.fixture
def alone(tmp_path: Path) -> list[str]:
    """A target for which no draft is known."""
    return ["--model", str(target_folder(tmp_path / "alone")), "--blas", "off", "--prompt", "hello"]


def test_why_there_is_no_draft_is_told_once(alone: list[str], capsys) -> None:
    """A raw warning shows a line of source, and whoever reads the JSON never sees it."""
    assert generate_main([*alone, "--max-tokens", "3", "--json"]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert result["mode"] == "plain" and result["notes"][0].startswith("No DFlash draft is known for ")
    assert generate_main([*alone, "--max-tokens", "3"]) == 0
    for said in (err, capsys.readouterr().err):
        assert said.count("No DFlash draft is known for ") == 1 == said.count(f"note: {result['notes'][0]}\n")
        assert "Warning" not in said and ".py" not in said


def test_strict_without_a_draft_is_an_error_that_says_why(alone: list[str], capsys) -> None:
    """`--strict` forbids plain decoding; without a draft there was nothing else, and the status was 0."""
    assert generate_main([*alone, "--strict"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and "note: No DFlash draft is known" in err
    assert "Error: `--strict` forbids to decode plainly instead of with a draft, and there is none for " in err


@pytest.mark.parametrize("as_json", [False, True])
def test_an_error_in_mid_text_begins_a_line_of_its_own(models, as_json: bool, capsys, monkeypatch) -> None:
    """As `--strict` raises it; with --json stdout stays empty, so that nothing is taken for the object."""

    def broken(*args, **kwargs):
        responses = stream_generate(*args, **kwargs)
        for _ in range(6):
            yield next(responses)
        raise DraftFault("The draft returned NaN.")

    monkeypatch.setattr("dflash_mlx.generate_command.stream_generate", broken)
    command = [*models, "--prompt", "hello", "--strict", *(["--json"] if as_json else [])]
    assert generate_main(command) == 1
    out, err = capsys.readouterr()
    assert err.endswith("\nError: The draft returned NaN.\n")
    assert out == "" if as_json else len(out) > 1 and out.endswith("\n")


def test_the_group_size_of_the_draft_reaches_its_weights(models, capsys, monkeypatch) -> None:
    seen = []

    def loaded(*args, **kwargs):
        seen.append(load(*args, **kwargs))
        return seen[-1]

    monkeypatch.setattr("dflash_mlx.generate_command.load", loaded)
    command = [*models, "--prompt", "hello", "--max-tokens", "3", "--draft-bits", "4"]
    assert generate_main([*command, "--draft-group-size", "32"]) == generate_main(command) == 0
    assert [draft.layers[0].mlp.up_proj.group_size for _, _, draft in seen] == [32, 64]


def test_wrong_usage_is_status_2(models: list[str], capsys, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    draft = (["--draft-bits", "3"], ["--draft-bits", "4", "--draft-group-size", "48"], ["--draft-group-size", "32"])
    window = (["--draft-window", "0"], ["--draft-window", "wide"])
    for argv in (["--max-tokens", "many"], ["--mode", "warp"], *draft, *window, models):
        with pytest.raises(SystemExit) as end:
            generate_main(argv)
        assert end.value.code == 2
    err = capsys.readouterr().err
    assert "no prompt" in err and "--draft-window: has to be an integer of 1 or more, got '0'" in err
    assert "pass --draft-bits too" in err and "--draft-bits: invalid choice: 3" in err
    assert "--draft-group-size: invalid choice: 48" in err


def test_an_interrupt_keeps_the_text_so_far(models: list[str], capsys, monkeypatch) -> None:
    from dflash_mlx.generate import stream_generate

    def interrupted(*args, **kwargs):
        responses = stream_generate(*args, **kwargs)
        for _ in range(6):
            yield next(responses)
        raise KeyboardInterrupt

    monkeypatch.setattr("dflash_mlx.generate_command.stream_generate", interrupted)
    assert generate_main([*models, "--prompt", "hello", "--json"]) == INTERRUPTED
    result = json.loads(capsys.readouterr().out)
    assert result["finish_reason"] == "interrupted" and len(result["tokens"]) == 6


CHECKED = "checked against plain decoding: "


@pytest.mark.parametrize(
    "extra",
    [[], ["--mode", "auto"], ["--temp", "1", "--top-p", "0.9", "--seed", "5", "--rule", "match"]],
    ids=["greedy", "auto", "seeded"],
)
def test_check_says_identical_only_after_a_second_decoding(models, extra, capsys, monkeypatch) -> None:
    """The plain run has the same prompt, budget and draws; on a CPU nothing may differ."""
    decoded, plain = [], stream_generate

    def counted(*args, **kwargs):
        for response in plain(*args, **kwargs):
            decoded.append((kwargs["mode"], response.token))
            yield response

    monkeypatch.setattr("dflash_mlx.divergence.stream_generate", counted)
    assert generate_main([*models, "--prompt", "hello", "--max-tokens", "40", "--check", "--json", *extra]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert result["check"].keys() == CHECK_KEYS and result["check"]["kind"] == "identical"
    assert decoded == [("plain", token) for token in result["tokens"]]
    (line,) = [line for line in err.splitlines() if line.startswith(CHECKED)]
    assert line.startswith(CHECKED + "identical (") and line.endswith(" s for the check)")


def test_check_knows_the_stop_strings_of_the_answer(models, capsys) -> None:
    """Without them plain decoding would go on where the answer ended, which is a bug's sign."""
    command = [*models, "--prompt", "hello", "--max-tokens", "40", "--json", "--check"]
    assert generate_main(command) == 0
    text = json.loads(capsys.readouterr().out)["text"]
    assert generate_main([*command, "--stop", text[15:17]]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["finish_reason"] == "stop" and len(result["tokens"]) < 40
    assert result["check"]["kind"] == "identical"


def test_check_fails_the_command_on_a_bug_and_still_prints_the_text(models, capsys, monkeypatch) -> None:
    """Scripts see the status; the text stands, since it was shown already."""
    decide = Matching.decide

    def wrong(self, proposal, logits, position, judgement=None):
        verdict = decide(self, proposal, logits, position, judgement)
        if verdict.accepted == len(proposal):
            return verdict
        kept = (*verdict.tokens[:-1], proposal.tokens[verdict.accepted].item(), verdict.tokens[-1])
        return Verdict(verdict.accepted, kept, verdict.log_probs)

    monkeypatch.setattr(Matching, "decide", wrong)  # plain decoding has no drafts to keep
    command = [*models, "--prompt", "hello", "--max-tokens", "20", "--check"]
    assert generate_main([*command, "--json"]) == 1
    out, err = capsys.readouterr()
    result = json.loads(out)
    found, text = result["check"], result["text"]
    assert len(result["tokens"]) == 20 and text and "interrupted" not in err
    assert (found["kind"], found["got_token"]) == ("bug", result["tokens"][found["index"]])
    assert found["gap"] > 0 == found["rounding"]
    assert CHECKED + f"DIFFERS at token {found['index']}. {found['explanation']}" in err and "report" in err
    assert generate_main(command) == 1
    assert capsys.readouterr().out == text + "\n"


def test_check_measures_with_the_kernels_of_the_answer(models, capsys, monkeypatch) -> None:
    """Or a near-tie that a kernel decided would fail the command as a bug, and plain text be excused by kernels."""
    measured = []

    def noted(*args, **kwargs):
        measured.append(kwargs["kernels"])
        return Divergence("identical", None, None, None, None, None, "")

    monkeypatch.setattr("dflash_mlx.divergence.compare", noted)
    for extra in (["--kernels", "accept"], ["--kernels", "accept", "--mode", "plain"], []):
        assert generate_main([*models, "--prompt", "hello", "--max-tokens", "9", "--check", "--json", *extra]) == 0
    assert measured == ["accept", "off", "auto"]


def test_a_near_tie_is_told_and_does_not_fail_the_command(models, capsys, monkeypatch) -> None:
    """Users on a GPU meet these; a script must not stop for them."""
    found = Divergence("near-tie", 7, 0.25, 0.125, 3, 4, "After 7 equal tokens so rounding decides.")
    monkeypatch.setattr("dflash_mlx.divergence.compare", lambda *args, **kwargs: found)
    assert generate_main([*models, "--prompt", "hello", "--max-tokens", "9", "--check", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["check"] == vars(found)
    assert CHECKED + "near-tie at token 7. After 7 equal tokens so rounding decides. (" in err


def test_an_interrupted_check_keeps_text_and_json(models, capsys, monkeypatch) -> None:
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("dflash_mlx.divergence.compare", interrupted)
    assert generate_main([*models, "--prompt", "hello", "--max-tokens", "9", "--check", "--json"]) == INTERRUPTED
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert len(result["tokens"]) == 9 and result["check"] is None and result["finish_reason"] == "length"
    assert "\nnot checked against plain decoding: interrupted\n" in err and "\n" + CHECKED not in err


@pytest.mark.parametrize("stdin", [None, b"\xff\xfe", b""], ids=["closed", "not-utf8", "empty"])
def test_unusable_standard_input_is_one_message(stdin: bytes | None, models: list[str]) -> None:
    command = [sys.executable, "-m", "dflash_mlx.generate", *models, *(["--prompt", "-"] if stdin is None else [])]
    shell = " ".join(shlex.quote(word) for word in command) + (" <&-" if stdin is None else "")
    done = subprocess.run(["bash", "-c", shell], input=stdin, capture_output=True)
    assert done.returncode == 1 and done.stdout == b""
    assert b"Traceback" not in done.stderr and b"Error: The prompt is" in done.stderr


def test_a_full_disk_is_one_message(models: list[str]) -> None:
    command = [sys.executable, "-m", "dflash_mlx.generate", *models, "--prompt", "hello", "--max-tokens", "5"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr and "No space left" in done.stderr


def test_control_characters_are_shown_on_a_terminal_and_kept_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    assert printable("a\x1b[2Jb\n") == "a\x1b[2Jb\n"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert printable("a\x1b[2J\tb\n\u202e") == "a\u241b[2J\tb\n\ufffd"


def test_a_closed_pipe_is_quiet(models: list[str]) -> None:
    command = [sys.executable, "-m", "dflash_mlx.generate", *models, "--prompt", "hello", "--max-tokens", "200"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    said = process.stderr.read()
    assert process.wait(timeout=120) == 0
    assert "Traceback" not in said and "BrokenPipe" not in said


def test_without_a_command_the_commands_are_listed(capsys) -> None:
    assert main([]) == 0
    out = capsys.readouterr().out
    assert "python -m dflash_mlx.chat" in out and "python -m dflash_mlx.generate" in out
    assert main(["--version"]) == 0
    assert main(["fly"]) == 2
    assert "Unknown command 'fly'" in capsys.readouterr().err


def test_the_console_script_reaches_generate(models: list[str], capsys) -> None:
    assert main(["generate", *models, "--prompt", "hello", "--max-tokens", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["generation_tokens"] == 3
