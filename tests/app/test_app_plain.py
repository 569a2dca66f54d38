"""The plain path and the command line: text on stdout, the rest on stderr, honest exit codes."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time

import pytest
from scripted import Answer, Script

import dflash_mlx.chat
from dflash_mlx.app import plain
from dflash_mlx.app.jobs import LoadModel
from dflash_mlx.app.settings import Settings


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class ClosedPipe(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def run(script: Script, *questions: str, out: io.StringIO | None = None, err: io.StringIO | None = None):  # type: ignore[no-untyped-def]
    out, err = out or io.StringIO(), err or io.StringIO()
    code = plain.run(LoadModel(), Settings(), iter(questions), backend=script.backend, out=out, err=err)
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


def command(monkeypatch: pytest.MonkeyPatch, *argv: str, stdin: io.StringIO | None = None):  # type: ignore[no-untyped-def]
    """What `main` would have run: (load, settings, questions) or None for the app."""
    calls: list[tuple[LoadModel, Settings, list[str]]] = []

    def fake_run(load: LoadModel, settings: Settings, questions, **_) -> int:  # type: ignore[no-untyped-def]
        calls.append((load, settings, list(questions)))
        return 0

    monkeypatch.setattr(plain, "run", fake_run)
    monkeypatch.setattr(dflash_mlx.chat, "_open_app", lambda load, settings: 99)
    monkeypatch.setattr(sys, "stdin", stdin or Terminal())
    return dflash_mlx.chat.main(argv), calls


def test_arguments_become_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    _, [(load, settings, questions)] = command(
        monkeypatch, "-p", "hi", "--model", "m", "--draft", "none", "--gguf", "x.gguf", "--dtype", "bfloat16",
        "--blas", "off", "--mode", "plain", "--block-size", "8", "--max-tokens", "9", "--temp", "0.5",
        "--top-p", "0.9", "--min-p", "0.1", "--top-k", "5", "--seed", "3", "--system", "Be kind.",
        "--draft-bits", "4", "--draft-group-size", "32", "--draft-window", "9", "--kernels", "off",
    )  # fmt: skip
    assert load == LoadModel(
        "m", None, "bfloat16", "off", "x.gguf", draft_bits=4, draft_group_size=32, draft_window=9, kernels="off"
    )
    assert settings == Settings(0.5, 0.9, 0.1, 5, 9, 8, "plain", "Be kind.", 3)
    assert questions == ["hi"]


def test_piped_input_is_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    code, [(_, _, questions)] = command(monkeypatch, stdin=io.StringIO("What is this?\nLine two.\n"))
    assert code == 0 and questions == ["What is this?\nLine two."]


def test_an_empty_pipe_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, calls = command(monkeypatch, stdin=io.StringIO("\n"))
    assert code == 1 and not calls and "no prompt" in capsys.readouterr().err


def test_a_terminal_opens_the_app_and_a_redirected_stdout_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert command(monkeypatch)[0] == 99
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    code, [(_, _, questions)] = command(monkeypatch, stdin=_typed("hello"))
    assert code == 0 and questions == ["hello"]


def _typed(text: str) -> Terminal:
    terminal = Terminal(text)
    return terminal


def test_without_textual_the_terminal_chat_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setattr(dflash_mlx.chat, "find_spec", lambda name: None)
    code, [(_, _, questions)] = command(monkeypatch, stdin=_typed("one\n\ntwo\n/quit\nthree\n"))
    assert code == 0 and questions == ["one", "two"]


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


def test_a_closed_stdin_is_no_prompt() -> None:
    with chat("--print", preexec_fn=lambda: os.close(0)) as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err.decode().count("\n") == 1 and "no prompt" in err.decode()


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
        "plain.run = lambda *args: run(*args, backend=Script(load_steps=()).backend)\n"
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
    def __init__(self, load, settings):
        script = Script(load_error=ValueError("No model at /nowhere."))
        super().__init__(load, settings, engine=lambda post: FakeEngine(post, script))
    def run(self):
        async def watch(pilot):
            while self.failure is None:
                await pilot.pause(0.01)
            await pilot.press("ctrl+q")
        super().run(headless=True, auto_pilot=watch)

dflash_mlx.app.app.ChatApp = App
sys.exit(dflash_mlx.chat._open_app(LoadModel(), Settings()))
"""


def test_a_chat_whose_model_failed_to_load_says_so_after_it_closed_and_ends_with_1() -> None:
    code = FAILED_LOAD.format(here=os.path.dirname(__file__))
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
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
    def __init__(self, load, settings):
        super().__init__(load, settings, engine=lambda post: Stuck(post, Script()))
    def run(self):
        super().run(headless=True, auto_pilot=lambda pilot: pilot.press("ctrl+q"))

dflash_mlx.app.app.ChatApp = App
dflash_mlx.chat.QUIT_TIMEOUT_S = 0.2
import os, atexit
print("closing", flush=True)
sys.exit(dflash_mlx.chat._open_app(LoadModel(), Settings()))
"""


def test_an_engine_that_cannot_be_interrupted_does_not_hold_the_exit_or_its_code() -> None:
    """A cold import or one endless step: quitting still takes seconds and ends with 0."""
    code = STUCK.format(here=os.path.dirname(__file__))
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert result.returncode == 0, result.stderr
    assert "closing" in result.stdout
