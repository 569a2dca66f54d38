"""What a draft to be trained looks like: the recipe's choices, and everything else as the target has it."""

from __future__ import annotations

import hashlib
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from dflash_mlx import demo
from dflash_mlx.config import FULL, SLIDING, Convolution, DraftConfig, Selector
from dflash_mlx.draft.checkpoint import check_sizes, read_config
from dflash_mlx.draft.formats import read_tensors
from dflash_mlx.draft.formats_shapes import check_shapes
from dflash_mlx.draft.vocabulary import FILE, read_vocabulary
from dflash_mlx.errors import FetchError
from dflash_mlx.hub.cache import DRAFT
from dflash_mlx.hub.repository import Progress, find
from dflash_mlx.pairing.registry import DEMO
from dflash_mlx.spellings.variants import V1, V2
from dflash_mlx.targets import Target
from dflash_mlx.training.from_target import mlp_width
from dflash_mlx.training.mask_token import find_mask_token
from dflash_mlx.training.recipe import BLOCK, FROM_TARGET, LONGEST_BLOCK, RANDOM, Recipe, RecipeError
from dflash_mlx.training.target_facts import cap_of, embedding_scale, rope_of, size_of

_FEATURES = 5
_KERNEL, _GROUP = 2, 16  # of DFlash 2's convolutions, as published
_EPS = 1e-6


def spread_taps(layers: int, count: int = _FEATURES) -> tuple[int, ...]:
    """`count` of the target's layers, evenly from the second to the third-last; fewer if there are fewer of these.

    Source: z-lab `dflash`, `build_target_layer_ids`.
    """
    count = max(1, min(count, layers - 3))
    if count == 1:
        return (layers // 2,)
    return tuple(round(1 + index * (layers - 4) / (count - 1)) for index in range(count))


def draft_config(target: Target, tokenizer: TokenizerWrapper, recipe: Recipe, name: str = "the target") -> DraftConfig:
    """The draft that a recipe makes for a target. Of a draft that is begun with, its own sizes hold.

    Args:
        name: how messages call the target.
    Raises:
        RecipeError: the recipe asks for what this target, or the draft that is begun with, does not have.
        IncompatiblePair: the draft that is begun with was made for another target.
        CheckpointError, FetchError: it cannot be read or fetched; or no draft of these sizes can be built.
    """
    folder = initial_folder(recipe)
    if folder is not None:
        return _adopted(folder, target, recipe, name)
    spec, args = target.spec, getattr(target.text, "args", None)
    hidden = spec.hidden_size
    heads = size_of(args, "num_attention_heads") or max(1, hidden // 128)
    theta, scaling = rope_of(args)
    return DraftConfig(
        hidden_size=hidden,
        num_layers=recipe.layers,
        intermediate_size=mlp_width(target) or size_of(args, "intermediate_size") or 3 * hidden,
        num_heads=heads,
        num_kv_heads=size_of(args, "num_key_value_heads") or heads,
        head_dim=size_of(args, "head_dim") or hidden // heads,
        vocab_size=spec.vocab_size,
        rms_norm_eps=float(getattr(getattr(target, "final_norm", None), "eps", _EPS)),
        rope_theta=theta,
        rope_scaling=scaling,
        rope_traditional=bool(getattr(args, "rope_traditional", False)),
        max_position_embeddings=spec.max_positions or 0,
        layer_types=(SLIDING if recipe.window else FULL,) * (recipe.layers - recipe.full) + (FULL,) * recipe.full,
        sliding_window=recipe.window if recipe.window and recipe.full < recipe.layers else None,
        causal=False if recipe.second else None,  # as the published ones of each kind
        attention_bias=False,
        block_size=recipe.block_size or BLOCK,
        whole_block=True,  # it sees no other in training
        mask_token_id=find_mask_token(tokenizer, spec.vocab_size, recipe.mask_token_id),
        target_layer_ids=_taps(recipe, spec.n_layers, name),
        num_target_layers=spec.n_layers,
        input_embedding_scale=embedding_scale(target),
        output_multiplier=float(getattr(args, "output_multiplier", None) or 1.0),
        final_logit_softcapping=cap_of(target),
        **(_second(recipe, hidden, spec.vocab_size) if recipe.second else {}),
    )


def settled(recipe: Recipe, config: DraftConfig) -> Recipe:
    """The recipe with what the config decided, so that it says what is really trained."""
    fields: dict[str, Any] = {
        "layers": config.num_layers,
        "block_size": config.block_size,
        "taps": config.target_layer_ids if list(config.target_layer_ids) == sorted(config.target_layer_ids) else (),
        "mask_token_id": config.mask_token_id,
        "window": config.sliding_window or 0,
        "full": config.layer_types.count(FULL) if config.sliding_window else 0,
        "second": config.selector is not None,
    }
    if config.selector is not None:
        fields |= {"rank": config.selector.rank, "candidates": config.selector.top_k}
    return recipe.changed(**fields)


def config_json(config: DraftConfig, *, dtype: str = "float32", tied: bool = False) -> dict[str, Any]:
    """config.json in z-lab's spelling, from which `DraftConfig.from_dict` reads the same config.

    Not in it is what this spelling has no key for: `verifier`, and an embedding or a full head of the draft's own,
    which only the tensors tell.

    Args:
        dtype: of the stored weights. tied: whether the target's head is its embedding; for other readers.
    """
    nested: dict[str, Any] = {
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
        "num_target_layers": config.num_target_layers,
        "runtime_block_size": config.runtime_block_size,
        "whole_block": config.whole_block or None,
        "draft_window_size": config.context_window,
        "input_embedding_scale": config.input_embedding_scale,
        "output_multiplier": config.output_multiplier,
        "final_logit_softcapping": config.final_logit_softcapping,
    }
    if config.convolution is not None and config.selector is not None:
        nested |= {f"conv_{key}": value for key, value in asdict(config.convolution).items()}
        nested |= {f"selector_{key}": value for key, value in asdict(config.selector).items()}
    found: dict[str, Any] = {
        "architectures": [V1 if config.selector is None else V2],
        "model_type": "qwen3",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": config.attention_bias,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope_scaling is None else dict(config.rope_scaling),
        "rope_is_neox_style": False if config.rope_traditional else None,
        "max_position_embeddings": config.max_position_embeddings,
        "layer_types": list(config.layer_types),
        "sliding_window": config.sliding_window,
        "use_sliding_window": config.sliding_window is not None,
        "is_causal": config.causal,
        "num_target_layers": config.num_target_layers,
        "block_size": config.block_size,
        "tie_word_embeddings": tied,
        "dtype": dtype,
        "quantization": None if config.quantization is None else dict(config.quantization),
    }
    plain = {"input_embedding_scale": 1.0, "output_multiplier": 1.0}
    nested = {key: value for key, value in nested.items() if value is not None and value != plain.get(key)}
    return {key: value for key, value in found.items() if value is not None} | {"dflash_config": nested}


def initial_folder(recipe: Recipe, tell: Progress = lambda message, share: None) -> Path | None:
    """The folder of the draft that a recipe begins with, fetched if need be; None if it begins with none.

    Raises:
        FetchError, CheckpointError: it cannot be had.
    """
    if recipe.initial in (FROM_TARGET, RANDOM):
        return None
    if recipe.initial == DEMO:
        return demo.draft_folder()
    try:
        return find(recipe.initial, DRAFT).fetch(tell)
    except FetchError as error:
        raise type(error)(
            f"The draft {recipe.initial} that the training begins with cannot be had. {error} A run that is resumed "
            "needs the one that it was begun with: then restore it."
        ) from error


def initial_vocabulary(recipe: Recipe, config: DraftConfig) -> np.ndarray | None:
    """[n] int32: tokens that the draft which a recipe begins with proposes, ascending; None for all.

    Args:
        config: of `draft_config`. As DFlash 2 it proposes all: the selector scores every token.
    Raises:
        FetchError, CheckpointError: it cannot be had.
    """
    folder = initial_folder(recipe)
    return None if folder is None or config.selector is not None else read_vocabulary(folder, config, recipe.initial)


def initial_digest(recipe: Recipe) -> str | None:
    """SHA-256 over all of the draft that a recipe begins with; None if it begins with none.

    Raises:
        FetchError, CheckpointError: it cannot be had.
    """
    folder = initial_folder(recipe)
    if folder is None:
        return None
    digest = hashlib.sha256()
    for path in [folder / "config.json", folder / FILE, *sorted(folder.glob("*.safetensors"))]:
        if path.exists():
            with path.open("rb") as file:
                digest.update(f"{path.name} ".encode() + hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _adopted(folder: Path, target: Target, recipe: Recipe, name: str) -> DraftConfig:
    """The config of the draft in a folder as the recipe goes on with it: fewer positions, or DFlash 2 of a v1 draft."""
    shapes = {key: tuple(value.shape) for key, value in read_tensors(folder, evaluate=False).items()}
    config = check_shapes(read_config(folder), shapes, recipe.initial)
    check_sizes(config, recipe.initial, target.spec, name)
    if config.draft_vocab_size is not None:
        raise RecipeError(
            f"The draft {recipe.initial} has a head of its own, of {config.draft_vocab_size} tokens. Training shares "
            f"the head of {name}, and a draft trained with one head proposes wrongly with another. Begin with a draft "
            'without one, or with "target".'
        )
    _refuse_conflicts(config, recipe)
    second = recipe.second and config.selector is None
    sized = config.own_embedding or config.selector is not None  # it holds a row per token
    vocabulary = config.vocab_size if sized else target.spec.vocab_size
    block = min(config.block_size, recipe.block_size or LONGEST_BLOCK)
    return replace(
        config,
        block_size=block,
        whole_block=True,
        vocab_size=vocabulary,
        runtime_block_size=min(config.runtime_block_size, block) if config.runtime_block_size else None,
        num_target_layers=target.spec.n_layers,
        quantization=None,  # it is trained in floats
        verifier=None,
        **(_second(recipe, config.hidden_size, vocabulary) if second else {}),
    )


def _refuse_conflicts(config: DraftConfig, recipe: Recipe) -> None:
    """Raises RecipeError where the recipe asks for something that the draft is not. A default asks for nothing."""
    default, made = Recipe(), settled(recipe.changed(vocabulary=0), config)
    names = ["layers", "taps", "window", "full", "mask_token_id"]
    names += ["rank", "candidates"] if config.selector is not None else []
    found = {"taps": config.target_layer_ids}
    conflicts = [(key, vars(recipe)[key], found.get(key, vars(made)[key])) for key in names]
    conflicts = [entry for entry in conflicts if entry[1] not in (vars(default)[entry[0]], entry[2])]
    if recipe.block_size > config.block_size:
        conflicts.append(("block_size", recipe.block_size, config.block_size))
    if config.selector is not None and recipe.vocabulary:
        conflicts.append(("vocabulary", recipe.vocabulary, "0, as for every DFlash 2 draft"))
    if conflicts:
        key, asked, has = conflicts[0]
        longer = " or less" if key == "block_size" else ""
        raise RecipeError(
            f"The recipe asks for `{key}` {_shown(asked)}, and the draft {recipe.initial} that it begins with has "
            f"{_shown(has)}. What a draft has learned holds only for what it was made with. Leave `{key}` out, set it "
            f'to {_shown(has)}{longer}, or begin with "target".'
        )


def _shown(value: Any) -> str:
    return str(list(value) if isinstance(value, tuple) else value)


def _taps(recipe: Recipe, layers: int, name: str) -> tuple[int, ...]:
    beyond = [tap for tap in recipe.taps if tap >= layers]
    if beyond:
        raise RecipeError(
            f"`taps` have to be in 0..{layers - 1}, the layers of {name} counted from 0, got {beyond[0]}. There would "
            "be nothing to feed the draft with. Choose other layers, or leave `taps` out."
        )
    return recipe.taps or spread_taps(layers)


def _second(recipe: Recipe, hidden: int, vocabulary: int) -> dict[str, Any]:
    """DFlash 2's parts."""
    if recipe.candidates > vocabulary:
        raise RecipeError(
            f"`candidates` has to be at most {vocabulary} (tokens of the target), got {recipe.candidates}. The "
            "selector chooses among different tokens. Ask for fewer."
        )
    return {
        "convolution": Convolution(_KERNEL, math.gcd(_GROUP, hidden)),
        "selector": Selector(recipe.rank, recipe.candidates),
    }
