"""GGUF -> the folder that `mlx_lm.load` reads: config, packed weights, tokenizer.

The packed numbers are kept bit for bit: a Q4_1 or Q8_0 block is exactly one group of MLX's affine
quantisation (w = scale * q + bias), so `mx.load` only regroups bytes, and what is written is what it gave.
Norms stay float32 and scales float16, as in the GGUF; who loads the folder picks the activation dtype
(`demo.load_target`). The folder appears complete or not at all. Llama architecture with a byte-level BPE
vocabulary only.

Sources: the GGUF format (ggml-org/ggml, docs/gguf.md), names and q/k row order (llama.cpp,
convert_hf_to_gguf.py).
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import mlx.core as mx

from dflash_mlx.demo import manifest
from dflash_mlx.demo.bpe import write_tokenizer
from dflash_mlx.demo.progress import Progress, silent
from dflash_mlx.errors import CheckpointError
from dflash_mlx.files import save_weights, whole_folder

Metadata = dict[str, mx.array | str | list[str]]

GROUP_SIZE = 32  # weights per block in Q4_1 and Q8_0
DEFAULT_BITS = 4

_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|scales|biases)")
_TOP = re.compile(r"(\w+)\.(weight|scales|biases)")

_README = """# SmolLM2-135M-Instruct, packed for MLX

Made by dflash_mlx on this machine from the GGUF named in `manifest.json`; delete the folder to have it made again.
Model: HuggingFaceTB/SmolLM2-135M-Instruct, licence Apache-2.0 (https://www.apache.org/licenses/LICENSE-2.0).
Changes: same quantised numbers in another layout (Q4_1 and Q8_0 blocks as MLX affine groups of 32, rows of the query
and key projections in Hugging Face order), tokenizer and chat template rewritten from the GGUF's metadata.
"""


def convert(gguf: Path, folder: Path, progress: Progress = silent, *, sha256: str = "") -> None:
    """Write the MLX model folder for `gguf`, replacing what is there only when the new one is complete.

    Args:
        sha256: of the GGUF, noted in the folder's manifest.
    Raises:
        CheckpointError: not a GGUF, or one with another architecture, tokenizer or set of tensors.
        OSError: the disk is full or cannot be written.
    """
    progress("Converting the GGUF to MLX", None)
    tensors, metadata = _read(gguf)
    config = model_config(metadata, tied="output.weight" not in tensors)
    weights = map_tensors(tensors, config)
    config["quantization"] = quantization(weights)
    with whole_folder(folder, replace=True) as scratch:  # what is there is incomplete or of an older format
        save_weights(scratch / "model.safetensors", weights)
        write_tokenizer(metadata, scratch)
        (scratch / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
        (scratch / "README.md").write_text(_README, encoding="utf-8")
        manifest.write(scratch, source=gguf.name, sha256=sha256)
    progress("Converted the GGUF to MLX", 1.0)


def model_config(metadata: Metadata, *, tied: bool) -> dict[str, object]:
    """The `config.json` that mlx_lm's llama wants, without its `quantization`."""
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise CheckpointError(
            f"The GGUF's general.architecture is {architecture!r}; this converter knows 'llama' only. "
            "Convert other models with `mlx_lm.convert`."
        )
    hidden = int(_number(metadata, "llama.embedding_length"))
    heads = int(_number(metadata, "llama.attention.head_count"))
    eos = int(_number(metadata, "tokenizer.ggml.eos_token_id"))
    end_of_text = int(_number(metadata, "tokenizer.ggml.unknown_token_id"))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": int(_number(metadata, "llama.block_count")),
        "intermediate_size": int(_number(metadata, "llama.feed_forward_length")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(_number(metadata, "llama.attention.head_count_kv")),
        "head_dim": hidden // heads,
        "rms_norm_eps": _number(metadata, "llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": _number(metadata, "llama.rope.freq_base"),
        "max_position_embeddings": int(_number(metadata, "llama.context_length")),
        "vocab_size": int(_number(metadata, "llama.vocab_size")),
        "tie_word_embeddings": tied,
        "bos_token_id": int(_number(metadata, "tokenizer.ggml.bos_token_id")),
        # The chat ends a turn with <|im_end|>; the base model's <|endoftext|> (its "unknown" token) also ends it.
        "eos_token_id": list(dict.fromkeys([eos, end_of_text])),
    }


def map_tensors(tensors: dict[str, mx.array], config: dict[str, object]) -> dict[str, mx.array]:
    """GGUF tensors under mlx_lm's names, q and k rows in Hugging Face order; nothing is requantised."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights: dict[str, mx.array] = {}
    for name, value in tensors.items():
        new, kind = _new_name(name)
        rows_by_head = heads.get(kind)
        weights[new] = value if rows_by_head is None else unpermute(value, int(str(rows_by_head)))
    layers = int(str(config["num_hidden_layers"]))
    expected = {f"model.layers.{i}.{part}.weight" for i in range(layers) for part in _LAYER_NAMES.values()}
    expected |= {"model.embed_tokens.weight", "model.norm.weight"}
    found = {name for name in weights if name.endswith(".weight") and name != "lm_head.weight"}
    if expected != found:
        odd = sorted(expected ^ found)
        raise CheckpointError(
            f"The GGUF has {len(found)} weights where {layers} llama layers need {len(expected)}; "
            f"first difference: {odd[0]}. Fetch the file again."
        )
    return weights


def unpermute(rows: mx.array, heads: int) -> mx.array:
    """Rows x0 y0 x1 y1 .. of each head (GGUF, rotary pairs side by side) -> x0 x1 .. y0 y1 .. (halves).

    Args:
        rows: [heads * D, columns]; packed weights, scales or biases alike, since groups run along the columns.
    """
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, half, 2, -1).swapaxes(1, 2).reshape(rows.shape)


def quantization(weights: dict[str, mx.array]) -> dict[str, object]:
    """The `quantization` entry: 4 bits in groups of 32, and by name each module with other bits."""
    entry: dict[str, object] = {"group_size": GROUP_SIZE, "bits": DEFAULT_BITS}
    for name, scales in weights.items():
        if name.endswith(".scales"):
            module = name.removesuffix(".scales")
            # scales [out, in / 32] and weight [out, in * bits / 32] in uint32
            bits = weights[f"{module}.weight"].shape[-1] // scales.shape[-1]
            if bits != DEFAULT_BITS:
                entry[module] = {"group_size": GROUP_SIZE, "bits": bits}
    return entry


def _read(gguf: Path) -> tuple[dict[str, mx.array], Metadata]:
    """Tensors and metadata; MLX's own reader, its errors in our words."""
    try:
        # MLX looks at the suffix only; the hub's cache may hand out a blob without one.
        return mx.load(str(gguf), format="gguf", return_metadata=True)  # type: ignore[return-value]
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(f"{gguf} cannot be read as GGUF ({error}). Fetch the file again.") from error


def _new_name(name: str) -> tuple[str, str]:
    """("blk.3.attn_q.scales") -> ("model.layers.3.self_attn.q_proj.scales", "attn_q")."""
    if (match := _LAYER.fullmatch(name)) and match[2] in _LAYER_NAMES:
        return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}", match[2]
    if (match := _TOP.fullmatch(name)) and match[1] in _TOP_NAMES:
        return f"{_TOP_NAMES[match[1]]}.{match[2]}", match[1]
    raise CheckpointError(f"The GGUF has a tensor {name!r} that a plain llama does not have.")


def _number(metadata: Metadata, key: str) -> float:
    """A scalar of the metadata. Seven digits: float32 1e-5 arrives as 9.999999747378752e-06."""
    value = metadata.get(key)
    if not isinstance(value, mx.array) or value.size != 1:
        raise CheckpointError(f"The GGUF's metadata has no number {key!r}.")
    return float(f"{value.item():.7g}")  # metadata, not a tensor of the model: reading it is no sync in a loop
