"""Twenty tokens decoded twice, plainly and with drafts, which have to be the same: does exact speculation work here?

With the demo pair if it was converted before (nothing is fetched), else with a random pair made in memory: two layers,
and a draft that knows nothing, so every rejection goes through the rollback.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from dflash_mlx import demo
from dflash_mlx.config import DraftConfig
from dflash_mlx.decode import decode
from dflash_mlx.divergence import compare
from dflash_mlx.draft.model import DraftModel
from dflash_mlx.errors import DFlashError
from dflash_mlx.load import load
from dflash_mlx.options import Options
from dflash_mlx.request import plan

TOKENS = 20
_DEMO_IDS = (504, 2365, 6354, 16438, 27003, 690, 260, 23790, 2767, 28, 284, 5219, 355, 4420)
_RANDOM_IDS = tuple(range(3, 200, 14))
_VOCABULARY, _LAYERS, _HIDDEN = 256, 2, 64
_SIZES = dict(
    hidden_size=_HIDDEN,
    num_hidden_layers=_LAYERS,
    intermediate_size=128,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=_VOCABULARY,
    rms_norm_eps=1e-5,
)


@dataclass(frozen=True)
class Trial:
    """A pair, and the ids that are continued."""

    name: str
    model: nn.Module
    draft: DraftModel
    ids: Sequence[int]


def self_test(kernels: str, problems: list[str], trial: Trial | None = None) -> dict[str, Any]:
    """Both answers compared; a difference that rounding does not explain is a problem.

    Args:
        kernels: as for `stream_generate`. No kernel is raced for this.
        trial: the demo or a random pair if None.
    """
    try:
        trial = trial or demo_trial() or random_trial()
        plain, drafted = (answer(trial, mode, kernels) for mode in ("plain", "dflash"))
        found = compare(trial.model, trial.ids, plain, drafted[: len(plain)], kernels=kernels)
    except (DFlashError, RuntimeError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        problems.append(
            f"the self-test ended with an error ({reason}): try --kernels off, and report it with doctor --json"
        )
        return dict(pair=trial.name if trial else None, tokens=0, kind=None, index=None, explanation=reason)
    if found.kind == "bug":
        problems.append(
            f"decoding with drafts gave other tokens than without ({found.explanation} Pair: {trial.name}): decode "
            "with --mode plain, see whether --kernels off cures it, and report it with doctor --json"
        )
    return dict(pair=trial.name, tokens=len(drafted), kind=found.kind, index=found.index, explanation=found.explanation)


def answer(trial: Trial, mode: str, kernels: str) -> list[int]:
    """Greedy ids."""
    options = Options(max_tokens=TOKENS, mode=mode, kernels=kernels if mode == "dflash" else "off")
    session = plan(trial.model, trial.draft if mode == "dflash" else None, options).open(())
    return [token for commit in decode(session, trial.ids, max_tokens=TOKENS) for token in commit.tokens]


def demo_trial() -> Trial | None:
    """The demo pair; None if it is not on this machine yet."""
    if demo.converted_folder() is None:
        return None
    model, _, draft = load("demo", draft="auto", kernels="off", blas="off")  # the doctor bound one if it is wanted
    return Trial("demo", model, draft, _DEMO_IDS)


def random_trial() -> Trial:
    """A pair of random weights, widened so that the text is not a short loop."""
    from mlx_lm.models import llama

    key = mx.random.key(0)
    sizes = dict(_SIZES, model_type="llama", rope_theta=1000.0, tie_word_embeddings=False)
    model: nn.Module = llama.Model(llama.ModelArgs.from_dict(sizes))
    draft = DraftModel(
        DraftConfig.from_dict(
            dict(
                _SIZES,
                architectures=["DFlashDraftModel"],
                rope_theta=1000.0,
                max_position_embeddings=2048,
                num_target_layers=_LAYERS,
                block_size=8,
                dflash_config=dict(target_layer_ids=[0], mask_token_id=_VOCABULARY - 1),
            )
        )
    )
    for module, scale in ((model, 0.4), (draft, 0.1)):
        keys = iter(mx.random.split(key, 100))
        drawn = tree_map(
            lambda a, keys=keys, scale=scale: scale * mx.random.normal(a.shape, key=next(keys)) if a.ndim >= 2 else a,
            module.parameters(),
        )
        module.update(drawn)
        module.eval()
        mx.eval(module.parameters())
    return Trial("a random pair", model, draft, _RANDOM_IDS)
