"""A draft whose folder lists the tokens worth proposing: less is computed, other tokens are proposed, none is written.

The target's text must not depend on the list, and proposals may differ only where it leaves the best token out.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tuner.lora import LoRALinear

from dflash_mlx import convert, load, load_prompt_cache, make_prompt_cache, save_prompt_cache, stream_generate
from dflash_mlx.__main__ import main
from dflash_mlx.accept import make_decider
from dflash_mlx.cli import generate_main
from dflash_mlx.decode import decode
from dflash_mlx.draft.checkpoint import load_draft
from dflash_mlx.draft.model import DraftModel
from dflash_mlx.draft.quantize import DraftOptions
from dflash_mlx.draft.vocabulary import FILE, borrow_head, head_rows, read_vocabulary, write_vocabulary
from dflash_mlx.errors import CheckpointError, IncompatiblePair
from dflash_mlx.kernels.choice import references
from dflash_mlx.kernels.modules.linear import cases_of
from dflash_mlx.proposers.block import BlockProposer
from dflash_mlx.proposers.cases import cases_of_pair
from dflash_mlx.proposers.head import head_cases
from dflash_mlx.sampling import Draws, SamplingPolicy
from dflash_mlx.targets import Target, target_for
from tests import checkpoints
from tests.conftest import session_over, tokens_of
from tests.fake_hub import FakeHub
from tests.families import BY_NAME, VOCAB, build
from tests.folders import target_folder
from tests.generating import PROMPT
from tests.markov import chi_square_z

KINDS = {"untied": {}, "tied": dict(tie_word_embeddings=True)}
IDS = sorted({*range(0, VOCAB, 3), 1, 2})  # 88, of which the kernel for packed layers takes blocks: a multiple of 8


@lru_cache
def model_of(kind: str, bits: int | None = None) -> nn.Module:
    family = BY_NAME["llama"]
    family = replace(family, config=family.config | KINDS[kind], quantised=None if bits is None else (bits, 32))
    return build(family)


def folder_with(folder: Path, ids: list[int] | None = IDS, **changes: Any) -> Path:
    config = checkpoints.v1_config(**changes)
    tensors = checkpoints.tensors_of(config)  # widened, so that a block's tokens differ
    wide = {name: value * 6 if value.ndim > 1 else value for name, value in tensors.items()}
    checkpoints.write(folder, config, wide)
    if ids is not None:
        write_vocabulary(folder, VOCAB, ids)
    return folder


def draft_for(folder: Path, target: Target, **options: Any) -> DraftModel:
    draft = load_draft(folder, options=DraftOptions(**options))
    borrow_head(draft, target)
    return draft


def proposals(
    draft: DraftModel, target: Target, rows: int = 7, sampling: tuple = (), kernels: Any = None, seed: int = 1
) -> Any:
    """Of a block after nine positions of noise."""
    features = mx.array(np.random.default_rng(seed).normal(size=(1, 9, 128)).astype(np.float32))
    context = draft.make_context()
    draft.extend(context, features.astype(draft.dtype))
    options = {} if kernels is None else {"kernels": kernels}
    return BlockProposer(draft, target, context, *sampling, **options).propose(7, rows, 10)


# --- What is proposed ---


@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_proposals_differ_only_where_the_best_token_is_left_out(tmp_path: Path, kind: str, bits: int | None) -> None:
    """Other rows than those of the ids, or rows that were packed again, would cost acceptance and nothing else."""
    target = target_for(model_of(kind, bits))
    everything = load_draft(folder_with(tmp_path / "d"), options=DraftOptions(vocabulary="full"))
    full = [proposals(everything, target, 15, seed=seed).tokens.tolist() for seed in range(4)]
    tokens = [token for block in full for token in block]
    frequent = max(sorted(set(tokens)), key=tokens.count)
    ids = sorted({*IDS, *tokens} - {frequent})
    write_vocabulary(tmp_path / "d", VOCAB, ids)
    assert len(set(tokens)) > 1, "the case proves nothing"
    reduced = draft_for(tmp_path / "d", target)
    assert everything.reduced_size is None and reduced.reduced_size == len(ids)
    drawing = SamplingPolicy(1.0), Draws(3)
    for seed, block in enumerate(full):
        q_full, q = (proposals(d, target, 15, drawing, seed=seed).probs for d in (everything, reduced))
        listed = q_full[:, mx.array(ids)]
        best = proposals(reduced, target, 15, seed=seed).tokens.tolist()
        assert best == mx.array(ids)[mx.argmax(listed, axis=-1)].tolist()
        assert [a == b for a, b in zip(block, best, strict=True)] == [token in ids for token in block]
        outside = sorted(set(range(VOCAB)) - set(ids))
        assert q[:, mx.array(outside)].max().item() == 0
        wanted = listed / listed.sum(axis=-1, keepdims=True)
        np.testing.assert_allclose(np.array(q[:, mx.array(ids)]), np.array(wanted), rtol=2e-4, atol=1e-6)


def test_proposals_are_the_same_through_the_kernels(tmp_path: Path) -> None:
    """On a Mac the borrowed rows go through the kernels for heads and packed layers."""
    target = target_for(model_of("untied", 4))
    draft = draft_for(folder_with(tmp_path / "d"), target)
    stock, own = proposals(draft, target), proposals(draft, target, kernels=references())
    assert stock.tokens.tolist() == own.tokens.tolist()


def test_the_kernels_for_a_packed_head_are_raced_for_the_borrowed_rows(tmp_path: Path) -> None:
    """What is not raced stays closed, and a Mac would then run the reduced head without its kernel."""
    model = model_of("untied", 4)
    kernels = references()
    target = target_for(model, kernels)
    assert isinstance(target.head_module, nn.QuantizedLinear)
    draft = draft_for(folder_with(tmp_path / "d"), target_for(model))
    wanted = {*cases_of(draft.head, mx.float32), *head_cases(draft, target, kernels)}  # type: ignore[arg-type]
    assert len(wanted) > len(head_cases(draft, target, kernels)) > 0
    assert wanted <= set(cases_of_pair(target, draft, kernels))


def test_the_borrowed_head_is_given_the_targets_type(tmp_path: Path) -> None:
    """As the whole head is: a float32 draft beside a bfloat16 target proposes what it proposes there."""
    model = build(BY_NAME["llama"], mx.bfloat16)
    target = target_for(model)
    draft = draft_for(folder_with(tmp_path / "d", dtype="float32"), target, dtype="float32")
    assert draft.dtype == mx.float32
    everything = load_draft(tmp_path / "d", options=DraftOptions(dtype="float32", vocabulary="full"))
    hidden = mx.array(np.random.default_rng(2).normal(size=(3, 64)).astype(np.float32))
    full, found = (BlockProposer(d, target, d.make_context())._logits(hidden) for d in (everything, draft))
    assert found.dtype == full.dtype == mx.bfloat16 and mx.array_equal(found, full[:, mx.array(IDS)])


def test_the_drafts_own_scaling_applies_to_the_borrowed_rows(tmp_path: Path) -> None:
    target = target_for(model_of("untied"))
    draft = draft_for(folder_with(tmp_path / "d", output_multiplier=0.25, final_logit_softcapping=5.0), target)
    plain = draft_for(folder_with(tmp_path / "e"), target)
    sampling = (SamplingPolicy(1.0), Draws(3))
    q, raw = (mx.log(proposals(d, target, 5, sampling).probs[:, mx.array(IDS)]) for d in (draft, plain))
    head = head_rows(target.head_module, mx.array(IDS))
    assert head is not None
    hidden = {}
    for name, each in (("capped", draft), ("raw", plain)):
        context = each.make_context()
        features = mx.array(np.random.default_rng(1).normal(size=(1, 9, 128)).astype(np.float32))
        each.extend(context, features)
        ids = mx.array([[7, 256, 256, 256, 256, 256]])
        hidden[name] = head(each.denoise(target.block_rows(ids), context)[0])
    capped = 5 * mx.tanh(hidden["capped"] * 0.25 / 5)
    for found, logits in ((q, capped), (raw, hidden["raw"])):
        expected = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        np.testing.assert_allclose(np.array(found), np.array(expected), atol=1e-4)


@pytest.mark.parametrize("mode", ["affine", "mxfp4"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_rows_are_gathered_as_they_are_stored(packed: bool, bias: bool, mode: str) -> None:
    """Bit for bit, with their scales and biases, and without unpacking anything."""
    mx.random.seed(0)
    layer: nn.Module = nn.Linear(64, 100, bias=bias)
    if packed:
        layer = layer.to_quantized(32, 4 if mode == "mxfp4" else 8, mode=mode)
    rows, x = head_rows(layer, mx.array([3, 50, 99])), mx.random.normal((5, 64))
    assert type(rows) is type(layer)
    assert rows is not None and mx.array_equal(rows(x), layer(x)[:, mx.array([3, 50, 99])])
    assert rows.weight.dtype == layer.weight.dtype and len(rows.weight) == 3


# --- What is written ---


def text_of(model: nn.Module, draft: DraftModel | None, policy: SamplingPolicy, rule: str, **options: Any) -> list[int]:
    draws = Draws(3)
    target = target_for(model)
    drawing = (policy, draws) if rule == "rejection" else ()
    made = draft and BlockProposer(draft, target, draft.make_context(), *drawing)
    session = session_over(model, made, 6, **options)
    session.decider = make_decider(policy, (), draws, rule=rule)
    tokens = tokens_of(decode(session, PROMPT, max_tokens=40))
    if draft is not None:
        assert session.stats.drafted > 40
    return tokens


@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_the_text_is_the_targets_own(tmp_path: Path, kind: str, bits: int | None, pipelined: bool) -> None:
    """Greedy, and drawn with rule "match"; the target writes tokens that the draft can never propose."""
    model = model_of(kind, bits)
    draft = draft_for(folder_with(tmp_path / "d"), target_for(model))
    for policy in (SamplingPolicy(), SamplingPolicy(0.8)):
        plain = text_of(model, None, policy, "match")
        assert text_of(model, draft, policy, "match", pipelined=pipelined) == plain
        assert set(plain) - set(IDS) and set(plain) & set(IDS)


def test_the_text_is_the_targets_own_through_the_kernels(tmp_path: Path) -> None:
    """References of the kernels stand for them on this machine."""
    model = model_of("untied", 4)
    draft = draft_for(folder_with(tmp_path / "d"), target_for(model))
    plain = text_of(model, None, SamplingPolicy(), "match")
    assert text_of(model, draft, SamplingPolicy(), "match", kernels=references()) == plain


def test_rejection_over_a_small_vocabulary_keeps_the_targets_distribution(tmp_path: Path) -> None:
    """A q that were not 0 outside the list, or not normalised inside it, would shift what is drawn."""
    model, policy = model_of("untied"), SamplingPolicy(0.7, top_k=4)
    target = target_for(model)
    draft = draft_for(folder_with(tmp_path / "d"), target)
    counts: dict[str, dict[int, int]] = {"plain": {}, "reduced": {}}
    for seed in range(300):
        draws = Draws(seed)
        for name, proposer in (
            ("plain", None),
            ("reduced", BlockProposer(draft, target, draft.make_context(), policy, draws)),
        ):
            session = session_over(model, proposer, 3)
            session.decider = make_decider(policy, (), draws if name == "reduced" else Draws(10_000 + seed))
            second = tokens_of(decode(session, PROMPT, max_tokens=2))[1]
            counts[name][second] = counts[name].get(second, 0) + 1
    seen = sorted(counts["plain"].keys() | counts["reduced"].keys())
    plain, reduced = (np.array([counts[name].get(token, 0) for token in seen], float) for name in counts)
    pooled = (plain + reduced) / 2
    rare = pooled < 5
    merged = [np.append(each[~rare], each[rare].sum()) for each in (reduced, pooled)]
    keep = merged[1] > 0
    assert abs(chi_square_z(merged[0][keep], merged[1][keep] / merged[1][keep].sum())) < 3
    assert any(token not in IDS for token in seen)


# --- How it is loaded ---


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    root = tmp_path_factory.mktemp("models")
    return str(target_folder(root / "tiny")), str(folder_with(root / "tiny-draft"))


def test_load_uses_the_list_and_can_be_told_not_to(pair: tuple[str, str], tokenizer: TokenizerWrapper) -> None:
    """The same text either way, so that the effect can be measured; responses say what ran."""
    answers = {}
    for choice, size in (("auto", len(IDS)), ("full", None)):
        model, tokenizer, draft = load(pair[0], draft=pair[1], draft_vocabulary=choice, blas="off")
        assert draft.reduced_size == size
        responses = list(stream_generate(model, tokenizer, PROMPT, 24, draft, mode="dflash"))
        assert {response.draft_vocabulary for response in responses} == {size}
        answers[choice] = [response.token for response in responses]
    assert answers["auto"] == answers["full"]
    plain = list(stream_generate(model, tokenizer, PROMPT, 24))
    assert [response.token for response in plain] == answers["full"] and plain[0].draft_vocabulary is None


def test_a_draft_that_is_handed_over_borrows_when_it_meets_its_target(
    tmp_path: Path, tokenizer: TokenizerWrapper
) -> None:
    """`load_draft` knows no target; nor may it keep another target's rows."""
    draft = load_draft(folder_with(tmp_path / "d"))
    heads = []
    for kind in ("untied", "tied", "tied"):
        model = model_of(kind)
        responses = list(stream_generate(model, tokenizer, PROMPT, 8, draft, mode="dflash"))
        assert responses[-1].draft_vocabulary == len(IDS) and draft.head is not None
        assert mx.array_equal(draft.head.weight, target_for(model).head_module.weight[mx.array(IDS)])
        heads.append(draft.head)
    assert heads[1] is heads[2], "gathered again for every request"


def test_the_borrowed_rows_are_no_part_of_the_draft(tmp_path: Path) -> None:
    """Else they would be counted, saved and trained as the draft's own, and a kept context would not fit any more."""
    draft = load_draft(folder_with(tmp_path / "d"))
    before = [name for name, _ in tree_flatten(draft.parameters())]
    borrow_head(draft, target_for(model_of("untied")))
    assert [name for name, _ in tree_flatten(draft.parameters())] == before
    assert draft.config.draft_vocab_size is None


def test_a_saved_prompt_serves_with_and_without_the_list(pair: tuple[str, str], tmp_path: Path) -> None:
    """The context does not depend on the head: read again, the prompt would cost its time twice."""
    model, tokenizer, draft = load(pair[0], draft=pair[1], blas="off")
    cache = make_prompt_cache(model, draft)
    list(stream_generate(model, tokenizer, PROMPT, 4, draft, prompt_cache=cache))
    save_prompt_cache(tmp_path / "kept.safetensors", cache)
    model, tokenizer, draft = load(pair[0], draft=pair[1], draft_vocabulary="full", blas="off")
    assert not load_prompt_cache(tmp_path / "kept.safetensors", model, draft).draft_is_late


def test_a_head_whose_rows_cannot_be_picked_is_shared_whole(tmp_path: Path) -> None:
    """An adapter on the head adds to its product; rows of the layer below it would be another model's."""
    model = build(BY_NAME["llama"])
    model.lm_head = LoRALinear.from_base(model.lm_head)
    draft = draft_for(folder_with(tmp_path / "d"), target_for(model))
    assert draft.reduced_size is None and "LoRALinear, of which no rows can be picked" in draft.notes[-1]
    other = draft_for(folder_with(tmp_path / "d"), target_for(build(BY_NAME["llama"])))
    assert other.reduced_size == len(IDS)
    borrow_head(other, target_for(model))  # not with the rows of the target before
    assert other.reduced_size is None and other.head is None


def test_an_id_past_the_targets_rows_is_refused(tmp_path: Path) -> None:
    """It has no row to gather; MLX would read whatever lies behind."""
    checkpoints.v1(tmp_path / "d", vocab_size=VOCAB + 40)
    write_vocabulary(tmp_path / "d", VOCAB + 40, [1, 2, VOCAB + 3])
    target = str(target_folder(tmp_path / "tiny"))
    with pytest.raises(IncompatiblePair, match=f"proposes the token id {VOCAB + 3} from its reduced vocabulary"):
        load(target, draft=str(tmp_path / "d"), blas="off")


def test_the_list_of_everything_is_no_list(tmp_path: Path) -> None:
    """Rows would be copied for nothing."""
    folder = folder_with(tmp_path / "d", list(range(VOCAB)))
    assert draft_for(folder, target_for(model_of("untied"))).head is None


def test_a_converted_draft_keeps_its_list(tmp_path: Path) -> None:
    """Packed by `convert`, it would otherwise propose everything again and be slower than it was."""
    folder = folder_with(tmp_path / "d")
    made = convert(str(folder), tmp_path / "small", bits=4, group_size=32)
    assert (made / FILE).read_bytes() == (folder / FILE).read_bytes()
    draft = draft_for(made, target_for(model_of("untied")))
    assert draft.reduced_size == len(IDS)
    assert not any("lm_head" in name for name in mx.load(str(made / "model.safetensors")))


DAMAGED: dict[str, tuple[Callable[[dict], Any], str]] = {
    "no object": (lambda file: [1, 2], "holds a list, not an object"),
    "another format": (lambda file: file | {"format": 2}, "has format 2, and this version reads 1"),
    "another target": (lambda file: file | {"vocab_size": 5000}, "is for a vocabulary of 5000 tokens"),
    "no vocabulary": (lambda file: {"format": 1, "ids": [1, 2]}, "is for a vocabulary of None tokens"),
    "a flag": (lambda file: file | {"ids": [False, True]}, "has no list of integers as `ids`"),
    "no list": (lambda file: file | {"ids": "1, 2"}, "has no list of integers as `ids`"),
    "one": (lambda file: file | {"ids": [1]}, "lists 1 ids, and 2 or more are needed"),
    "twice": (lambda file: file | {"ids": [1, 2, 2]}, r"do not ascend \(at 2\)"),
    "falling": (lambda file: file | {"ids": [5, 3]}, r"do not ascend \(at 3\)"),
    "negative": (lambda file: file | {"ids": [-1, 3]}, "lists the id -1, and ids have to be in 0..256"),
    "too large": (lambda file: file | {"ids": [3, VOCAB]}, "lists the id 257, and ids have to be in 0..256"),
}


@pytest.mark.parametrize("how", DAMAGED)
def test_a_damaged_list_is_refused_and_says_how_to_go_on(tmp_path: Path, how: str) -> None:
    """Also where it is not used: which of its tokens are meant cannot be told."""
    folder = folder_with(tmp_path / "d")
    change, message = DAMAGED[how]
    (folder / FILE).write_text(json.dumps(change(json.loads((folder / FILE).read_text()))))
    for choice in ("auto", "full"):
        with pytest.raises(CheckpointError, match=f"(?s){message}.*delete the file: the draft then proposes"):
            load_draft(folder, options=DraftOptions(vocabulary=choice))
    (folder / FILE).write_text("{")
    with pytest.raises(CheckpointError, match=r"draft_vocabulary\.json cannot be read .* delete it"):
        load_draft(folder)


def test_drafts_that_say_themselves_what_they_propose_have_no_list(tmp_path: Path) -> None:
    """DFlash 2's selector scores every token; a head of its own has its own table."""
    checkpoints.dflash2(tmp_path / "second")
    checkpoints.speculators(tmp_path / "own", kept=list(range(0, 256, 4)))
    for name, message in (("second", "DFlash 2 draft, whose selector"), ("own", "with a head of its own")):
        write_vocabulary(tmp_path / name, VOCAB, IDS)
        with pytest.raises(CheckpointError, match=message):
            load_draft(tmp_path / name)


def test_only_lists_that_can_be_read_again_are_written(tmp_path: Path) -> None:
    for ids in ([1], [2, 1], [0, VOCAB]):
        with pytest.raises(ValueError, match=r"`ids` has to be two or more ascending ids in 0\.\.256"):
            write_vocabulary(tmp_path, VOCAB, ids)
    assert not list(tmp_path.iterdir())


def test_a_choice_that_is_none_is_named(pair: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match=r"`draft_vocabulary` has to be 'auto' .* or 'full'"):
        load(pair[0], draft=pair[1], draft_vocabulary="small", blas="off")
    with pytest.raises(ValueError, match="`draft_vocabulary` is not honoured for a load without a draft"):
        load(pair[0], draft=None, draft_vocabulary="full", blas="off")


# --- What is said ---


def test_generate_says_how_many_tokens_are_proposed(pair: tuple[str, str], capsys: Any) -> None:
    """In the JSON object and in the lines for people, and nothing where all are."""
    command = ["--model", pair[0], "--draft", pair[1], "-p", "hi", "--mode", "dflash", "--max-tokens", "8"]
    command += ["--blas", "off"]
    for choice, size in (("auto", len(IDS)), ("full", None)):
        assert generate_main([*command, "--json", "--draft-vocabulary", choice]) == 0
        said = capsys.readouterr()
        assert json.loads(said.out)["draft_vocabulary"] == size
        assert (f"the draft proposes {len(IDS)} of" in said.err) == (choice == "auto")


def test_models_says_how_many_tokens_are_proposed(pair: tuple[str, str], capsys: Any) -> None:
    assert main(["models", pair[0], "--draft", pair[1], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["draft"]["config"]["draft_vocabulary"] == len(IDS)


def test_a_damaged_list_is_refused_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """`models` says what `load` would; of a repository only the list itself is fetched."""
    hub = FakeHub(tmp_path / "cache")
    hub.install(monkeypatch)
    hub.add("org/target", target_folder(tmp_path / "target"))
    folder = folder_with(tmp_path / "d")
    hub.add("org/good", folder)
    bad = shutil.copytree(folder, tmp_path / "bad")
    (bad / FILE).write_text('{"format": 1, "vocab_size": 257, "ids": [4, 4]}')
    hub.add("org/bad", bad)
    assert main(["models", "org/target", "--draft", "org/good", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["draft"]["config"]["draft_vocabulary"] == len(IDS)
    assert main(["models", "org/target", "--draft", "org/bad", "--json"]) == 1
    assert "draft_vocabulary.json of org/bad lists ids that do not ascend" in capsys.readouterr().out
    with pytest.raises(CheckpointError, match="do not ascend"):
        load("org/target", draft="org/bad", blas="off")
    assert "snapshot" not in [what for what, _ in hub.asked]


def test_reading_gives_ascending_integers(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "d")
    config = load_draft(folder).config
    found = read_vocabulary(folder, config, "d")
    assert found is not None and found.dtype == np.int32 and found.tolist() == IDS
