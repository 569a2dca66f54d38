"""The GGUF's vocabulary -> tokenizer.json and tokenizer_config.json.

Byte-level BPE with llama.cpp's pre-tokenizer "smollm": every digit alone, then GPT-2's split. Other
pre-tokenizers cut text at other places and would give other ids without any error, so they are refused.
"""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from dflash_mlx.errors import CheckpointError

CONTROL = 3  # tokenizer.ggml.token_type of special tokens
_KIND = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm"}
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def write_tokenizer(metadata: dict[str, mx.array | str | list[str]], folder: Path) -> None:
    """Write both tokenizer files. Raises CheckpointError for a vocabulary that is not byte-level BPE of that kind."""
    for key, wanted in _KIND.items():
        if metadata.get(key) != wanted:
            raise CheckpointError(f"The GGUF's {key} is {metadata.get(key)!r}; only {wanted!r} is known here.")
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    pairs = (merge.partition(" ") for merge in _strings(metadata, "tokenizer.ggml.merges"))
    merges = [(left, right) for left, _, right in pairs]
    types = _ids(metadata, "tokenizer.ggml.token_type")
    if len(types) != len(tokens):
        raise CheckpointError(f"The GGUF has {len(tokens)} tokens but {len(types)} token types.")
    tokenizer = Tokenizer(BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        # Not GPT2Tokenizer: that class rebuilds the pre-tokenizer and loses the digit split.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": _ids(metadata, "llama.context_length")[0],
        "chat_template": _text(metadata, "tokenizer.chat_template"),
    }
    for name, key in _SPECIAL.items():
        config[name] = tokens[_ids(metadata, f"tokenizer.ggml.{key}_token_id")[0]]
    text = json.dumps(config, indent=1, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def _strings(metadata: dict[str, mx.array | str | list[str]], key: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list):
        raise CheckpointError(f"The GGUF's metadata has no list {key!r}.")
    return value


def _text(metadata: dict[str, mx.array | str | list[str]], key: str) -> str:
    value = metadata.get(key)
    if not isinstance(value, str):
        raise CheckpointError(f"The GGUF's metadata has no text {key!r}.")
    return value


def _ids(metadata: dict[str, mx.array | str | list[str]], key: str) -> list[int]:
    """Integers of the metadata, a scalar as a list of one; host data, so reading it is no sync in a loop."""
    value = metadata.get(key)
    if not isinstance(value, mx.array):
        raise CheckpointError(f"The GGUF's metadata has no number {key!r}.")
    return [int(item) for item in np.array(value).reshape(-1)]
