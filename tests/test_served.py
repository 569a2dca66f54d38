"""What is said of a model without importing MLX is what MLX's side says."""

from __future__ import annotations

import pytest
from mlx_lm import utils as mlx_lm_utils

from dflash_mlx import served
from dflash_mlx.pairing import inspection
from dflash_mlx.pairing.preflight_target import model_files
from dflash_mlx.targets import supported
from tests.families import FAMILIES, PROBED


def test_the_list_of_served_models_is_that_of_the_adapters() -> None:
    """A family that was added to `targets` alone would be listed as one that is only tried."""
    assert sorted(served.SERVED) == supported()


@pytest.mark.parametrize(
    "config",
    [family.config for family in FAMILIES + PROBED]
    + [{"model_type": kind} for kind in mlx_lm_utils.MODEL_REMAPPING]
    + [{"model_type": "whisper"}, {"model_type": "../utils"}, {}, {"model_type": "x", "text_config": None}],
    ids=lambda config: str(config.get("model_type")),
)
def test_whether_a_model_runs_is_said_as_at_loading(config: dict) -> None:
    """By a table of its own it could promise what loading refuses."""
    assert served.model_files(config) == model_files(config)
    assert served.runs(config) == inspection.runs(model_files(config))


def test_a_model_with_code_of_its_own_is_not_promised() -> None:
    runs, why = served.runs({"model_type": "llama", "model_file": "evil.py"})
    assert runs is False and "code of its own" in str(why)
