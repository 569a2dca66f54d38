"""A GGUF writer and a tiny llama in the demo's form, written from the format's description and not with our reader.

`tiny_gguf` starts from weights in Hugging Face order, quantises them itself, and returns what a reader has to find.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

F32, Q4_1, Q8_0 = 0, 3, 8
HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, FFN = 64, 2, 4, 2, 16, 96
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2", "Ã ¯"]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<empty_output>"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass
class Tensor:
    """One tensor of the file: its raw bytes, and the values that they stand for."""

    kind: int
    raw: bytes
    values: np.ndarray  # [rows, columns] or [columns], float32


def byte_alphabet() -> list[str]:
    """GPT-2's 256 printable stand-ins for the bytes."""
    keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b) if b in keep else chr(next(others)) for b in range(256)]


def q4_1(rows: int, columns: int, rng: np.random.Generator) -> Tensor:
    """Random blocks of 32: d and m in float16, then 16 bytes, element i low and element i + 16 high nibble."""
    blocks = rows * columns // 32
    d = (rng.random(blocks) * 0.02 + 0.001).astype(np.float16)
    m = (-rng.random(blocks) * 0.2).astype(np.float16)
    q = rng.integers(0, 16, (blocks, 32), dtype=np.uint8)
    packed = q[:, :16] | (q[:, 16:] << 4)
    raw = b"".join(d[i].tobytes() + m[i].tobytes() + packed[i].tobytes() for i in range(blocks))
    values = q.astype(np.float32) * d[:, None].astype(np.float32) + m[:, None].astype(np.float32)
    return Tensor(Q4_1, raw, values.reshape(rows, columns))


def q8_0(rows: int, columns: int, rng: np.random.Generator) -> Tensor:
    """Random blocks of 32: d in float16, then 32 signed bytes."""
    blocks = rows * columns // 32
    d = (rng.random(blocks) * 0.002 + 0.0001).astype(np.float16)
    q = rng.integers(-128, 128, (blocks, 32), dtype=np.int8)
    raw = b"".join(d[i].tobytes() + q[i].tobytes() for i in range(blocks))
    return Tensor(Q8_0, raw, (q.astype(np.float32) * d[:, None].astype(np.float32)).reshape(rows, columns))


def f32(columns: int, rng: np.random.Generator) -> Tensor:
    """A norm."""
    values = (rng.random(columns) + 0.5).astype(np.float32)
    return Tensor(F32, values.tobytes(), values)


def interleave(tensor: Tensor, heads: int) -> Tensor:
    """The rows as llama.cpp stores q and k: row i and row i + D/2 of a head side by side. Only the raw bytes change."""
    rows = tensor.values.shape[0]
    size = len(tensor.raw) // rows
    half = rows // heads // 2
    order = [head * 2 * half + part * half + i for head in range(heads) for i in range(half) for part in (0, 1)]
    raw = b"".join(tensor.raw[row * size : (row + 1) * size] for row in order)
    return Tensor(tensor.kind, raw, tensor.values)


def tiny_tensors(seed: int = 0) -> tuple[dict[str, Tensor], dict[str, np.ndarray]]:
    """GGUF tensors, and the same weights under mlx_lm's names in Hugging Face order."""
    rng = np.random.default_rng(seed)
    vocab = len(tiny_metadata()["tokenizer.ggml.tokens"])
    tensors = {"token_embd.weight": q8_0(vocab, HIDDEN, rng), "output_norm.weight": f32(HIDDEN, rng)}
    expected = {
        "model.embed_tokens.weight": tensors["token_embd.weight"].values,
        "model.norm.weight": tensors["output_norm.weight"].values,
    }
    for i in range(LAYERS):
        ours, theirs = f"model.layers.{i}", f"blk.{i}"
        parts = {
            "attn_norm": ("input_layernorm", f32(HIDDEN, rng)),
            "ffn_norm": ("post_attention_layernorm", f32(HIDDEN, rng)),
            "attn_q": ("self_attn.q_proj", q4_1(HEADS * HEAD_DIM, HIDDEN, rng)),
            "attn_k": ("self_attn.k_proj", q4_1(KV_HEADS * HEAD_DIM, HIDDEN, rng)),
            "attn_v": ("self_attn.v_proj", q4_1(KV_HEADS * HEAD_DIM, HIDDEN, rng)),
            "attn_output": ("self_attn.o_proj", q4_1(HIDDEN, HEADS * HEAD_DIM, rng)),
            "ffn_gate": ("mlp.gate_proj", q4_1(FFN, HIDDEN, rng)),
            "ffn_up": ("mlp.up_proj", q4_1(FFN, HIDDEN, rng)),
            "ffn_down": ("mlp.down_proj", q4_1(HIDDEN, FFN, rng)),
        }
        for name, (new, tensor) in parts.items():
            heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name)
            tensors[f"{theirs}.{name}.weight"] = tensor if heads is None else interleave(tensor, heads)
            expected[f"{ours}.{new}.weight"] = tensor.values
    return tensors, expected


def tiny_metadata() -> dict[str, Any]:
    """The keys of the demo's GGUF that matter, small."""
    tokens = [*SPECIAL, *byte_alphabet(), *(merge.replace(" ", "") for merge in MERGES)]
    return {
        "general.architecture": "llama",
        "general.name": "tiny",
        "llama.embedding_length": HIDDEN,
        "llama.block_count": LAYERS,
        "llama.feed_forward_length": FFN,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 100000.0,
        "llama.context_length": 512,
        "llama.vocab_size": len(tokens),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIAL else 1 for token in tokens],
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
    }


def write_gguf(path: Path, metadata: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """GGUF version 3, little endian, data aligned to 32 bytes."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(_string(key) + _value(value) for key, value in metadata.items())
    data = b""
    for name, tensor in tensors.items():
        shape = tensor.values.shape[::-1]  # fastest dimension first
        head += _string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, tensor.kind, len(data))
        data += tensor.raw + b"\0" * (-len(tensor.raw) % 32)
    path.write_bytes(head + b"\0" * (-len(head) % 32) + data)
    return path


def tiny_gguf(path: Path, seed: int = 0, **metadata: Any) -> dict[str, np.ndarray]:
    """Write the tiny model; `metadata` changes keys, dots written as __, None removes one. Returns the weights."""
    tensors, expected = tiny_tensors(seed)
    changes = {key.replace("__", "."): value for key, value in metadata.items()}
    entries = {key: value for key, value in (tiny_metadata() | changes).items() if value is not None}
    write_gguf(path, entries, tensors)
    return expected


def _string(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _value(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(_string(item) for item in value)
    return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)
