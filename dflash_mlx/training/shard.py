"""What is in a shard of a data set."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Shard:
    """Samples of one batch. Arrays over samples [n]: offsets [n + 1] into `tokens`; prompt_lengths; prompts (keys of
    the prompts), numbers (0 greedy, others drawn), held_out, stopped, and categories, topics as text.

    tokens: [all] uint16 or uint32, prompt and response of each sample.
    top_ids, top_logprobs: [all response tokens, k] uint16 or uint32, and float16: the distribution that each response
        token was chosen from, most likely first, -inf where fewer matter. None if they are not stored.
    features: [all tokens but the last of each sample, F] float16, or float32 where they overflow that; None.
    """

    offsets: np.ndarray
    tokens: np.ndarray
    prompt_lengths: np.ndarray
    prompts: np.ndarray
    numbers: np.ndarray
    held_out: np.ndarray
    stopped: np.ndarray
    categories: list[str]
    topics: list[str]
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    features: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    def sequence(self, index: int) -> np.ndarray:
        """Prompt and response of a sample."""
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    @property
    def response_offsets(self) -> np.ndarray:
        """[n + 1] into `top_ids` and `top_logprobs`."""
        return np.concatenate([[0], np.cumsum(np.diff(self.offsets) - self.prompt_lengths)])

    @property
    def feature_offsets(self) -> np.ndarray:
        """[n + 1] into `features`."""
        return np.concatenate([[0], np.cumsum(np.diff(self.offsets) - 1)])
