"""A tokenizer of a model that thinks and calls tools, with every marker as one token that the tiny models can emit."""

from __future__ import annotations

import tempfile
from functools import lru_cache
from pathlib import Path

from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tokenizer_utils import load as load_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<|im_start|>", "<|im_end|>", "<pad>")
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
# ChatML as Qwen's: the switch decides what the answer begins with, and old reasoning is not repeated.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
    "{# <tool_call> with tool_call.name and its arguments as JSON #}"
)


def raw_tokenizer(markers: tuple[str, ...] = MARKERS, template: str = TEMPLATE) -> PreTrainedTokenizerFast:
    """Bytes, where the tokens take the ids of control characters, which nobody writes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    controls = [char for char in alphabet if 0x100 < ord(char) < 0x10A]  # bytes 1..9
    names = [*SPECIAL, *markers]
    vocab = {char: i for i, char in enumerate(alphabet)}
    for name, char in zip(names, controls, strict=False):
        vocab[name] = vocab.pop(char)
    raw = Tokenizer(BPE(vocab=vocab, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_tokens([AddedToken(n, special=n in SPECIAL, normalized=False) for n in names])
    made = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<pad>", clean_up_tokenization_spaces=False
    )
    made.chat_template = template
    return made


@lru_cache(maxsize=8)
def thinking_tokenizer(markers: tuple[str, ...] = MARKERS, template: str = TEMPLATE) -> TokenizerWrapper:
    """As mlx_lm loads it from a folder: markers and parser are what mlx_lm finds out by itself."""
    with tempfile.TemporaryDirectory() as folder:
        raw_tokenizer(markers, template).save_pretrained(folder)
        return load_tokenizer(Path(folder))
