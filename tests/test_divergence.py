"""Two answers are compared token by token; a difference is called rounding only where rounding can be the reason."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import generate_step

from dflash_mlx import stream_generate
from dflash_mlx.accept import Matching, make_decider
from dflash_mlx.blocksize import FixedBlock
from dflash_mlx.cache import TargetCache
from dflash_mlx.decode import Session, decode
from dflash_mlx.divergence import Divergence, check, compare
from dflash_mlx.kernels.choice import STOCK, Kernels, references
from dflash_mlx.kernels.operation import Arrays, Operation
from dflash_mlx.proposal import Verdict
from dflash_mlx.rounding import LIMITS, Decoding, limit, logits_after
from dflash_mlx.sampling import Draws, SamplingPolicy, log_probs
from dflash_mlx.targets import target_for
from tests.conftest import greedy_session, tokens_of
from tests.families import BY_NAME, EVERY, SAME_TOKENS, SCRIPTS, ScriptedProposer, build, prompt_of, reference, tiny

PROMPT = prompt_of(21)
COUNT = 40


def speculate(
    model: nn.Module,
    truth: list[int],
    script: str = "mixed",
    spoil: Callable[[Session], None] | None = None,
    prompt: list[int] = PROMPT,
    kernels: Kernels = STOCK,
) -> list[int]:
    """The greedy answer of this package, in blocks of 4 with scripted drafts."""
    target = target_for(model, kernels)
    session = Session(
        target,
        TargetCache(target.make_entries(), 0),
        ScriptedProposer(truth, SCRIPTS[script]),
        make_decider(SamplingPolicy(), (), Draws(0)),
        FixedBlock(4),
    )
    if spoil:
        spoil(session)
    return tokens_of(decode(session, prompt, max_tokens=len(truth)))


def mlx_lm_tokens(model: nn.Module, count: int = COUNT) -> list[int]:
    return [token for token, _ in generate_step(mx.array(PROMPT), model, max_tokens=count)]


def replaced(tokens: list[int], index: int, token: int) -> list[int]:
    return [*tokens[:index], token, *tokens[index + 1 :]]


@pytest.mark.parametrize(("name", "dtype"), SAME_TOKENS)
def test_every_family_speculates_to_the_identical_answer(name: str, dtype: mx.Dtype) -> None:
    """Plain decoding is mlx_lm's own loop; a user would be told of a difference that is none, or not of one."""
    truth = reference(name, PROMPT, 60, dtype)
    session = greedy_session(name, ScriptedProposer(truth, SCRIPTS["wide"]), 8, dtype)
    found = compare(tiny(name, dtype), PROMPT, truth, tokens_of(decode(session, PROMPT, max_tokens=60)))
    assert found == Divergence("identical", None, None, None, None, None, "All 60 tokens are the same.")


@pytest.mark.parametrize(("name", "dtype"), EVERY)
def test_a_wrong_token_is_a_bug_in_every_family(name: str, dtype: mx.Dtype) -> None:
    """The measurement runs over every kind of cache, behind a wrapped window too, and finds what mlx_lm's loop saw.

    With plain MLX no width rounds otherwise, except behind a ring that has wrapped and where a family says so.
    """
    truth, index, family = reference(name, PROMPT, 60, dtype), 33, BY_NAME[name]
    *_, rows = (row for _, row in generate_step(mx.array(PROMPT), tiny(name, dtype), max_tokens=index + 1))
    wrong = int(mx.argsort(rows)[-4].item())
    found = compare(tiny(name, dtype), PROMPT, truth, replaced(truth, index, wrong))
    assert (found.kind, found.index, found.expected_token, found.got_token) == ("bug", index, truth[index], wrong)
    assert found.gap == (rows[truth[index]].astype(mx.float32) - rows[wrong].astype(mx.float32)).item()
    assert 0 <= found.rounding <= family.rounding.get(dtype, 1e-4 if family.window else 0.0)


class Head(nn.Module):
    """An output layer that makes `rival` almost as likely as `token`: `below` units in the last place under it.

    In blocks it is `above` units over it, as another order of summation might have it.
    """

    def __init__(self, inner: nn.Module, token: int, rival: int, below: int, above: int) -> None:
        super().__init__()
        self.inner, self.args = inner, (token, rival, below, above)

    def __call__(self, x: mx.array) -> mx.array:
        logits, (token, rival, below, above) = self.inner(x), self.args
        units = above if x.shape[1] > 1 else -below
        tied = logits[..., token] + mx.abs(logits[..., token]) * units * mx.finfo(logits.dtype).eps
        return mx.where(mx.arange(logits.shape[-1]) == rival, tied[..., None], logits)


def nearly_tied(name: str, below: int, above: int, dtype: mx.Dtype = mx.float32) -> tuple[nn.Module, int, int]:
    """A model whose answer has a near-tie, and where: the index of the token, and the token's rival."""
    truth = reference(name, PROMPT, COUNT, dtype)
    index = next(i for i in range(7, COUNT) if truth[i] not in truth[:i])
    rival = next(token for token in range(256, 0, -1) if token not in truth)
    model = build(BY_NAME[name], dtype)
    text = model.get("language_model", model)
    text.lm_head = Head(text.lm_head, truth[index], rival, below, above)
    return model, index, rival


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("llama", mx.float32), ("llama", mx.bfloat16), ("llama-sliding", mx.float32), ("qwen3_5", mx.bfloat16)],
)
def test_a_flip_by_rounding_is_a_near_tie_with_its_place(name: str, dtype: mx.Dtype) -> None:
    """Blocks round the rival up: the user gets another token, and is told that it is not a bug."""
    model, index, rival = nearly_tied(name, 2, 2, dtype)
    expected = mlx_lm_tokens(model)
    assert expected == reference(name, PROMPT, COUNT, dtype), "plain decoding never chooses the rival"
    got = speculate(model, expected, "all")
    found = compare(model, PROMPT, expected, got)
    assert (found.kind, found.index, found.got_token) == ("near-tie", index, rival), found
    assert found.expected_token == expected[index]
    assert 0 < found.gap <= 2 * found.rounding
    assert f"After {index} equal tokens" in found.explanation and "rounding decides" in found.explanation


def test_the_same_two_answers_are_a_bug_where_nothing_rounds() -> None:
    """A fixed tolerance would call this near, too: on a CPU with plain MLX it is a wrong token."""
    noisy, index, rival = nearly_tied("llama", 8, 8)
    exact, *_ = nearly_tied("llama", 8, -8)
    expected = mlx_lm_tokens(exact)
    got = replaced(expected, index, rival)
    assert compare(noisy, PROMPT, expected, got).kind == "near-tie"
    found = compare(exact, PROMPT, expected, got)
    assert (found.kind, found.rounding) == ("bug", 0.0) and 0 < found.gap < 1e-4


def test_a_gap_beyond_the_rounding_is_a_bug() -> None:
    """Rounding that is there does not excuse everything: 8 units of noise do not explain 100."""
    model, index, rival = nearly_tied("llama", 100, -92)
    expected = mlx_lm_tokens(model)
    found = compare(model, PROMPT, expected, replaced(expected, index, rival))
    assert found.kind == "bug" and 0 < 4 * found.rounding < found.gap and "too little" in found.explanation


def test_an_exact_tie_in_bfloat16_is_a_near_tie_without_any_rounding() -> None:
    """bfloat16 has real ties: plain decoding takes the lowest id, and another backend's argmax need not."""
    prompt, model, tokens = PROMPT, tiny("llama", mx.bfloat16), list[int]()
    for token, rows in generate_step(mx.array(prompt), model, max_tokens=400):
        tokens.append(token)
        second, first = mx.argsort(rows)[-2:].tolist()
        if rows[first].item() == rows[second].item():
            break
    else:
        pytest.fail("the tiny model's answer has no tie; choose another prompt")
    rival = first if second == token else second
    found = compare(model, prompt, tokens, [*tokens[:-1], rival])
    assert (found.kind, found.index, found.gap, found.rounding) == ("near-tie", len(tokens) - 1, 0.0, 0.0)
    assert "they are equally likely" in found.explanation
    worse = int(mx.argsort(rows)[-3].item())
    assert compare(model, prompt, tokens, [*tokens[:-1], worse]).kind == "bug"


class OneTooMany(Matching):
    """A decider that keeps the first wrong draft."""

    def decide(self, proposal, logits, position, judgement=None) -> Verdict:
        verdict = super().decide(proposal, logits, position, judgement)
        if verdict.accepted == len(proposal):
            return verdict
        tokens = (*verdict.tokens[:-1], proposal.tokens[verdict.accepted].item(), verdict.tokens[-1])
        return Verdict(verdict.accepted, tokens, verdict.log_probs)


def keep_one_too_many(session: Session) -> None:
    session.decider = OneTooMany(SamplingPolicy(), Draws(0))


def leave_a_rejected_key(session: Session) -> None:
    commit = session.cache.commit

    def spoiled(count: int) -> None:
        commit(count)
        if count > 1:
            for entry in session.cache.entries:
                entry.offset += 1

    session.cache.commit = spoiled


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("spoil", [keep_one_too_many, leave_a_rejected_key])
def test_a_bug_of_this_package_is_a_bug(spoil: Callable[[Session], None], dtype: mx.Dtype) -> None:
    """It would be worse than none, a check that excuses a wrong decider or a shifted position as rounding."""
    truth = reference("llama", PROMPT, COUNT, dtype)
    got = speculate(tiny("llama", dtype), truth, "mixed", spoil)
    found = compare(tiny("llama", dtype), PROMPT, truth, got)
    assert found.kind == "bug" and found.rounding == 0 and found.gap > 0
    assert got[: found.index] == truth[: found.index] and got[found.index] == found.got_token


class ShiftedRows(nn.Module):
    """An output layer whose rows are off by one in blocks."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __call__(self, x: mx.array) -> mx.array:
        return self.inner(mx.concatenate([x[:, :1], x[:, :-1]], axis=1))


class Unmasked(nn.Module):
    """Attention that looks ahead in blocks."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __call__(self, x: mx.array, mask: object = None, cache: object = None) -> mx.array:
        return self.inner(x, None, cache)


def shift_rows(model: nn.Module) -> None:
    model.lm_head = ShiftedRows(model.lm_head)


def look_ahead(model: nn.Module) -> None:
    for layer in model.layers:
        layer.self_attn = Unmasked(layer.self_attn)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("spoil", [shift_rows, look_ahead])
def test_a_wrong_block_forward_of_the_model_is_not_taken_for_rounding(spoil, dtype: mx.Dtype) -> None:
    """The measuring blocks have the same bug, so their moves would excuse many a token; their size does not."""
    model = build(BY_NAME["llama"], dtype)
    spoil(model)
    expected, best = list[int](), list[list[int]]()
    for token, rows in generate_step(mx.array(PROMPT), model, max_tokens=COUNT):
        expected.append(token)
        best.append(mx.argsort(rows)[-2:].tolist())
    found = compare(model, PROMPT, expected, speculate(model, expected))
    assert found.kind == "bug" and "of their spread" in found.explanation, found
    excused = 0
    for index in range(3, COUNT, 6):
        (rival,) = set(best[index]) - {expected[index]}
        found = compare(model, PROMPT, expected, replaced(expected, index, rival))
        assert found.kind == "bug" and "of their spread" in found.explanation, found
        excused += found.gap < 2 * found.rounding
    assert excused >= 2, "the moves alone would have excused some"


def test_an_answer_that_ends_early_is_a_bug_with_its_length() -> None:
    """A loop that loses its last token; nothing is measured, since rounding does not end an answer."""
    truth = reference("llama", PROMPT, COUNT)
    for expected, got, missing, more in (
        (truth, truth[:-1], truth[-1], None),
        (truth[:7], truth, None, truth[7]),
        (truth, [], truth[0], None),
    ):
        found = compare(tiny("llama"), PROMPT, expected, got)
        assert (found.kind, found.index) == ("bug", min(len(expected), len(got)))
        assert (found.expected_token, found.got_token) == (missing, more)
        assert found.gap is None and found.rounding is None and "which rounding cannot do" in found.explanation
    assert compare(tiny("llama"), PROMPT, [], []).kind == "identical"


@pytest.mark.parametrize("length", [1, 2, 21])
def test_the_first_token_can_differ_too(length: int) -> None:
    prompt = prompt_of(length)
    truth = reference("qwen3_5", prompt, COUNT)
    found = compare(tiny("qwen3_5"), prompt, truth, replaced(truth, 0, (truth[0] + 1) % 257))
    assert (found.kind, found.index, found.rounding) == ("bug", 0, 0.0)


def test_a_baseline_that_is_not_the_models_own_is_a_bug() -> None:
    """If plain decoding itself is wrong, a right answer does not make it a near-tie."""
    truth = reference("llama", PROMPT, COUNT)
    found = compare(tiny("llama"), PROMPT, replaced(truth, 5, 7), truth)
    assert found.kind == "bug" and found.gap < 0 and "do not choose the expected one either" in found.explanation


def test_the_prompt_is_prefilled_once_in_the_chunks_of_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other chunks round differently on a GPU, and a long prompt takes minutes."""
    model, truth = build(BY_NAME["llama"]), reference("llama", PROMPT, COUNT)
    widths = list[int]()
    call = type(model).__call__

    def record(self, ids, *args, **kwargs):
        widths.append(ids.shape[1])
        return call(self, ids, *args, **kwargs)

    monkeypatch.setattr(type(model), "__call__", record)
    compare(model, PROMPT, truth, replaced(truth, 3, 7), decoding=Decoding(prefill_step_size=8))
    assert widths == [8, 8, 4] + [1] * 4 + [2] * 2 + [4] + [8] + [16]


def test_quantised_keys_are_measured_as_mlx_lm_quantises_them() -> None:
    """Measured without, the choices of a quantised cache would not be the model's own."""
    family = BY_NAME["llama"]
    model = build(replace(family, config={**family.config, "head_dim": 32}))
    kv = dict(kv_bits=4, kv_group_size=32, quantized_kv_start=0)
    *_, (token, rows) = generate_step(mx.array(PROMPT), model, max_tokens=9, **kv)
    expected = [token for token, _ in generate_step(mx.array(PROMPT), model, max_tokens=9, **kv)]
    got = [*expected[:-1], 7]
    found = compare(model, PROMPT, expected, got, decoding=Decoding(**kv))
    assert (found.kind, found.index, found.rounding) == ("bug", 8, 0.0)
    assert found.gap == (rows[token] - rows[7]).item() != compare(model, PROMPT, expected, got).gap


class Coarse(Kernels):
    """Kernels of which one, run in MLX, is off by a part of its value; it notes the rows that it was given."""

    def __init__(self, name: str, part: float) -> None:
        super().__init__(True, lambda operation, case: "in MLX")
        self.name, self.part, self.rows = name, part, list[int]()

    def run(self, operation: Operation, *arguments: Any, **options: Any) -> Arrays:
        results = super().run(operation, *arguments, **options)
        if operation.name != self.name:
            return results
        self.rows.append(arguments[0].queries.shape[2] if self.name == "sdpa_rows" else arguments[0].shape[1])
        return tuple((array * (1 + self.part)).astype(array.dtype) for array in results)


@pytest.mark.parametrize(("name", "operation"), [("llama", "sdpa_rows"), ("qwen3_5", "gdn_prework")])
def test_the_rounding_of_the_kernels_that_made_an_answer_is_what_is_measured(name, operation, tokenizer) -> None:
    """MLX's own blocks round nothing here: measured with them a flip by a kernel would be called a bug."""
    model, prompt, kernels = tiny(name, mx.bfloat16), prompt_of(21, seed=3), Coarse(operation, 0.03)
    expected = reference(name, prompt, COUNT, mx.bfloat16)
    got = speculate(model, expected, "all", prompt=prompt, kernels=kernels)
    found = compare(model, prompt, expected, got, kernels=kernels)
    assert found.kind == "near-tie" and 0 < found.gap <= 2 * found.rounding, found
    request = dict(policy=SamplingPolicy(), prefill_step_size=64, max_tokens=COUNT)
    assert check(model, tokenizer, prompt, got, kernels=kernels, **request) == found
    for other in ("off", references()):
        stock = compare(model, prompt, expected, got, kernels=other)
        assert (stock.kind, stock.index, stock.gap, stock.rounding) == ("bug", found.index, found.gap, 0.0)
    wrong = Coarse(operation, 3.0)
    assert compare(model, prompt, expected, got, kernels=wrong).kind == "bug", "a kernel that is wrong excuses nothing"


def test_kernels_take_part_where_blocks_do_and_nowhere_else() -> None:
    """Single-token steps are what plain decoding chose from; a short prompt was a block of the answer."""
    truth, kernels = reference("llama", PROMPT, COUNT), Coarse("sdpa_rows", 0.0)
    found = compare(tiny("llama"), PROMPT, truth, replaced(truth, 4, 7), kernels=kernels)
    assert found.kind == "bug" and kernels.rows == [row for row in (2, 2, 2, 4, 4, 8, 16) for _ in range(4)]
    kernels.rows.clear()
    truth = reference("llama", PROMPT[:12], COUNT)
    decoding = Decoding(prefill_step_size=6)
    found = compare(tiny("llama"), PROMPT[:12], truth, replaced(truth, 1, 7), decoding=decoding, kernels=kernels)
    assert found.kind == "bug" and kernels.rows[::4] == [5, 2, 5, 4, 5, 8, 5, 16]  # the first six rows: no news


def test_quantised_keys_are_measured_with_kernels_too() -> None:
    """Attention over them is mlx_lm's; with other keys the choices of the answer would not be the model's own."""
    family = BY_NAME["qwen3_5"]
    model = build(replace(family, config={**family.config, "head_dim": 32}))
    kv = dict(kv_bits=4, kv_group_size=32, quantized_kv_start=24)
    tokens = [token for token, _ in generate_step(mx.array(PROMPT), model, max_tokens=15, **kv)]
    stock, wired = (logits_after(model, PROMPT, tokens, Decoding(**kv), kernels) for kernels in (STOCK, references()))
    for ours, theirs in zip(wired, stock, strict=True):
        assert mx.array_equal(ours, theirs)
    assert not mx.array_equal(stock[0], logits_after(model, PROMPT, tokens, Decoding())[0])


def test_a_model_that_nothing_serves_is_measured_as_it_is() -> None:
    """No block of it can have run on a kernel."""
    rows = mx.array([2.0, 2.0 - 1e-6, -1.0])
    assert compare(Table(rows, {1: 1e-6}), [1], [0], [1], kernels=references()).kind == "near-tie"


def test_a_layer_whose_algorithm_depends_on_the_width_gives_near_ties_only() -> None:
    """Mamba-2 in bfloat16 really rounds blocks otherwise, on every backend: half of these answers differ somewhere."""
    model, kinds = tiny("nemotron_h", mx.bfloat16), Counter[str]()
    for seed in range(1, 9):
        prompt = prompt_of(21, seed)
        truth = reference("nemotron_h", prompt, 59, mx.bfloat16)
        session = greedy_session("nemotron_h", ScriptedProposer(truth, SCRIPTS["wide"]), 8, mx.bfloat16)
        kinds[compare(model, prompt, truth, tokens_of(decode(session, prompt, max_tokens=59))).kind] += 1
    assert kinds["bug"] == 0 and kinds["near-tie"] >= 2, kinds


@pytest.mark.skipif(
    sys.platform != "linux" or mx.default_device() != mx.Device(mx.cpu), reason="a BLAS is bound on Linux CPUs only"
)
def test_with_another_blas_the_rounding_is_measured_and_excuses_what_it_can() -> None:
    """The same two answers: a near-tie where blocks round apart, a bug where they do not."""
    code = """
import json
import mlx.core as mx
from mlx_lm.generate import generate_step
from dflash_mlx import blas
from dflash_mlx.divergence import compare
from tests.test_divergence import PROMPT, nearly_tied, replaced

requests = []
for units in (1, 100):
    model, index, rival = nearly_tied("llama", units, -units)
    expected = [token for token, _ in generate_step(mx.array(PROMPT), model, max_tokens=20)]
    requests.append((model, PROMPT, expected, replaced(expected, index, rival)))
found = [compare(*request) for request in requests]
bound = blas.bind().active
found += [compare(*request) for request in requests]
print(json.dumps([bound, *([f.kind, f.gap, f.rounding] for f in found)]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    bound, *found = json.loads(done.stdout.splitlines()[-1])
    if not bound:
        pytest.skip("no BLAS to bind here")
    near, far, near_with_blas, far_with_blas = found
    assert near[0] == far[0] == "bug" and near[2] == far[2] == 0 < near[1] < 2e-6
    assert near_with_blas[0] == "near-tie" and 0 < near_with_blas[2] < 1e-4
    assert far_with_blas[0] == "bug" and 0 < far_with_blas[2] < 1e-4


class Table(nn.Module):
    """Logits that are written down; blocks add `moves`."""

    def __init__(self, logits: mx.array, moves: dict[int, float]) -> None:
        super().__init__()
        self.layers: list[nn.Module] = []
        self._logits, ids = logits, mx.arange(logits.size)
        self._moves = sum((mx.where(ids == token, by, 0.0) for token, by in moves.items()), mx.zeros(logits.size))

    def __call__(self, ids: mx.array, cache: list | None = None) -> mx.array:
        rows = self._logits + self._moves.astype(self._logits.dtype) if ids.shape[1] > 1 else self._logits
        return mx.broadcast_to(rows, (*ids.shape, rows.size))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_where_anything_rounds_apart_one_unit_in_the_last_place_is_near(dtype: mx.Dtype) -> None:
    """The blocks that are measured may miss the move that happened; where no logit moves there was none to miss."""
    unit = mx.finfo(dtype).eps * 8  # between 8 and 16
    for units, near in ((1, True), (2, True), (3, False), (8, False)):
        rows = mx.array([12.0, 12.0 - units * unit, *[-12.0] * 62]).astype(dtype)
        found = compare(Table(rows, {9: unit}), [1], [0], [1])
        assert found.rounding == 0.0 < found.gap and found.kind == ("near-tie" if near else "bug"), found
        assert compare(Table(rows, {}), [1], [0], [1]).kind == "bug"


def test_ids_that_a_model_rules_out_do_not_spoil_the_measurement() -> None:
    """Minus infinity minus itself is no number, and would make every difference a bug."""
    rows = mx.array([2.0, 2.0 - 1e-6, -1.0, -math.inf])
    table = Table(rows, {1: 1e-6})
    assert compare(table, [1], [0], [1]).kind == "near-tie"
    found = compare(table, [1], [0], [3])
    assert (found.kind, found.gap, found.rounding) == ("bug", None, 0.0)


HALF = 5e-4  # the candidates, or a candidate and the border of a filter, are this far apart; blocks move twice that


def drawn(logits: mx.array, policy: SamplingPolicy) -> int:
    """The token after one prompt token."""
    return int(Draws(policy.seed).categorical(policy.log_weights(log_probs(logits)[None]), "target", 1).item())


def no_filter(seed: int) -> tuple[SamplingPolicy, list[float]]:
    noise = mx.random.gumbel(shape=(257,), key=Draws(seed).key("target", 1))
    logits = (-0.7 * noise - mx.where(mx.arange(257) < 2, 0.0, 5.0)).tolist()
    return SamplingPolicy(temperature=0.7, seed=seed), [logits[0] + HALF, *logits[1:]]


def filtered(**filters: float) -> Callable[[int], tuple[SamplingPolicy, list[float]]]:
    """Token 1 is just inside the filter, and blocks, which raise tokens 0 and 2, push it out; 2 takes its place."""
    likely = [math.log(0.6), math.log(0.2), math.log(0.2) - HALF]
    return lambda seed: (SamplingPolicy(temperature=1.0, seed=seed, **filters), [*likely, *[-40.0] * 254])


@pytest.mark.parametrize(
    "request_of",
    [
        no_filter,
        filtered(top_k=2),
        filtered(top_p=0.60015),  # 0.6001 is above token 1
        filtered(min_p=(1 - HALF) / 3),
    ],
    ids=["no-filter", "top-k", "top-p", "min-p"],
)
def test_a_seeded_draw_has_near_ties_too_also_at_the_border_of_a_filter(request_of) -> None:
    """--check of sampled text would call a flip at the border of the nucleus a bug."""
    flips = 0
    for seed in range(40):
        policy, listed = request_of(seed)
        logits, moves = mx.array(listed), {0: 2 * HALF, 2: 2 * HALF}
        if request_of is no_filter:
            moves = {1: 2 * HALF}
        noisy, quiet = Table(logits, moves), Table(logits, {token: by / 1e4 for token, by in moves.items()})
        expected, got = drawn(logits, policy), drawn(noisy(mx.array([[1, 2]]))[0, 0], policy)
        if expected == got:
            continue
        flips += 1
        found = compare(noisy, [1], [expected], [got], policy=policy)
        assert found.kind == "near-tie" and found.rounding == pytest.approx(2 * HALF, rel=0.01), found
        assert compare(quiet, [1], [expected], [got], policy=policy).kind == "bug"
        other = compare(noisy, [1], [expected], [200], policy=policy)
        assert other.kind == "bug" and (other.gap is None or other.gap > 1)
    assert flips >= 3


def test_seeded_text_is_compared_with_its_draws(tokenizer) -> None:
    """`check` decodes the same request plainly: the same seed gives the same text, and another token is found."""
    model, policy = tiny("llama"), SamplingPolicy(temperature=1.0, top_p=0.9, seed=5)
    tokens = [r.token for r in stream_generate(model, tokenizer, PROMPT, COUNT, sampler=policy)]
    request = dict(policy=policy, prefill_step_size=64, max_tokens=COUNT)
    assert check(model, tokenizer, PROMPT, tokens, **request).kind == "identical"
    found = check(model, tokenizer, PROMPT, replaced(tokens, 9, (tokens[9] + 1) % 257), **request)
    assert (found.kind, found.index, found.expected_token) == ("bug", 9, tokens[9])
    for wrong in (tokens[:-1], [*tokens, 7]):
        assert check(model, tokenizer, PROMPT, wrong, **request).kind == "bug"


def test_the_limit_is_that_of_the_coarsest_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too low a limit blames rounding on the model, too high a one excuses a wrong mask."""
    assert limit(tiny("llama"), mx.float32) == LIMITS[mx.float32]
    assert limit(tiny("llama", mx.bfloat16), mx.float32) == LIMITS[mx.bfloat16], "logits in float32 are no finer"
    assert limit(tiny("qwen3_moe"), mx.float32) == LIMITS[mx.bfloat16], "experts are exchanged at near-ties"
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    assert limit(tiny("llama"), mx.float32) == LIMITS[mx.float16], "TF32"


@pytest.mark.parametrize(
    ("prompt", "policy", "message"),
    [
        ([], None, "`prompt` has no tokens"),
        (PROMPT, SamplingPolicy(temperature=1.0), "`policy` samples without a `seed`"),
    ],
)
def test_what_cannot_be_compared_is_refused_by_name(prompt, policy, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compare(tiny("llama"), prompt, [1], [2], policy=policy)
    with pytest.raises(ValueError, match="`kernels` has to be 'auto', 'off', or one or more of accept"):
        compare(tiny("llama"), PROMPT, [1], [1], kernels="fast")
