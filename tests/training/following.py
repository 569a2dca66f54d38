"""A target with a rule that a draft can learn: its next token follows from its last one, round a circle of 52 tokens.

It is a Llama whose layers add next to nothing, so its features say which token was last; its text does not repeat
itself for 52 tokens. Its tokenizer has no chat template: the last letter of a prompt says where the answer begins.
"""

from __future__ import annotations

import json
import random
import string
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from tests.conftest import byte_tokenizer
from tests.families import BY_NAME, VOCAB, build

SHARPNESS = 12.0  # of the logits: a drawn answer seldom leaves the circle


def circle() -> list[int]:
    """Token ids in the order in which they follow each other."""
    tokenizer = byte_tokenizer()
    found = [tokenizer.encode(letter)[0] for letter in string.ascii_letters]
    random.Random(5).shuffle(found)
    return found


def target_folder(folder: Path) -> Path:
    """The model with its tokenizer, as a user has it."""
    model = build(BY_NAME["llama"])
    weights: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    embedding = np.random.default_rng(3).standard_normal((VOCAB, 64)).astype(np.float32)
    embedding /= np.sqrt((embedding**2).mean(axis=1, keepdims=True))
    order, head = circle(), np.zeros_like(embedding)
    for place, token in enumerate(order):
        head[order[(place + 1) % len(order)]] = embedding[token]
    for token in sorted(set(range(VOCAB)) - set(order)):
        head[order[token % len(order)]] += 0.5 * embedding[token]  # any other token leads onto the circle
    weights["model.embed_tokens.weight"] = mx.array(embedding)
    weights["lm_head.weight"] = mx.array(head * SHARPNESS / 64)
    for name, value in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] = value * 1e-3
    folder.mkdir(parents=True)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps(BY_NAME["llama"].config | {"eos_token_id": [257]}))
    inner = byte_tokenizer()._tokenizer
    inner.chat_template = None
    inner.save_pretrained(str(folder))
    return folder


def prompts_file(path: Path, count: int) -> Path:
    """As .jsonl, of two categories."""
    draw = random.Random(7)
    rows = [
        {"prompt": "".join(draw.choices(string.ascii_letters + string.digits, k=draw.randint(3, 9))), "category": kind}
        for _, kind in zip(range(count), ["words", "names"] * count, strict=False)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
