"""The plain path and the command line: text on stdout, the rest on stderr, honest exit codes."""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from scripted import Answer, Script

import dflash_mlx.chat
from dflash_mlx.app import plain
from dflash_mlx.app.jobs import LoadModel
from dflash_mlx.app.metrics import MetricsLog
from dflash_mlx.app.settings import Settings


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class ClosedPipe(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def run(script: Script, *questions: str, out: io.StringIO | None = None, err: io.StringIO | None = None, **options):  # type: ignore[no-untyped-def]
    out, err = out or io.StringIO(), err or io.StringIO()
    code = plain.run(LoadModel(), Settings(), iter(questions), backend=script.backend, out=out, err=err, **options)
    return code, out.getvalue(), err.getvalue()


def test_the_answer_is_all_that_stdout_gets() -> None:
    code, out, err = run(Script([Answer("Hello [red]there[/red].", notes=("reference BLAS",))]), "hi")
    assert (code, out) == (0, "Hello [red]there[/red].\n")
    step, first, note = err.splitlines()
    assert step == "Reading weights"
    for wanted in ("generation only", "prefill-inclusive", "TTFT", "tokens/cycle", "acceptance", "prompt"):
        assert wanted in first
    assert note == "note: reference BLAS"


def test_text_is_written_as_it_comes() -> None:
    seen: list[str] = []
    script = Script([Answer("abcdefgh", depths=(3,))])

    class Watching(io.StringIO):
        def flush(self) -> None:
            seen.append(self.getvalue())

    script.answers[0].cycle_s = 0.06
    run(script, "hi", out=Watching())
    assert "a" in seen and "abcde" in seen


def test_several_questions_are_one_conversation() -> None:
    script = Script([Answer("One."), Answer("Two.")])
    code, out, _ = run(script, "first", "second")
    assert (code, out) == (0, "One.\nTwo.\n")
    assert script.prompts[1] == "</s><user>second</s><assistant>"


def test_a_terminal_never_gets_control_characters_but_a_file_gets_the_text_as_it_is() -> None:
    script = Script([Answer("a\x1b[31mb")])
    assert run(script, "hi", out=Terminal())[1] == "a␛[31mb\n"
    assert run(script, "hi")[1] == "a\x1b[31mb\n"
    assert run(Script([Answer("a\u202eb\u2066c")]), "hi", out=Terminal())[1] == "a\ufffdb\ufffdc\n"


def test_progress_is_a_bar_on_a_terminal_and_a_line_a_step_in_a_log() -> None:
    """Fetching and converting take minutes; a silent pipe looks hung."""
    steps = (("Fetching", 0.1), ("Fetching", 0.6), ("Converting", None))
    assert "Fetching 10%" in run(Script(load_steps=steps), "hi", err=Terminal())[2]
    assert run(Script(load_steps=steps), "hi")[2].splitlines()[:-1] == ["Fetching", "Converting"]


def test_warnings_while_loading_become_notes() -> None:
    assert "note: No draft is known.\n" in run(Script(load_warnings=("No draft is known.",)), "hi")[2]


def test_an_error_for_the_user_is_one_line_and_exit_code_1() -> None:
    code, out, err = run(Script(load_error=ValueError("No model at /nowhere.")), "hi")
    assert (code, out) == (1, "")
    assert "No model at /nowhere." in err and "Traceback" not in err


def test_a_bug_keeps_its_traceback() -> None:
    code, _, err = run(Script([Answer("abc", fail_after=1)]), "hi")
    assert code == 1 and "Traceback" in err and "RuntimeError: scripted" in err


def test_a_closed_pipe_is_quiet() -> None:
    code, _, err = run(Script(load_steps=()), "hi", out=ClosedPipe())
    assert (code, err) == (0, "")


class FullDisk(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


def test_a_full_disk_is_one_message() -> None:
    code, _, err = run(Script(load_steps=()), "hi", out=FullDisk())
    assert (code, err) == (1, "stdout cannot be written: No space left on device.\n")


def test_only_an_error_while_loading_says_that_the_model_could_not_be_loaded() -> None:
    assert "The model could not be loaded: no" in run(Script(load_error=ValueError("no")), "hi")[2]
    for answer in (Answer(refuse=ValueError("bad block")), Answer("abc", fail_after=1, error=ValueError("bad block"))):
        code, _, err = run(Script([answer]), "hi")
        assert code == 1 and "No answer: bad block" in err and "could not be loaded" not in err


def test_ctrl_c_ends_with_130_and_frees_the_streams() -> None:
    script = Script([Answer("abc", fail_after=1, error=KeyboardInterrupt())])  # type: ignore[arg-type]
    code, out, err = run(script, "hi")
    assert (code, out) == (130, "a\n")
    assert script.streams_cleared == 1
    statistics, _, last = err.splitlines()[-3:]
    assert statistics.startswith("1 token in ") and last == "Interrupted."


def test_ctrl_c_before_the_first_token_has_no_statistics() -> None:
    script = Script([Answer("abc", fail_after=0, error=KeyboardInterrupt())])  # type: ignore[arg-type]
    code, out, err = run(script, "hi")
    assert (code, out) == (130, "") and "token" not in err


def test_json_is_one_object_for_each_answer_and_nothing_else_on_stdout() -> None:
    script = Script(
        [Answer("One.", reasoning="Hm.", notes=("a fact",)), Answer("Two.")], load_warnings=("No draft is known.",)
    )
    code, out, err = run(script, "first", "second", as_json=True)
    first, second = map(json.loads, out.splitlines())
    assert code == 0 and "generation only" in err
    assert (first["text"], first["reasoning"], first["answer"]) == ("<think>Hm.</think>One.", "Hm.", "One.")
    assert first["notes"] == ["No draft is known.", "a fact"] and first["finish_reason"] == "stop"
    assert len(first["tokens"]) == first["generation_tokens"] and first["check"] is None
    assert second["answer"] == "Two." and "settings" not in second and "timestamp" not in second


def test_json_of_an_interrupted_answer_says_so() -> None:
    script = Script([Answer("abc", fail_after=1, error=KeyboardInterrupt())])  # type: ignore[arg-type]
    code, out, _ = run(script, "hi", as_json=True)
    found = json.loads(out)
    assert (code, found["text"], found["finish_reason"]) == (130, "a", "cancelled")


def test_json_of_an_answer_that_failed_is_none() -> None:
    code, out, _ = run(Script([Answer("abc", fail_after=1)]), "hi", as_json=True)
    assert (code, out) == (1, "")


def test_the_numbers_of_every_turn_go_to_the_metrics_file(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    run(Script([Answer("One."), Answer("Two.")]), "first", "second", metrics=log)
    records = [json.loads(line) for line in log.path.read_text().splitlines()]
    assert [record["generation_tokens"] for record in records] == [4, 4]
    assert all("text" not in record and record["target"] == "demo" for record in records)


def test_a_metrics_file_that_cannot_be_written_is_a_note_and_no_failure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, out, err = run(Script([Answer("One.")]), "first", metrics=MetricsLog(tmp_path / "file" / "metrics.jsonl"))
    assert (code, out) == (0, "One.\n")
    assert err.splitlines()[-1].startswith("note: ") and "not kept" in err


def test_help_takes_no_heavy_import() -> None:
    started = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "dflash_mlx.chat", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0 and "--block-size" in result.stdout
    for heavy in ("mlx.core", "mlx_lm", "textual", "numpy"):
        assert heavy not in result.stderr
    assert time.monotonic() - started < 10


class Commanded:
    """What `main` would have run, each time; 99 is the code of the app."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loads: list[LoadModel] = []
        self.settings: list[Settings] = []
        self.questions: list[list[str]] = []
        self.options: list[dict[str, object]] = []
        self.app: list[dict[str, object]] = []
        monkeypatch.setattr(plain, "run", self._run)
        monkeypatch.setattr("dflash_mlx.app.app.ChatApp", self._app)

    def _run(self, load: LoadModel, settings: Settings, questions, **options: object) -> int:  # type: ignore[no-untyped-def]
        self.loads.append(load)
        self.settings.append(settings)
        self.questions.append(list(questions))
        self.options.append(options)
        return 0

    def _app(self, load: LoadModel | None, settings: Settings, **options: object) -> argparse.Namespace:
        self.app.append({"load": load, "settings": settings, **options})
        return argparse.Namespace(
            run=lambda: None,
            close_engine=lambda timeout: True,
            tracebacks=[],
            return_code=99,
            failure=None,
            last_words="",
        )


def command(
    monkeypatch: pytest.MonkeyPatch, *argv: str, stdin: io.StringIO | None = None, screen: bool = False
) -> tuple[int, Commanded]:
    """Run `main` on a terminal, or with `screen=False` into a pipe."""
    ran = Commanded(monkeypatch)
    monkeypatch.setattr(sys, "stdin", stdin or Terminal())
    if screen:
        monkeypatch.setattr(sys, "stdout", Terminal())
    return dflash_mlx.chat.main(argv), ran


def test_arguments_become_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    _, ran = command(
        monkeypatch, "-p", "hi", "--model", "m", "--draft", "none", "--gguf", "x.gguf", "--dtype", "bfloat16",
        "--blas", "off", "--mode", "plain", "--block-size", "8", "--max-tokens", "9", "--temp", "0.5",
        "--top-p", "0.9", "--min-p", "0.1", "--top-k", "5", "--seed", "3", "--system", "Be kind.",
        "--draft-bits", "4", "--draft-group-size", "32", "--draft-window", "9", "--kernels", "off",
    )  # fmt: skip
    assert ran.loads[0] == LoadModel(
        "m", None, "bfloat16", "off", "x.gguf", draft_bits=4, draft_group_size=32, draft_window=9, kernels="off"
    )
    assert ran.settings[0] == Settings(0.5, 0.9, 0.1, 5, 9, 8, "plain", "Be kind.", 3)
    assert ran.questions[0] == ["hi"]


def test_piped_input_is_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    code, ran = command(monkeypatch, stdin=io.StringIO("What is this?\nLine two.\n"))
    assert code == 0 and ran.questions == [["What is this?\nLine two."]]
    assert ran.loads[0].model == "demo"


def test_an_empty_pipe_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, ran = command(monkeypatch, stdin=io.StringIO("\n"))
    assert code == 1 and not ran.questions and "no prompt" in capsys.readouterr().err


def test_a_terminal_opens_the_app_and_a_redirected_stdout_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert command(monkeypatch, screen=True)[0] == 99
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    code, ran = command(monkeypatch, stdin=_typed("hello"))
    assert code == 0 and ran.questions == [["hello"]]


def test_without_a_model_the_app_begins_with_the_picker_and_keeps_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--kernels off` without `--model` must hold for the model that is picked."""
    _, ran = command(monkeypatch, "--kernels", "off", "--draft-bits", "4", screen=True)
    [app] = ran.app
    options = app["options"]
    assert app["load"] is None and isinstance(options, LoadModel)
    assert (options.kernels, options.draft_bits) == ("off", 4)


@pytest.mark.parametrize(
    ("argv", "model"),
    [(("--model", "m"), "m"), (("--demo",), "demo"), (("--gguf", "x.gguf"), "demo"), (("--draft", "d"), "demo")],
)
def test_a_model_that_is_named_is_loaded_at_once(
    argv: tuple[str, ...], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, ran = command(monkeypatch, *argv, screen=True)
    load = ran.app[0]["load"]
    assert isinstance(load, LoadModel) and load.model == model


def test_resume_and_what_is_kept_are_told_to_the_app(monkeypatch: pytest.MonkeyPatch) -> None:
    told = [
        command(monkeypatch, *argv, screen=True)[1].app[0]
        for argv in ((), ("--resume",), ("--resume", "abc"), ("--no-save", "--no-metrics"))
    ]
    assert [(app["resume"], app["save"], app["metrics"]) for app in told] == [
        (None, True, True),
        ("", True, True),
        ("abc", True, True),
        (None, False, False),
    ]


def test_metrics_are_written_unless_they_are_declined(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _, ran = command(monkeypatch, "-p", "hi")
    log = ran.options[0]["metrics"]
    assert isinstance(log, MetricsLog) and log.path.is_relative_to(tmp_path)
    _, ran = command(monkeypatch, "-p", "hi", "--no-metrics", "--json")
    assert ran.options[0] == {"metrics": None, "as_json": True}


def test_the_config_holds_where_the_command_line_says_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config" / "dflash-metal" / "config.toml"
    file.parent.mkdir(parents=True)
    file.write_text("[defaults]\ntemperature = 0.7\nmax_tokens = 9\nthinking = false\nsystem = 'Be kind.'\n")
    _, ran = command(monkeypatch, "-p", "hi", "--temp", "0.2")
    assert ran.settings[0] == Settings(temperature=0.2, max_tokens=9, thinking=False, system="Be kind.")
    file.write_text("theme = 'light'\n")
    _, ran = command(monkeypatch, screen=True)
    assert ran.app[0]["theme"] == "light"
    file.write_text("[defaults]\nheat = 1\n")
    with pytest.raises(SystemExit) as ended:
        command(monkeypatch, "-p", "hi")
    assert ended.value.code == 2 and "`heat`" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        command(monkeypatch, "--help")
    assert ended.value.code == 0


def _typed(text: str) -> Terminal:
    terminal = Terminal(text)
    return terminal


def test_without_textual_the_terminal_chat_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dflash_mlx.chat, "find_spec", lambda name: None)
    code, ran = command(monkeypatch, stdin=_typed("one\n\ntwo\n/quit\nthree\n"), screen=True)
    assert code == 0 and ran.questions == [["one", "two"]] and ran.loads[0].model == "demo"


@pytest.mark.parametrize(
    "argv",
    [
        ["--temp", "-1"],
        ["--block-size", "0"],
        ["--seed", "-1"],
        ["--mode", "fast"],
        ["--max-tokens", "0"],
        ["--draft-bits", "3"],
        ["--draft-group-size", "32"],
        ["--draft-window", "0"],
        ["a", "-p", "b"],
        ["--resume", "-p", "b"],
    ],
)
def test_bad_arguments_are_refused_before_anything_is_loaded(
    argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        command(monkeypatch, *argv)
    assert exit_info.value.code == 2 and argv[-2].strip("-") in capsys.readouterr().err.replace("_", "-")


def chat(*argv: str, **options: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "dflash_mlx.chat", *argv], stderr=subprocess.PIPE, stdout=subprocess.PIPE, **options
    )  # type: ignore[call-overload, no-any-return]


def test_bytes_that_are_no_text_are_refused_in_a_line() -> None:
    with chat("--print", stdin=subprocess.PIPE) as process:
        _, err = process.communicate(b"\xff\xfe hello", timeout=60)
    assert process.returncode == 1
    assert err.decode().count("\n") == 1 and "not UTF-8" in err.decode()


@pytest.mark.parametrize("piped", ["a file", ""])
def test_a_prompt_wins_over_what_is_piped_in_and_that_is_said(piped: str, tmp_path: Path) -> None:
    """Otherwise `chat -p ... < file` looks as if the file had been read."""
    (tmp_path / "in").write_text(piped)
    with open(tmp_path / "in") as stdin, chat("-p", "hi", "--model", "/nowhere", stdin=stdin) as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1 and (b"piped in is not read" in err) == bool(piped)


def test_a_closed_stdin_is_no_prompt() -> None:
    with chat("--print", preexec_fn=lambda: os.close(0)) as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err.decode().count("\n") == 1 and "no prompt" in err.decode()


def test_an_answer_comes_although_stderr_is_closed() -> None:
    """Only the statistics have no place."""
    code = (
        f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})\n"
        "from scripted import Answer, Script\nfrom dflash_mlx.app import plain\nimport dflash_mlx.chat\n"
        "run = plain.run\n"
        "plain.run = lambda *args, **rest: run(*args, **rest, backend=Script([Answer('Hello.')]).backend)\n"
        "sys.exit(dflash_mlx.chat.main(['-p', 'hi']))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, preexec_fn=lambda: os.close(2), text=True, timeout=60
    )
    assert (result.returncode, result.stdout) == (0, "Hello.\n")


def test_ctrl_c_while_the_prompt_is_read_is_130_without_a_traceback() -> None:
    code = (
        "import sys, dflash_mlx.app.plain, dflash_mlx.chat as c\nprint('up', flush=True)\nsys.exit(c.main(['--print']))"
    )
    arguments = [sys.executable, "-c", code]
    pipe = subprocess.PIPE
    with subprocess.Popen(arguments, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, b"")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_full_disk_ends_with_1_and_one_message() -> None:
    """Python flushes stdout once more at exit, and would complain and end with 120."""
    code = (
        f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})\n"
        "from scripted import Script\nfrom dflash_mlx.app import plain\nimport dflash_mlx.chat\n"
        "run = plain.run\n"
        "plain.run = lambda *args, **rest: run(*args, **rest, backend=Script(load_steps=()).backend)\n"
        "sys.exit(dflash_mlx.chat.main(['-p', 'hi']))"
    )
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    arguments = [sys.executable, "-c", code]
    with open("/dev/full", "w") as full:
        result = subprocess.run(arguments, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, env=buffered)
    assert (result.returncode, result.stderr) == (1, "stdout cannot be written: No space left on device.\n")


FAILED_LOAD = """
import sys
sys.path.insert(0, {here!r})
from scripted import FakeEngine, Script
import dflash_mlx.app.app, dflash_mlx.chat
from dflash_mlx.app.settings import Settings
from dflash_mlx.app.jobs import LoadModel

class App(dflash_mlx.app.app.ChatApp):
    def __init__(self, load, settings, **options):
        script = Script(load_error=ValueError("No model at /nowhere."))
        super().__init__(load, settings, engine=lambda post: FakeEngine(post, script))
    def run(self):
        async def watch(pilot):
            while self.failure is None:
                await pilot.pause(0.01)
            await pilot.press("ctrl+q")
        super().run(headless=True, auto_pilot=watch)

dflash_mlx.app.app.ChatApp = App
sys.exit(dflash_mlx.chat._open_app(LoadModel(), Settings(), dflash_mlx.chat.parser().parse_args(['--demo'])))
"""


def test_a_chat_whose_model_failed_to_load_says_so_again_after_it_was_closed() -> None:
    """Closing it is no failure: the window had said so, and was left by its user."""
    code = FAILED_LOAD.format(here=os.path.dirname(__file__))
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0
    assert result.stderr == "The model could not be loaded: No model at /nowhere.\n"


STUCK = """
import sys, threading, time
sys.path.insert(0, {here!r})
from scripted import FakeEngine, Script
import dflash_mlx.app.app, dflash_mlx.chat
from dflash_mlx.app.settings import Settings
from dflash_mlx.app.jobs import LoadModel

class Stuck(FakeEngine):
    def run(self):
        time.sleep(60)

class App(dflash_mlx.app.app.ChatApp):
    def __init__(self, load, settings, **options):
        super().__init__(load, settings, engine=lambda post: Stuck(post, Script()))
    def run(self):
        super().run(headless=True, auto_pilot=lambda pilot: pilot.press("ctrl+q"))

dflash_mlx.app.app.ChatApp = App
dflash_mlx.chat.QUIT_TIMEOUT_S = 0.2
import os, atexit
print("closing", flush=True)
sys.exit(dflash_mlx.chat._open_app(LoadModel(), Settings(), dflash_mlx.chat.parser().parse_args(['--demo'])))
"""


def test_an_engine_that_cannot_be_interrupted_does_not_hold_the_exit_or_its_code() -> None:
    """A cold import or one endless step: quitting still takes seconds and ends with 0."""
    code = STUCK.format(here=os.path.dirname(__file__))
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert result.returncode == 0, result.stderr
    assert "closing" in result.stdout
