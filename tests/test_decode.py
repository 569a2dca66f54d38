"""The decode loop: prefill, ends, interrupts and host synchronisations. That it is exact is `tests/test_suite.py`."""

from __future__ import annotations

import ast
from pathlib import Path

import mlx.core as mx
import pytest

from dflash_mlx.accept import make_decider
from dflash_mlx.blocksize import FixedBlock
from dflash_mlx.decode import decode
from dflash_mlx.proposers.block import BlockProposer
from dflash_mlx.sampling import Draws, SamplingPolicy
from tests.conftest import DRAFT_WINDOW, draft_for, greedy_session, tiny_draft, tokens_of
from tests.families import BY_NAME, FAMILIES, SCRIPTS, VOCAB, ScriptedProposer, prompt_of, reference
from tests.plain import check_close, loose

PROMPT = prompt_of(21)


def test_a_ring_stays_bounded() -> None:
    """Multi-token writes evict."""
    truth = reference("llama-sliding", PROMPT, 200)
    session = greedy_session("llama-sliding", ScriptedProposer(truth, SCRIPTS["all"]), 8)
    list(decode(session, PROMPT, max_tokens=200))
    assert session.cache.entries[1].keys.shape[2] <= 16 + 8


@pytest.mark.parametrize("count", [1, 2, 3, 6, 63, 64, 65, 130])
def test_prefill_is_split_as_in_mlx_lm(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt shaped differently would round differently on a GPU."""
    from mlx_lm.generate import generate_step

    from tests.families import build

    step, prompt = 64, prompt_of(count)
    model = build(BY_NAME["llama"])
    widths: list[int] = []
    call = type(model).__call__

    def record(self, ids, *args, **kwargs):
        widths.append(ids.shape[1])
        return call(self, ids, *args, **kwargs)

    monkeypatch.setattr(type(model), "__call__", record)
    next(generate_step(mx.array(prompt), model, max_tokens=1, prefill_step_size=step))
    theirs, ours = list(widths), []
    session = greedy_session("llama")
    forward = session.target.forward

    def spy(ids, *args):
        ours.append(ids.shape[1])
        return forward(ids, *args)

    session.target.forward = spy
    list(decode(session, prompt, max_tokens=1, prefill_step_size=step))
    assert ours == theirs[: len(ours)]
    assert sum(ours) == count


@pytest.mark.parametrize("name", [family.name for family in FAMILIES])
def test_the_drafts_context_and_what_it_proposes_do_not_depend_on_the_prefill_step(name: str) -> None:
    """A warm turn would draft otherwise than a cold one. Bit for bit where the target's features are.

    Masks make a random draft repeat itself, so the rows that a block of other tokens gives are compared, too.
    """
    prompt, runs = prompt_of(100), []
    tolerance = loose(name, mx.float32, len(prompt))
    for step in (1, 3, 7, 16, 64, 2048):
        session, draft = greedy_session(name), draft_for(name)
        session.proposer = proposer = BlockProposer(draft, session.target, draft.make_context())
        (commit,) = decode(session, prompt, max_tokens=1, prefill_step_size=step)
        proposal = proposer.propose(commit.tokens[0], 15, session.position)
        rows = [array for layer in proposer.context.layers for array in layer.held or ()]
        assert [a.shape[2] for a in rows] == [DRAFT_WINDOW - 1] * 2 + [len(prompt)] * 2
        block = session.target.embed(mx.array([prompt_of(16, seed=5)]))
        runs.append(([*rows, draft.denoise(block, proposer.context)], proposal.tokens.tolist()))
    for arrays, tokens in runs[1:]:
        for ours, expected in zip(arrays, runs[0][0], strict=True):
            check_close(ours, expected, tolerance, "context or hidden rows")
        assert tolerance or tokens == runs[0][1]


def test_one_row_per_prefill_reaches_the_head() -> None:
    """Logits of a whole prompt would take gigabytes."""
    session, rows = greedy_session("llama"), []
    head = session.target.head

    def spy(hidden):
        rows.append(hidden.shape[1])
        return head(hidden)

    session.target.head = spy
    list(decode(session, prompt_of(40), max_tokens=1, prefill_step_size=8))
    assert rows == [1]


def test_a_stop_token_straight_from_prefill_ends_before_any_cycle() -> None:
    truth = reference("llama", PROMPT, 60)
    session = greedy_session("llama", ScriptedProposer(truth, ["all"]), 8)
    commits = list(decode(session, PROMPT, max_tokens=60, stop={truth[0]}))
    assert tokens_of(commits) == truth[:1] and commits[0].finish_reason == "stop"
    assert session.stats.cycles == 0 and session.stats.mean_acceptance_length is None


def test_out_of_vocabulary_drafts_are_rejections() -> None:
    """Ids beyond the table and negative ones are never looked up."""
    truth = reference("llama", PROMPT, 60)

    class Wild(ScriptedProposer):
        def propose(self, anchor, limit, position):
            proposal = super().propose(anchor, limit, position)
            bad = [VOCAB, VOCAB + 5, -1, 2**30]
            tokens = proposal.tokens.tolist()
            if len(tokens) > 2:
                tokens[2] = bad[self.cycle % 4]
            return type(proposal)(mx.array(tokens, dtype=mx.int32))

    session = greedy_session("llama", Wild(truth, ["all"]), 8)
    assert tokens_of(decode(session, PROMPT, max_tokens=60)) == truth
    assert max(session.stats.histogram) == 2


@pytest.mark.parametrize("name", ["llama", "llama-sliding", "qwen3_5"])
@pytest.mark.parametrize("fail_at", [1, 4])
def test_an_exception_in_a_forward_leaves_the_cache_as_before(name: str, fail_at: int) -> None:
    """Half of the layers were written when it broke; the same session goes on afterwards."""
    truth = reference(name, PROMPT, 60)
    proposer = ScriptedProposer(truth, SCRIPTS["mixed"])
    session = greedy_session(name, proposer, 8)
    broken = {"left": fail_at}
    mlp = session.target.inner.layers[2].mlp
    layer_class = type(mlp)
    original = layer_class.__call__

    def fail(self, h, *args, **kwargs):
        if self is mlp and h.shape[1] > 1 and session.cache.length >= len(PROMPT):
            broken["left"] -= 1
            if broken["left"] == 0:
                raise RuntimeError("interrupted")
        return original(self, h, *args, **kwargs)

    layer_class.__call__ = fail
    try:
        commits, got = decode(session, PROMPT, max_tokens=60), []
        with pytest.raises(RuntimeError, match="interrupted"):
            for commit in commits:
                got += commit.tokens
        assert got == truth[: len(got)]
        assert session.position == session.cache.length + 1
        assert not session.cache.is_open and session.cache.closed is None
        rest = _continue(session, len(got), truth)
    finally:
        layer_class.__call__ = original
    assert got + rest == truth


def _continue(session, done: int, truth: list[int]) -> list[int]:
    """Decode on by hand on the same cache: the anchor is fed as a one-token prompt."""
    anchor = session.tokens.pop()
    session.proposer = ScriptedProposer(truth[done:], ["all"])
    session.undelivered = 0
    return tokens_of(decode(session, [anchor], max_tokens=len(truth) - done))


def test_one_host_synchronisation_per_cycle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted where it happens: nothing but the decider's read touches the host after prefill."""
    truth = reference("llama", PROMPT, 60)
    session = greedy_session("llama", ScriptedProposer(truth, SCRIPTS["mixed"]), 8)
    commits = decode(session, PROMPT, max_tokens=60)
    next(commits)
    calls = count_synchronisations(monkeypatch)
    rest = list(commits)
    assert len(calls) == len(rest) == session.stats.cycles == session.stats.host_syncs
    assert session.stats.cycles > 10


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_real_draft_costs_no_further_synchronisation(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy, and rejection sampling with the distribution of the draft."""
    draft, session = tiny_draft(), greedy_session("llama")
    policy, draws = SamplingPolicy(temperature), Draws(3)
    sampling = (policy, draws) if temperature else ()
    session.proposer = BlockProposer(draft, session.target, draft.make_context(), *sampling)
    session.decider, session.schedule = make_decider(policy, (), draws), FixedBlock(4)
    commits = decode(session, PROMPT, max_tokens=40)
    next(commits)
    calls = count_synchronisations(monkeypatch)
    rest = list(commits)
    assert len(calls) == len(rest) == session.stats.host_syncs > 10


def count_synchronisations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record every device-to-host transfer and forced evaluation from now on.

    `tolist`, `item` and the like of mx.array cannot be replaced, so the decider's `read` is counted and the
    source test below makes sure that no other place has one.
    """
    from dflash_mlx import accept

    calls: list[str] = []
    read = accept._Reader.read

    def spy(self, values):
        calls.append("read")
        return read(self, values)

    monkeypatch.setattr(accept._Reader, "read", spy)
    for name in ("eval", "synchronize"):
        original = getattr(mx, name)

        def counted(*args, _original=original, _name=name):
            calls.append(_name)
            return _original(*args)

        monkeypatch.setattr(mx, name, counted)
    return calls


def test_only_named_places_read_from_the_device() -> None:
    """The counting test above can be trusted: these calls appear nowhere else on the decode path."""
    package = Path(__file__).parent.parent / "dflash_mlx"
    allowed = {
        "accept.py": {"read"},
        "sampling.py": {"for_policy"},  # once per request, before decoding
        "cache.py": {"evaluate", "snapshot"},
        "prompt_file.py": {"_read"},
        "targets/probe.py": {"_check_numbers"},  # once per model
        "draft/context.py": {"evaluate"},
        "draft/checkpoint.py": {"load_draft", "_check_values"},  # while it is loaded
        "draft/formats.py": {"read_tensors"},
        "draft/formats_vocabulary.py": {"_integers"},
        "draft/model.py": {"map_ids", "borrow_head"},
        "draft/vocabulary.py": {"head_rows"},  # once per pair
        "threads.py": {"compute_constants"},
        "decode.py": {"_prefill"},
        "generate.py": {"encode"},
        # Tokens of the cycle whose verdict was just read; the rest only when a draft is found not to work.
        "health.py": {"not_finite", "why_not_finite", "_outputs", "_agreement"},
    }
    path = [*package.glob("*.py"), *(f for d in ("draft", "proposers", "targets") for f in (package / d).glob("*.py"))]
    off_path = {
        "load.py",
        "load_target.py",
        "cpu.py",
        "blas.py",
        "openblas.py",
        "elf.py",
        "divergence.py",
        "rounding.py",
        "self_test.py",
    }
    for file in path:
        name = str(file.relative_to(package))
        for function in ast.walk(ast.parse(file.read_text())):
            if not isinstance(function, ast.FunctionDef) or name in off_path:
                continue
            for node in ast.walk(function):
                if isinstance(node, ast.Attribute) and node.attr in ("item", "tolist", "eval", "synchronize"):
                    if node.attr == "eval" and not (isinstance(node.value, ast.Name) and node.value.id == "mx"):
                        continue
                    assert function.name in allowed.get(name, set()), f"{name}:{node.lineno} {function.name}"
