"""Have the target answer prompts, for a draft to learn from.

    python -m dflash_mlx.training.generate --target demo --prompts demo --out DIR

Stop it at any moment, and start it again with the same arguments to go on: what it makes is the same either way.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dflash_mlx.training.batching import Sample
    from dflash_mlx.training.dataset import Dataset
    from dflash_mlx.training.prompts import Prompt

Tell = Callable[[str], None]
LONGEST_PROMPT = 2048  # tokens; longer ones are left out, since all rows of a batch have room for the longest
_BESIDE = ("top", "features")  # stored beside the tokens, which do not depend on them


@dataclass(frozen=True)
class Settings:
    """What decides the answers beside target and prompts, and what is stored with them.

    samples: answers per prompt, the first greedy, others at `temperature` with `min_p`. max_tokens: of an answer.
    batch: rows that are decoded together. top: tokens kept of each distribution, 0 for none.
    features: layers whose outputs are stored.
    """

    seed: int = 0
    samples: int = 2
    temperature: float = 0.7
    min_p: float = 0.02
    max_tokens: int = 160
    batch: int = 96
    top: int = 16
    features: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        legal = (
            ("samples", self.samples >= 1, "1 or more"),
            ("temperature", 0 < self.temperature < float("inf"), "more than 0"),
            ("min_p", 0 <= self.min_p <= 1, "in 0..1"),
            ("max_tokens", self.max_tokens >= 1, "1 or more"),
            ("batch", self.batch >= 1, "1 or more"),
            ("top", self.top >= 0, "0 (none) or more"),
        )
        for name, fine, range_ in legal:
            if not fine:
                raise ValueError(f"`{name}` has to be {range_}, got {getattr(self, name)}.")


def generate(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    folder: Path,
    settings: Settings,
    *,
    target: dict[str, Any],
    source: str,
    part: tuple[int, int] = (1, 1),
    tell: Tell = lambda line: None,
) -> Dataset:
    """Answer every prompt into the data set in `folder`, leaving out the shards that are there already.

    Args:
        model, tokenizer: of the target, as `load` gives them.
        target: what names it, for the manifest. source: what the prompts are, likewise.
        part: (k, n) makes every n-th shard, beginning with the k-th: n processes can share the work.
        tell: called with one line per shard.
    Raises:
        DatasetError: the folder holds something else.
        ValueError: no prompts, no room for answers of `max_tokens`, or `part` or a layer is out of range.
    """
    from dflash_mlx.training.batching import Choosing, batches, chunks, decode, samples
    from dflash_mlx.training.dataset import Dataset
    from dflash_mlx.training.decoder import decoder_for

    if not prompts:
        raise ValueError("There are no prompts. Give a file or data set with at least one.")
    first, every = part
    if not 1 <= first <= every:
        raise ValueError(f"`part` has to be k/n with k in 1..n, got {first}/{every}.")
    decoder = decoder_for(model, settings.features)
    longest = longest_prompt(model, settings)
    dataset = Dataset.create_or_resume(folder, describe(tokenizer, prompts, settings, target, source))
    there, number = set(dataset.numbers()), -1
    planned = chunks(samples(prompts, settings.samples), settings.batch, settings.seed)
    shards = sum(-(-len(chunk) // settings.batch) for chunk in planned)
    clock = _Clock(sum(n not in there and n % every == first - 1 for n in range(shards)))
    for chunk in planned:
        count = -(-len(chunk) // settings.batch)
        wanted = [n for n in range(number + 1, number + 1 + count) if n not in there and n % every == first - 1]
        start, number = number + 1, number + count
        if not wanted:
            continue
        encoded = [(sample, prompt_ids(tokenizer, sample)) for sample in chunk]
        fitting = [pair for pair in encoded if 0 < len(pair[1]) <= longest]
        if len(fitting) < len(encoded):
            tell(f"{len(encoded) - len(fitting)} samples left out: prompt empty, or longer than {longest} tokens")
        cut = batches([len(ids) for _, ids in fitting], settings.batch, settings.seed)
        for n in (n for n in wanted if n - start < len(cut)):
            answers = decode(
                decoder,
                [fitting[index] for index in cut[n - start]],
                choosing=Choosing(settings.temperature, settings.min_p, settings.top),
                stops=frozenset(tokenizer.eos_token_ids),
                max_tokens=settings.max_tokens,
                seed=settings.seed,
            )
            dataset.write(n, answers, settings.features)
            tell(clock.line(n, answers))
    return dataset


def longest_prompt(model: Any, settings: Settings) -> int:
    """In tokens, so that prompt and answer have room in the target's context.

    Raises:
        ValueError: an answer alone has no room in it.
    """
    from dflash_mlx.targets import target_for

    room = target_for(model).spec.max_positions or LONGEST_PROMPT + settings.max_tokens
    if settings.max_tokens >= room:
        raise ValueError(
            f"`max_tokens` has to be less than the target's context of {room} tokens, since the prompt has to fit in "
            f"too, got {settings.max_tokens}."
        )
    return min(LONGEST_PROMPT, room - settings.max_tokens)


class _Clock:
    """Tokens of this run, how fast, and how long the rest takes if it is like that.

    shards: to be made; fewer if prompts are left out.
    """

    def __init__(self, shards: int) -> None:
        self._wall, self._cpu, self._tokens = time.perf_counter(), time.process_time(), 0
        self._shards, self._made = shards, 0

    def line(self, number: int, answers: Sequence[Any]) -> str:
        from dflash_mlx.training.panel import duration

        made = sum(len(answer.tokens) - answer.prompt_length for answer in answers)
        self._tokens += made
        self._made += 1
        wall, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
        return (
            f"shard {number} ({self._made} of {self._shards}): {len(answers)} answers, {made} tokens; {self._tokens} "
            f"so far, {self._tokens / wall:.0f} tokens/s, {self._tokens / cpu:.0f} per CPU second, about "
            f"{duration(wall / self._made * (self._shards - self._made))} left"
        )


def prompt_ids(tokenizer: Any, sample: Sample) -> list[int]:
    """Through the chat template; the text alone where there is none."""
    if tokenizer.has_chat_template:
        return list(tokenizer.apply_chat_template(sample.prompt.messages, add_generation_prompt=True))
    return list(tokenizer.encode(sample.prompt.text))


def describe(
    tokenizer: Any, prompts: Sequence[Prompt], settings: Settings, target: dict[str, Any], source: str
) -> dict[str, Any]:
    """The manifest: everything that the answers depend on."""
    from dataclasses import asdict

    from dflash_mlx.training.prompts import fingerprint
    from dflash_mlx.training.target_identity import tokenizer_facts

    return {
        "target": target,
        **tokenizer_facts(tokenizer),
        "prompts": {"source": source, "count": len(prompts), "sha256": fingerprint(prompts)},
        "settings": {key: value for key, value in asdict(settings).items() if key not in _BESIDE},
    }


def layers(text: str) -> tuple[int, ...]:
    """Of --features. Raises ArgumentTypeError."""
    try:
        return tuple(int(each) for each in text.split(",") if each)
    except ValueError:
        raise argparse.ArgumentTypeError(f"has to be numbers of layers, as in 1,8,14, got {text!r}") from None


def _part(text: str) -> tuple[int, int]:
    first, _, every = text.partition("/")
    try:
        part = int(first), int(every)
    except ValueError:
        part = (0, 0)
    if not 1 <= part[0] <= part[1]:
        raise argparse.ArgumentTypeError(f"has to be K/N with K in 1..N, as in 2/4, got {text!r}")
    return part


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m dflash_mlx.training.generate",
        description="Have a target answer prompts, for a draft to learn from. Go on with the same arguments.",
    )
    default = Settings()
    made.add_argument("--target", default="demo", help="folder, Hugging Face repository, or demo (default)")
    made.add_argument("--prompts", default="demo", help="demo (built in), a .jsonl or .txt file, or a data set's name")
    made.add_argument("--count", type=int, help="prompts at most (default: all; of demo 24000)")
    made.add_argument("--out", type=Path, required=True, help="the folder to make or to continue")
    made.add_argument("--revision", help="branch, tag or commit of the target's repository")
    made.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="default: as stored; demo: float32")
    made.add_argument("--seed", type=int, default=default.seed)
    sampling = f"answers per prompt: the first greedy, others at the temperature (default {default.samples})"
    made.add_argument("--samples", type=int, default=default.samples, help=sampling)
    made.add_argument("--temperature", type=float, default=default.temperature)
    made.add_argument("--min-p", type=float, default=default.min_p)
    made.add_argument("--max-tokens", type=int, default=default.max_tokens, help="of an answer")
    fitting = f"rows together (default: that of the data set, or as many as fit, at most {default.batch})"
    made.add_argument("--batch", type=int, help=fitting)
    made.add_argument(
        "--top", type=int, default=default.top, help="likeliest tokens kept of each distribution; 0: none"
    )
    made.add_argument(
        "--features", type=layers, default=(), metavar="LAYERS", help="store outputs of these layers, as in 1,8,14"
    )
    made.add_argument(
        "--part", type=_part, default=(1, 1), metavar="K/N", help="make every N-th shard only, beginning with the K-th"
    )
    made.add_argument("--threads", type=int, default=1, help="of the CPU's matrix products (default 1)")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status, as `cli.guarded` does."""
    from dflash_mlx.cli import guarded
    from dflash_mlx.training.interrupts import Interrupts

    read = parser()
    args = read.parse_args(argv)
    rows = Settings().batch if args.batch is None else args.batch
    try:
        settings = Settings(
            args.seed, args.samples, args.temperature, args.min_p, args.max_tokens, rows, args.top, args.features
        )
    except ValueError as error:
        read.error(str(error))
    # numpy brings a BLAS of its own, which reads this when it is imported.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", str(args.threads))

    def run() -> int:
        with Interrupts() as interrupts, interrupts.at_once():  # no signal leaves a half-written file
            return _run(args, settings)

    return guarded(run)


def _run(args: argparse.Namespace, settings: Settings) -> int:
    from dflash_mlx import blas, load
    from dflash_mlx.targets import target_for
    from dflash_mlx.training import generation_memory
    from dflash_mlx.training.dataset import Dataset
    from dflash_mlx.training.memory import memory_here
    from dflash_mlx.training.prompts.sources import read_prompts
    from dflash_mlx.training.target_identity import identity

    say: Tell = lambda line: print(line, file=sys.stderr, flush=True)  # noqa: E731
    model, tokenizer = load(args.target, dtype=args.dtype, revision=args.revision)
    blas.bind(args.threads)
    prompts = read_prompts(args.prompts, args.count, settings.seed, say)
    say(f"{len(prompts)} prompts, {sum(prompt.held_out for prompt in prompts)} of them held out")
    target = identity(args.target, args.revision, model)
    begun = Dataset.open(args.out) if (args.out / "manifest.json").exists() else None
    batch, line = generation_memory.chosen(
        args.batch, begun, target_for(model), tokenizer, prompts, settings, memory_here()
    )
    settings = replace(settings, batch=batch)
    say(line)
    generate(
        model, tokenizer, prompts, args.out, settings, target=target, source=args.prompts, part=args.part, tell=say
    )
    print(args.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
