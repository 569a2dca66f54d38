"""How much memory a batch of answers needs, before the target is asked, and how large a batch may be.

All but the weights grows with the rows: keys and values, logits, features, and what a layer makes of a prompt. A
formula over the target's sizes, which takes all its layers for full ones and every answer for as long as it may be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from dflash_mlx.targets import Target
from dflash_mlx.training.batching import Sample
from dflash_mlx.training.checkpoint import by_name
from dflash_mlx.training.dataset import Dataset
from dflash_mlx.training.from_target import mlp_width
from dflash_mlx.training.generate import Settings, longest_prompt, prompt_ids
from dflash_mlx.training.host_llama import SCORES, HostLlama
from dflash_mlx.training.memory import TooLarge
from dflash_mlx.training.prompts import Prompt
from dflash_mlx.training.target_facts import size_of

SHARE = 0.6  # of the memory that a batch may take: the rest is the system's, and the formula's error
_TRIED = 16  # of the longest prompts are encoded
_PIECES = 256  # positions by which mlx_lm's caches grow
_LOGITS = 6  # copies of them, as float32, while tokens are chosen
_COPIES = 3  # of features, while a shard is written


@dataclass(frozen=True)
class Rows:
    """Bytes. weights: of the target. keys, logits, features, reading: of each row; reading: while it reads its prompt.
    longest: positions of the longest row."""

    weights: int
    keys: int
    logits: int
    features: int
    reading: int
    longest: int

    @property
    def each(self) -> int:
        """Of a row: its features come after its prompt has been read."""
        return self.keys + max(self.logits + self.features, self.reading)

    def peak(self, batch: int) -> int:
        """With so many rows."""
        return self.weights + batch * self.each

    def most(self, there: int) -> int:
        """Rows that fit into so many bytes; 0 or less if none does."""
        return (there - self.weights) // self.each

    def line(self, batch: int) -> str:
        """For the user."""
        parts = {"keys and values": self.keys, "logits": self.logits, "features": self.features}
        parts["reading prompts"] = self.reading
        shown = ", ".join(f"{name} {batch * size / 1e9:.2f}" for name, size in parts.items() if size)
        return (
            f"Memory of the answers: about {self.peak(batch) / 1e9:.2f} GB at the peak (target "
            f"{self.weights / 1e9:.2f}, {shown}), {batch} rows together of up to {self.longest} positions"
        )


def rows_of(target: Target, settings: Settings, prompt: int) -> Rows:
    """What rows need whose longest prompt has so many tokens."""
    spec, args = target.spec, getattr(target.text, "args", None)
    hidden, size = spec.hidden_size, spec.dtype.size
    heads = size_of(args, "num_attention_heads") or max(1, hidden // 128)
    groups = size_of(args, "num_key_value_heads") or heads
    head = size_of(args, "head_dim") or hidden // heads
    taps, longest = len(settings.features) * hidden, prompt + settings.max_tokens
    weights = sum(value.nbytes for value in by_name(target.model.parameters()).values())
    wide = 4 * hidden + 3 * (mlp_width(target) or size_of(args, "intermediate_size") or 3 * hidden)
    held, on_cpu = longest, mx.default_device() == mx.cpu
    scores = 4 * heads * prompt**2 if on_cpu else 0  # a GPU keeps none
    if on_cpu and HostLlama.serves(target.model):
        weights *= 2  # it has a copy
        scores = min(scores, 4 * SCORES // Settings().batch)  # and reads in pieces
    else:
        held, scores = -(-longest // _PIECES) * _PIECES, 2 * scores
    return Rows(
        weights=weights,
        keys=held * 2 * spec.n_layers * groups * head * size,
        logits=4 * _LOGITS * spec.vocab_size,
        features=_COPIES * 2 * longest * taps,
        reading=prompt * (size * wide + (2 * size + 8) * taps) + scores,
        longest=longest,
    )


def chosen(
    asked: int | None,
    dataset: Dataset | None,
    target: Target,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    settings: Settings,
    there: int,
) -> tuple[int, str]:
    """The rows of a batch, and the sentence that says what they need.

    Args:
        asked: by the user; None takes those of the data set that is continued, or as many as fit, at most the default.
        dataset: that is continued; None begins one. Its batch decides which answers are in a shard, so it stays.
        settings: of the answers; their batch does not count. there: bytes of memory.
    Raises:
        TooLarge: that many do not fit; says how many do.
        ValueError: an answer has no room in the target's context.
    """
    need = rows_of(target, settings, _longest(target, tokenizer, prompts, settings))
    begun = None if dataset is None else dataset.manifest.get("settings", {}).get("batch")
    batch = asked or begun or max(1, min(Settings().batch, need.most(int(SHARE * there))))
    most = need.most(there if batch == begun else int(SHARE * there))
    if batch <= most:
        return batch, need.line(batch)
    if batch == begun:
        cure = "The answers there were made in such batches: go on where there is more memory, or in another folder"
    elif most >= 1:
        cure = f"Give a `--batch` of {most} or less"
    else:
        cure = "Lower `--max-tokens`, leave out long prompts, or take a smaller target or one in fewer bits"
    raise TooLarge(
        f"A batch of {batch} rows needs about {need.peak(batch) / 1e9:.2f} GB of memory for rows of {need.longest} "
        f"positions, and of the {there / 1e9:.2f} GB that are there {max(0, most)} rows fit. The system would end it, "
        f"or it would crawl. {cure}."
    )


def _longest(target: Target, tokenizer: Any, prompts: Sequence[Prompt], settings: Settings) -> int:
    """Tokens of the longest prompt that is not left out, by those that have most text."""
    limit = longest_prompt(target.model, settings)
    texts = sorted(prompts, key=lambda prompt: len(prompt.text.encode()), reverse=True)
    lengths = [min(limit, len(prompt_ids(tokenizer, Sample(prompt)))) for prompt in texts[:_TRIED]]
    return max(lengths, default=1)
