"""`python -m dflash_mlx.generate`: text to stdout, everything else to stderr, one JSON object with --json.

Heavy imports happen after the arguments are read, so --help and a wrong flag answer at once. The environment variable
DFLASH_BLAS=off is --blas off, and DFLASH_KERNELS is --kernels; the library reads none but XDG_CACHE_HOME.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from dflash_mlx.errors import DFlashError, Interrupted
from dflash_mlx.templates import render

if TYPE_CHECKING:
    from dflash_mlx.generate import GenerationResponse

INTERRUPTED = 130
_GROUP_SIZE = 64


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Which models run, and how they are loaded; shared by generate and chat."""
    group = parser.add_argument_group("models")
    group.add_argument("--model", default="demo", help="folder, Hugging Face repository, or demo (default)")
    group.add_argument(
        "--draft", "--draft-model", default="auto", help="auto (default), none, or a folder or repository"
    )
    group.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16", "packed"],
        help="default: as stored; demo: what decodes fastest",
    )
    group.add_argument(
        "--blas",
        choices=["auto", "off"],
        default=os.environ.get("DFLASH_BLAS", "auto"),
        help="Linux: bind a real BLAS to MLX's CPU backend (default auto; DFLASH_BLAS sets it)",
    )
    add_kernels_argument(group)
    group.add_argument("--draft-bits", type=int, choices=[4, 8], help="quantise the draft when it is loaded")
    sharing = f"with --draft-bits: weights that share a scale (default {_GROUP_SIZE})"
    group.add_argument("--draft-group-size", type=int, choices=[32, 64, 128], help=sharing)
    group.add_argument("--draft-dtype", choices=["float32", "bfloat16"], help="of the draft's activations and context")
    window = "positions that each layer of the draft keeps at most; default: all, or what the checkpoint says"
    group.add_argument("--draft-window", type=_one_or_more, metavar="N", help=window)
    listed = "auto (default): only the tokens that the draft's folder lists, if it does; full: all tokens"
    group.add_argument("--draft-vocabulary", choices=["auto", "full"], default="auto", help=f"to propose: {listed}")
    group.add_argument("--revision", help="branch, tag or commit of --model; default: the repository's main branch")
    group.add_argument("--draft-revision", help="branch, tag or commit of the draft; default: what `models` shows")
    group.add_argument("--gguf", help="the demo target's GGUF file, if it is on this machine already")


def add_kernels_argument(group: Any) -> None:
    """To a parser or a group of one."""
    group.add_argument(
        "--kernels",
        type=lambda text: text.strip() or "auto",  # an empty variable is one that is not set
        default=os.environ.get("DFLASH_KERNELS", "auto"),
        metavar="auto|off|NAME,...",
        help="Metal kernels: those that are right and faster here (auto, default), none, or only the named ones "
        "(DFLASH_KERNELS sets it)",
    )


def check_model_arguments(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Ends the program with status 2 for what `add_model_arguments` read and argparse cannot check."""
    if args.blas not in ("auto", "off"):
        parser.error(f"DFLASH_BLAS has to be auto or off, got {args.blas!r}")
    check_kernels_argument(parser, args)
    if args.draft_group_size is not None and args.draft_bits is None:
        parser.error("--draft-group-size is for a draft that is quantised: pass --draft-bits too, or leave it out")


def check_kernels_argument(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Ends the program with status 2 for names that are none; MLX is imported only if there are names."""
    if args.kernels not in ("auto", "off"):
        from dflash_mlx.kernels.gate import parse_wish

        try:
            parse_wish(args.kernels)
        except ValueError as error:
            parser.error(str(error).replace("`kernels`", "--kernels or DFLASH_KERNELS"))


def _one_or_more(text: str) -> int:
    """For argparse. Raises ArgumentTypeError."""
    with contextlib.suppress(ValueError):
        if int(text) >= 1:
            return int(text)
    raise argparse.ArgumentTypeError(f"has to be an integer of 1 or more, got {text!r}")


def add_sampling_arguments(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    """How tokens are chosen; shared by generate and chat."""
    group = parser.add_argument_group("decoding")
    group.add_argument("--mode", choices=["auto", "dflash", "plain"], default="auto", help="default auto")
    group.add_argument("--block-size", type=int, help="anchor + drafts per cycle; default: the draft's")
    group.add_argument("--max-tokens", type=int, default=max_tokens, help=f"-1 for no limit (default {max_tokens})")
    group.add_argument("--temp", type=float, default=0.0, help="0 (default) is greedy")
    group.add_argument("--top-p", type=float, default=0.0, help="nucleus mass; 0 (default) is off")
    group.add_argument("--min-p", type=float, default=0.0, help="least share of the top probability; 0 is off")
    group.add_argument("--top-k", type=int, default=0, help="ranks kept; 0 (default) is off")
    group.add_argument("--seed", type=int, help="default: another one every time")
    thinking = "let the model reason before it answers, or not; default: the model's (usually on, if it can)"
    group.add_argument("--think", action=argparse.BooleanOptionalAction, help=thinking)


def generate_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dflash_mlx.generate", description="Generate text with DFlash speculative decoding."
    )
    parser.add_argument("--prompt", "-p", help="default: standard input, if it is piped; '-' too")
    parser.add_argument("--system-prompt", help="a system message before the prompt")
    parser.add_argument("--raw", "--ignore-chat-template", action="store_true", help="do not apply the chat template")
    parser.add_argument("--stop", action="append", default=[], help="a string that ends the answer; may be repeated")
    parser.add_argument("--prefill-step-size", type=int, help="prompt tokens per forward (default: 2048, on a CPU 256)")
    parser.add_argument("--rule", choices=["rejection", "match"], default="rejection", help="at a temperature")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    checking = "decode again without drafts and compare; costs a plain decoding (at a temperature: --rule match --seed)"
    parser.add_argument("--check", action="store_true", help=checking)
    deciding = "greedy: decide near-ties again one token at a time, as plain decoding does"
    parser.add_argument("--exact", action="store_true", help=deciding)
    refusing = "stop with an error if there is no draft, or if it turns out not to work, instead of decoding plainly"
    parser.add_argument("--strict", action="store_true", help=refusing)
    drafting = "submit the next draft before reading what was accepted; the same greedy text, not measured on a Mac"
    parser.add_argument("--pipelined", action="store_true", help=drafting)
    group = parser.add_argument_group("memory")
    group.add_argument("--kv-bits", type=int, help="quantise keys and values of attention layers: 8 or 4, say")
    group.add_argument("--kv-group-size", type=int, default=64, help="values that share a scale (default 64)")
    group.add_argument("--quantized-kv-start", type=int, default=5000, help="positions from which on (default 5000)")
    keeping = "continue from this .safetensors file where the prompt begins alike, and write it back"
    group.add_argument("--prompt-cache", "--prompt-cache-file", type=Path, metavar="FILE", help=keeping)
    add_model_arguments(parser)
    add_sampling_arguments(parser, 256)
    return parser


def generate_main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0; 1 for an explained error or a bug that --check found; 2 for wrong usage; 130 when
    interrupted."""
    parser = generate_parser()
    args = parser.parse_args(argv)
    check_model_arguments(parser, args)
    if args.prompt is None and (sys.stdin is None or sys.stdin.isatty()):
        parser.error("no prompt: pass --prompt, or pipe one in")
    return guarded(lambda: _generate(args))


def read_prompt(given: str | None) -> str:
    """The prompt as given, or standard input without its last newline, which belongs to the pipe.

    Raises:
        ValueError: it is empty, or not text.
    """
    try:
        prompt = sys.stdin.read().removesuffix("\n") if given in (None, "-") else str(given)
        prompt.encode()
    except (UnicodeError, AttributeError) as error:
        raise ValueError(f"The prompt is not readable text ({error}). Give it in UTF-8.") from error
    if not prompt:
        raise ValueError("The prompt is empty. Pass --prompt, or pipe one in.")
    return prompt


def guarded(run: Any) -> int:
    """Run a command; turn explained errors, interrupts and a closed pipe into an exit status."""
    try:
        return run()
    except (DFlashError, ValueError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as interrupt:
        print("Interrupted.", file=sys.stderr)
        return interrupt.status if isinstance(interrupt, Interrupted) else INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nobody reads; stay quiet at exit too
        return 0
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is buffered cannot be written either
        print(f"Error: {error}", file=sys.stderr)
        return 1


def _generate(args: argparse.Namespace) -> int:
    prompt = read_prompt(args.prompt)
    from dflash_mlx.generate_command import run

    return run(args, prompt)


def chat_ids(
    tokenizer: Any, prompt: str, system: str | None, *, raw: bool, thinking: bool | None = None
) -> list[int] | str:
    """The prompt as a user message through the chat template; as it is with `raw` or without a template.

    Raises:
        ValueError: `system` or `thinking` is given, and the template is not used or has no such switch.
    """
    if raw or not tokenizer.has_chat_template:
        for option, given in (("--system-prompt", bool(system)), ("--think or --no-think", thinking is not None)):
            if given:
                raise ValueError(f"`{option}` needs a chat template, and this prompt goes without one.")
        return prompt
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": prompt})
    return render(tokenizer, messages, thinking)


_CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {127: 0x2421}
_CONTROLS |= dict.fromkeys([*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)], 0xFFFD)


def printable(text: str) -> str:
    """On a terminal, control characters as symbols: a model does not get to move the cursor. Elsewhere unchanged."""
    return text.translate(_CONTROLS) if sys.stdout.isatty() else text


def print_summary(last: GenerationResponse, lines: list[str], *, interrupted: bool) -> None:
    if interrupted:
        lines = ["interrupted; the text so far is above", *lines]
    print(*lines, sep="\n", file=sys.stderr)


def load_options(args: argparse.Namespace) -> dict[str, Any]:
    """What `add_model_arguments` read, as keyword arguments of `load`."""
    return dict(
        draft=None if args.draft == "none" else args.draft,
        dtype=args.dtype,
        blas=args.blas,
        kernels=args.kernels,
        gguf=args.gguf,
        revision=args.revision,
        draft_revision=args.draft_revision,
        draft_bits=args.draft_bits,
        draft_group_size=args.draft_group_size or _GROUP_SIZE,
        draft_dtype=args.draft_dtype,
        draft_window=args.draft_window,
        draft_vocabulary=args.draft_vocabulary,
    )


@contextlib.contextmanager
def noted_warnings(notes: list[str]) -> Iterator[None]:
    """Put what the library warns of into `notes`, each once, when the block ends, by an error too.

    As Python prints them they show a line of source, and under the chat's screen nobody sees them.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", UserWarning)
        try:
            yield
        finally:
            notes.extend(dict.fromkeys(str(warning.message) for warning in caught))


class LoadingBar:
    """`load`'s progress on stderr: a bar on a terminal, a line per step elsewhere."""

    def __enter__(self) -> LoadingBar:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

        console = Console(stderr=True)
        self._last = ""
        text = TextColumn("{task.description}", markup=False)
        columns = (text, BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=console, transient=True) if console.is_terminal else None
        if self._bar:
            self._bar.start()
            self._task = self._bar.add_task("Starting", total=None)
        return self

    def __call__(self, message: str, share: float | None) -> None:
        if self._bar:
            total = None if share is None else 1.0
            self._bar.update(self._task, description=message, total=total, completed=share or 0)
        elif message != self._last:
            print(message, file=sys.stderr)
        self._last = message

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()
