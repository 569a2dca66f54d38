"""Shared fixtures: a byte-level tokenizer, tiny pairs of target and draft, sessions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_map_with_path
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper

from dflash_mlx import blas
from dflash_mlx.accept import make_decider
from dflash_mlx.blocksize import FixedBlock
from dflash_mlx.cache import TargetCache
from dflash_mlx.config import Convolution, DraftConfig, Selector
from dflash_mlx.decode import Session
from dflash_mlx.draft.model import DraftModel
from dflash_mlx.kernels import gate
from dflash_mlx.kernels.choice import STOCK, Kernels, references
from dflash_mlx.proposers import NullProposer
from dflash_mlx.sampling import Draws, SamplingPolicy
from dflash_mlx.targets import target_for
from tests.families import VOCAB, tiny


def pytest_report_header() -> str:
    import mlx_lm

    return f"mlx {mx.__version__}, mlx-lm {mlx_lm.__version__}, device {mx.default_device()}"


@pytest.fixture(scope="session", autouse=True)
def races_of_their_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """On a Mac tests that load a pair race its kernels; what they find about tiny models is not the user's."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("races")
        patch.setattr(gate, "default_cache_dir", lambda: folder)
        yield


@pytest.fixture(scope="module", autouse=True)
def own_blas():
    """What a module bound is not left to the next one in the process: with another BLAS the bits are others."""
    yield
    if blas.status().active:
        blas.release()


@pytest.fixture(scope="session")
def tokenizer() -> TokenizerWrapper:
    """256 bytes, <pad> (256) and <eos> (257, which the tiny models cannot emit): characters are split over tokens."""
    return byte_tokenizer()


def byte_tokenizer(eos_ids: Sequence[int] = ()) -> TokenizerWrapper:
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in ("<pad>", "<eos>")])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>", clean_up_tokenization_spaces=False)
    wrapped.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    return TokenizerWrapper(wrapped, BPEStreamingDetokenizer, eos_token_ids=eos_ids)


DRAFT_CONFIG = {
    "architectures": ["DFlashDraftModel"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "num_target_layers": 4,
    "block_size": 16,
    "dflash_config": {"target_layer_ids": [0, 2], "mask_token_id": 256},
}
DRAFT_WINDOW = 8  # of the sliding layer of `draft_for`


def draft_config(**changes: object) -> DraftConfig:
    """A small draft for the tiny targets (hidden 64, 4 layers, 257 ids)."""
    nested = DRAFT_CONFIG["dflash_config"] | dict(changes.pop("dflash_config", {}))  # type: ignore[call-overload]
    return DraftConfig.from_dict(DRAFT_CONFIG | {"dflash_config": nested} | changes)


def tiny_draft(seed: int = 3, **changes: object) -> DraftModel:
    mx.random.seed(seed)
    draft = DraftModel(draft_config(**changes))
    draft.eval()
    mx.eval(draft.parameters())
    return draft


DFLASH2 = dict(convolution=Convolution(2, 16), selector=Selector(8, 6))
REDUCED = 64  # rows of the head of its own in OWN_PARTS
OWN_PARTS = dict(draft_vocab_size=REDUCED, own_embedding=True)


def special_draft(parts: Mapping[str, object], seed: int = 3, **changes: object) -> DraftModel:
    """A draft with parts that a v1 draft of z-lab's has not, all of them random; a small head gets random ids."""
    mx.random.seed(seed)
    draft = DraftModel(replace(draft_config(**changes), **parts))  # type: ignore[arg-type]
    noise = {"base_kernel": 0.5, "kernel_projection.weight": 0.1, "predecessor_codebook": 4.0}

    def disturb(key: str, array: mx.array) -> mx.array:
        scale = next((scale for name, scale in noise.items() if key.endswith(name)), 0.0)
        return array + mx.random.normal(array.shape) * scale if scale else array

    draft.update(tree_map_with_path(disturb, draft.parameters()))
    if draft.config.draft_vocab_size is not None and draft.config.draft_vocab_size < draft.config.vocab_size:
        draft.map_ids(mx.random.permutation(draft.config.vocab_size)[: draft.config.draft_vocab_size])
    draft.eval()
    mx.eval(draft.parameters())
    return draft


@lru_cache
def draft_for(name: str) -> DraftModel:
    """A draft with a sliding and a full layer, for this tiny target."""
    kinds = ["sliding_attention", "full_attention"]
    layers = target_for(tiny(name)).spec.n_layers
    return tiny_draft(num_target_layers=layers, layer_types=kinds, sliding_window=DRAFT_WINDOW)


@pytest.fixture
def draft() -> DraftModel:
    return tiny_draft()


KERNELS = {"stock": STOCK, "references": references()}  # what may run operations without Metal: nothing may differ


def greedy_session(
    name: str,
    proposer=None,
    block_size: int = 4,
    dtype: mx.Dtype = mx.float32,
    pipelined: bool = False,
    kernels: Kernels = STOCK,
) -> Session:
    """A fresh session over a tiny target."""
    return session_over(tiny(name, dtype), proposer, block_size, pipelined, kernels)


def session_over(
    model: nn.Module, proposer=None, block_size: int = 4, pipelined: bool = False, kernels: Kernels = STOCK
) -> Session:
    """A fresh session over any target."""
    target = target_for(model, kernels)
    decider = make_decider(SamplingPolicy(), (), Draws(0), kernels=kernels)
    cache = TargetCache(target.make_entries(), 0)
    schedule = FixedBlock(block_size if proposer else 1)
    return Session(target, cache, proposer or NullProposer(), decider, schedule, pipelined=pipelined)


def tokens_of(commits) -> list[int]:
    return [token for commit in commits for token in commit.tokens]
