"""Every published draft format x everything that a draft has to do; the table in the README says what ran here.

The table is made from the outcomes of this run. To write it again: python -m tests.test_draft_formats
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from dflash_mlx.convert import convert
from dflash_mlx.draft.checkpoint import load_draft
from dflash_mlx.draft.model import DraftModel
from dflash_mlx.draft.quantize import DraftOptions
from dflash_mlx.errors import CheckpointError
from dflash_mlx.proposers.block import BlockProposer
from dflash_mlx.sampling import Draws, SamplingPolicy, make_sampler
from dflash_mlx.targets import target_for
from tests import checkpoints
from tests.conftest import byte_tokenizer
from tests.draft_reference import reference_denoise, reference_logits, reference_own_head, reference_path
from tests.families import VOCAB, prompt_of, tiny
from tests.generating import stream

KEPT = [*range(0, 120, 2), 201, 133, 256, 17]  # target ids of a reduced vocabulary, not in order
SLIDING = dict(layer_types=["sliding_attention", "full_attention"], sliding_window=24)
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}


def packed(folder: Path) -> Path:
    config = checkpoints.v1_config(quantization={"group_size": 32, "bits": 4})
    return checkpoints.write(folder, config, checkpoints.quantized(checkpoints.tensors_of(config)))


def converted(folder: Path) -> Path:
    return convert(str(checkpoints.dflash2(folder / "source")), folder / "converted", bits=4, group_size=32)


FORMATS: dict[str, Callable[[Path], Path]] = {
    "z-lab DFlash v1": checkpoints.v1,
    "v1, sliding + full layers": lambda folder: checkpoints.v1(folder, **SLIDING),
    "v1, YaRN": lambda folder: checkpoints.v1(folder, rope_theta=None, rope_scaling=None, rope_parameters=YARN),
    "v1, packed by MLX": packed,
    "z-lab DFlash 2": checkpoints.dflash2,
    "speculators dflash": checkpoints.speculators,
    "speculators, reduced vocabulary": lambda folder: checkpoints.speculators(folder, kept=KEPT),
    "speculators dflash2": lambda folder: checkpoints.speculators(folder, dflash2=True),
    "`dflash-metal convert` (DFlash 2, 4 bits)": converted,
}


@dataclass(frozen=True)
class Loaded:
    folder: Path
    draft: DraftModel

    @classmethod
    @lru_cache
    def of(cls, name: str) -> Loaded:
        folder = FORMATS[name](Path(tempfile.mkdtemp(prefix="dflash-formats-")))
        return cls(folder, load_draft(folder, name=name, packed=False))


def features(length: int = 30) -> mx.array:
    return mx.array(np.random.default_rng(length).normal(size=(1, length, 128)).astype(np.float32) * 3)


def proposer(draft: DraftModel, policy: SamplingPolicy | None = None) -> BlockProposer:
    target = target_for(tiny("llama"))
    made = BlockProposer(draft, target, draft.make_context(), policy, Draws(7) if policy else None)
    made.observe(features())
    return made


def hidden(draft: DraftModel) -> mx.array:
    context = draft.make_context()
    draft.extend(context, features())
    return draft.denoise(mx.random.normal((1, 6, 64), key=mx.random.key(2)), context)


def tokens(draft: DraftModel, limit: int = 6) -> list[int]:
    return proposer(draft).propose(65, limit, 31).tokens.tolist()


def reference_tokens(draft: DraftModel, limit: int) -> list[int]:
    """As `tokens`, computed in numpy."""
    target = target_for(tiny("llama"))
    ids = mx.array([[65] + [draft.config.mask_token_id] * limit])
    hidden = reference_denoise(draft, np.array(features()[0]), np.array(target.embed(ids)[0]))
    if draft.config.draft_vocab_size is None:
        logits = reference_logits(draft, hidden @ np.array(target.model.lm_head.weight, dtype=np.float64).T)
    else:
        logits = reference_own_head(draft, hidden)
    if draft.config.selector is not None:
        return reference_path(draft, hidden, logits, 65)
    rows = logits.argmax(axis=-1)
    return [KEPT[row] for row in rows] if draft.config.draft_vocab_size else rows.tolist()


def equals_the_reference(it: Loaded) -> None:
    """Greedy drafts are those of an implementation in float64 that shares no code."""
    for limit in (it.draft.block_size - 1, 3, 1):
        assert tokens(it.draft, limit) == reference_tokens(it.draft, limit)


def texts(it: Loaded, **kwargs) -> list[int]:
    made = stream("llama", byte_tokenizer(), prompt_of(21), max_tokens=24, draft_model=it.draft, **kwargs)
    return [response.token for response in made]


def keeps_the_greedy_answer(it: Loaded) -> None:
    truth = texts(it, mode="plain")
    for block in (2, 8):
        assert texts(it, block_size=block) == truth


def keeps_the_sampled_answer(it: Loaded) -> None:
    """With `match` the text is that of plain sampling; for `rejection` q is the distribution drafts come from."""
    sampler = make_sampler(temp=0.9, seed=3)
    assert texts(it, sampler=sampler, rule="match") == texts(it, sampler=sampler, mode="plain")
    proposal = proposer(it.draft, SamplingPolicy(0.9)).propose(65, 5, 31)
    q = np.array(proposal.probs)
    assert q.shape == (5, VOCAB) and np.allclose(q.sum(axis=-1), 1, atol=1e-5)
    assert (q[np.arange(5), np.array(proposal.tokens)] > 0).all()


def packs_to_four_bits(it: Loaded) -> None:
    """The backbone's matrices are rounded, fusion and heads are not; what is packed already stays as it is."""
    rounded = load_draft(it.folder, options=DraftOptions(bits=4, group_size=32))
    assert isinstance(rounded.layers[0].mlp.up_proj, nn.QuantizedLinear)
    assert mx.array_equal(rounded.fc.weight, it.draft.fc.weight)
    apart = mx.abs(hidden(rounded) - hidden(it.draft)).max().item()
    assert apart < 1e-4 if it.draft.config.quantization else 1e-3 < apart < 2
    assert len(tokens(rounded)) == 6


def converts_and_loads_again(it: Loaded) -> None:
    target = Path(tempfile.mkdtemp(prefix="dflash-formats-")) / "again"
    again = load_draft(convert(str(it.folder), target), packed=False)
    assert mx.array_equal(hidden(again), hidden(it.draft)) and tokens(again) == tokens(it.draft)


def runs_in_bfloat16(it: Loaded) -> None:
    draft = load_draft(it.folder, options=DraftOptions(dtype="bfloat16"), packed=False)
    assert hidden(draft).dtype == mx.bfloat16
    assert mx.abs(hidden(draft).astype(mx.float32) - hidden(it.draft)).max().item() < 0.5
    assert len(tokens(draft)) == 6


def refuses_a_part_left_out(it: Loaded) -> None:
    path = it.folder / "model.safetensors"
    tensors = dict(mx.load(str(path)))
    broken = Path(tempfile.mkdtemp(prefix="dflash-formats-"))
    (broken / "config.json").write_text((it.folder / "config.json").read_text())
    for change in ({"norm.weight": None}, {"layers.0.norm.weight": mx.ones(64)}):
        kept = {k: v for k, v in (tensors | change).items() if v is not None}
        mx.save_safetensors(str(broken / "model.safetensors"), kept)
        with pytest.raises(CheckpointError, match=r"missing: norm\.weight|unknown: layers\.0\.norm\.weight"):
            load_draft(broken)


def falls_back_when_it_breaks(it: Loaded) -> None:
    broken = load_draft(it.folder, packed=False)
    broken.norm.weight = broken.norm.weight * mx.nan
    responses = list(stream("llama", byte_tokenizer(), prompt_of(21), max_tokens=20, draft_model=broken))
    assert [r.token for r in responses] == texts(it, mode="plain")[:20]
    assert responses[-1].mode == "plain" and "NaN" in responses[-1].notes[0]


FEATURES: dict[str, Callable[[Loaded], None]] = {
    "drafts equal a numpy reference": equals_the_reference,
    "greedy answer kept": keeps_the_greedy_answer,
    "sampled answer kept": keeps_the_sampled_answer,
    "4 bits on load": packs_to_four_bits,
    "converts": converts_and_loads_again,
    "bfloat16": runs_in_bfloat16,
    "a missing or unknown tensor is refused": refuses_a_part_left_out,
    "NaN falls back": falls_back_when_it_breaks,
}
OUTCOMES: dict[tuple[str, str], str] = {}


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("name", FORMATS)
def test_format_and_feature(name: str, feature: str) -> None:
    OUTCOMES[name, feature] = "fails"
    FEATURES[feature](Loaded.of(name))
    OUTCOMES[name, feature] = "passes"


def table() -> str:
    lines = [f"| draft format | {' | '.join(FEATURES)} |", f"|---|{'---|' * len(FEATURES)}"]
    for name in FORMATS:
        lines.append(f"| {name} | {' | '.join(OUTCOMES[name, feature] for feature in FEATURES)} |")
    return "\n".join(lines)


README = Path(__file__).parent.parent / "dflash_mlx" / "draft" / "README.md"
BEGIN, END = "<!-- formats:begin -->\n", "\n<!-- formats:end -->"


def test_the_table_in_the_readme_is_that_of_this_run() -> None:
    if len(OUTCOMES) < len(FORMATS) * len(FEATURES):
        pytest.skip("made from all the tests above, and only some of them ran")
    _, rest = README.read_text().split(BEGIN)
    assert rest.split(END)[0] == table(), "write it again with: python -m tests.test_draft_formats"


def write_table() -> None:
    for name in FORMATS:
        for feature in FEATURES:
            test_format_and_feature(name, feature)
    before, rest = README.read_text().split(BEGIN)
    README.write_text(before + BEGIN + table() + END + rest.split(END)[1])


if __name__ == "__main__":
    write_table()
