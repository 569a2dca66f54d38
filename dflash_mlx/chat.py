"""`python -m dflash_mlx.chat`: the terminal chat, or plain text with `--print` and in pipes.

This module only reads arguments and chooses. Neither Textual nor MLX is imported for `--help`.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from io import BufferedReader
from typing import TextIO

from dflash_mlx.app.jobs import LoadModel
from dflash_mlx.app.metrics import MetricsLog
from dflash_mlx.app.places import Places
from dflash_mlx.app.settings import Settings, from_config
from dflash_mlx.cli import (
    INTERRUPTED,
    add_model_arguments,
    add_sampling_arguments,
    check_model_arguments,
    load_options,
)

DEMO = "demo"
NEWEST = ""
"""What `--resume` alone asks for."""
QUIT_TIMEOUT_S = 5.0
"""How long quitting waits for the cycle that runs. A cycle of the demo pair takes about 0.1 s."""


def parser() -> argparse.ArgumentParser:
    """The command line; models and decoding are said as in `dflash_mlx.generate`."""
    made = argparse.ArgumentParser(
        prog="python -m dflash_mlx.chat",
        description="Chat in the terminal; without --model it begins with a choice of the models on this machine. With "
        "--print, --json, -p or piped input: one answer on stdout, by the demo pair unless --model says otherwise, "
        "statistics on stderr.",
    )
    add = made.add_argument
    add("prompt", nargs="?", metavar="PROMPT", help="answer this and exit; the same as -p")
    add("-p", "--prompt", dest="prompt_option", metavar="PROMPT", help="answer this and exit")
    add("--print", action="store_true", dest="plain", help="plain text: the prompt or stdin in, the answer out")
    add("--json", action="store_true", help="one JSON object an answer instead of text, as `generate --json` prints it")
    add("--system", "--system-prompt", default="", metavar="TEXT", help="a system message before the first one")
    add("--resume", nargs="?", const=NEWEST, metavar="ID", help="go on with a saved chat; without ID the newest one")
    add("--no-save", action="store_true", help="do not keep this chat on disk")
    add("--no-metrics", action="store_true", help="do not append the numbers of its turns to the metrics file")
    add_model_arguments(made)
    add("--demo", dest="model", action="store_const", const=DEMO, help="the same as --model demo")
    made.set_defaults(model=None)
    add_sampling_arguments(made, Settings().max_tokens)
    made.set_defaults(theme=None)  # of config.toml only
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the chat.

    Returns:
        Exit code: 0, 1 after an error, 2 for bad arguments, 130 after Ctrl-C in the plain path.
    """
    launched_at = time.perf_counter()
    if sys.stderr is None:  # closed by the shell (`2>&-`); the file takes its number, which nothing else should get
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    try:
        return _chat(argv, launched_at)
    except KeyboardInterrupt:
        return INTERRUPTED


def _chat(argv: Sequence[str] | None, launched_at: float) -> int:
    made, places = parser(), Places.default()
    problem = _use_config(made, places)
    args = made.parse_args(argv)
    if problem:
        made.error(problem)
    check_model_arguments(made, args)
    if args.prompt is not None and args.prompt_option is not None:
        made.error("give the prompt once, either after -p or alone")
    try:
        settings = Settings(
            temperature=args.temp,
            top_p=args.top_p,
            min_p=args.min_p,
            top_k=args.top_k,
            max_tokens=args.max_tokens,
            block_size=args.block_size,
            mode=args.mode,
            system=args.system,
            seed=args.seed,
            thinking=args.think,
        )
    except ValueError as error:
        made.error(str(error))
    load = LoadModel(args.model or DEMO, launched_at=launched_at, **load_options(args))
    prompt: str | None = args.prompt if args.prompt is not None else args.prompt_option

    if prompt is not None or args.plain or args.json or not (_is_terminal(sys.stdin) and _is_terminal(sys.stdout)):
        if args.resume is not None:
            made.error("--resume goes on with a saved chat in the app, which needs a terminal and no prompt")
        return _print_one(load, settings, prompt, as_json=args.json, metrics=_metrics(args, places))
    if find_spec("textual") is None:
        from dflash_mlx.app import plain

        sys.stderr.write("Textual is not installed (`pip install textual`), so this is the plain chat.\n")
        return plain.run(load, settings, plain.typed_lines(), metrics=_metrics(args, places))
    return _open_app(load, settings, args)


def _names_a_model(args: argparse.Namespace) -> bool:
    """Whether something is to be loaded at once: a model, or what belongs to one (the demo unless another is named)."""
    named = (args.model, args.gguf, args.revision, args.draft_revision)
    return any(name is not None for name in named) or args.draft not in ("auto", "none")


def _use_config(made: argparse.ArgumentParser, places: Places) -> str:
    """Take what config.toml says for what the command line does not; returns what is wrong with it, or nothing."""
    try:
        config = from_config(places)
    except ValueError as error:
        return str(error)
    configured = config.settings
    made.set_defaults(
        theme=config.theme,
        temp=configured.temperature,
        top_p=configured.top_p,
        min_p=configured.min_p,
        top_k=configured.top_k,
        max_tokens=configured.max_tokens,
        block_size=configured.block_size,
        mode=configured.mode,
        system=configured.system,
        seed=configured.seed,
        think=configured.thinking,
    )
    return ""


def _metrics(args: argparse.Namespace, places: Places) -> MetricsLog | None:
    return None if args.no_metrics else MetricsLog(places.metrics)


def _print_one(
    load: LoadModel, settings: Settings, prompt: str | None, *, as_json: bool, metrics: MetricsLog | None
) -> int:
    from dflash_mlx.app import plain

    try:
        if prompt is not None and _input_waits():
            sys.stderr.write("note: there is a prompt in the arguments, so what was piped in is not read.\n")
        if prompt is None:
            if _is_terminal(sys.stdin):
                sys.stderr.write("Type the message, then Ctrl-D.\n")
            prompt = "" if sys.stdin is None else sys.stdin.read()
        f"{settings.system}{prompt}".encode()  # bytes that are no text can also come as lone surrogates
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        sys.stderr.write(f"The prompt is not UTF-8 text ({error.reason}).\n")
        return 1
    if not prompt.strip():
        sys.stderr.write("There is no prompt: give one with -p, or pipe it in.\n")
        return 1
    code = plain.run(load, settings, iter([prompt.strip()]), as_json=as_json, metrics=metrics)
    _detach_closed_stdout()
    return code


def _input_waits() -> bool:
    """Whether something was piped in. A pipe whose writer is slower than this question is not noticed."""
    if sys.stdin is None or sys.stdin.isatty():
        return False
    try:
        readable, _, _ = select.select([sys.stdin], [], [], 0)
        return bool(readable) and isinstance(buffer := sys.stdin.buffer, BufferedReader) and bool(buffer.peek(1))
    except (OSError, ValueError):  # no real file
        return False


def _is_terminal(stream: TextIO | None) -> bool:
    """None is what Python makes of a stream that was closed by the shell (`<&-`)."""
    return stream is not None and stream.isatty()


def _detach_closed_stdout() -> None:
    """After a closed pipe or a full disk, keep Python's exit from flushing into it and complaining."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _open_app(load: LoadModel, settings: Settings, args: argparse.Namespace) -> int:
    from dflash_mlx.app.app import ChatApp
    from dflash_mlx.app.text import visible

    app = ChatApp(
        load if _names_a_model(args) else None,
        settings,
        resume=args.resume,
        save=not args.no_save,
        metrics=not args.no_metrics,
        options=load,
        theme=args.theme,
    )
    try:
        app.run()
        finished = app.close_engine(QUIT_TIMEOUT_S)
    except KeyboardInterrupt:  # the terminal is the user's again, and they will not wait
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # what is saved now is saved whole
        finished = app.close_engine(0.0)
    for text in app.tracebacks:
        sys.stderr.write(text)
    if app.last_words:
        sys.stderr.write(f"{app.last_words}\n")
    code = app.return_code or 0
    if app.failure is not None:
        sys.stderr.write(f"{visible(app.failure.title)}: {visible(app.failure.body)}\n")
    if not finished:
        # The engine sits in something that cannot be interrupted, an import or one very long step. Running the
        # interpreter down under it is what makes MLX abort; the terminal has been restored already.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
