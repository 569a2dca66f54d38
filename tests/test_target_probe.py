"""Models without an adapter are examined: served where the generic loop gives their bits, else refused by name."""

from __future__ import annotations

import gc
import importlib
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import llama
from mlx_lm.models.cache import CacheList, KVCache, make_prompt_cache

from dflash_mlx import stream_generate
from dflash_mlx.cache import TargetCache
from dflash_mlx.decode import decode
from dflash_mlx.errors import UnsupportedTarget
from dflash_mlx.targets import probe, supported, target_for
from tests.conftest import greedy_session, tokens_of
from tests.families import BY_NAME, PROBED, SCRIPTS, ScriptedProposer, build, cases, prompt_of, reference, tiny

PROMPT = prompt_of(21)


@pytest.mark.parametrize(("name", "dtype"), cases(PROBED))
def test_a_model_that_passes_is_served_exactly_and_says_so(name: str, dtype: mx.Dtype) -> None:
    """Tokens of mlx_lm's own loop, at mixed depths, and a note that these are not tested models."""
    truth = reference(name, PROMPT, 60, dtype)
    session = greedy_session(name, ScriptedProposer(truth, SCRIPTS["wide"]), 8, dtype)
    assert tokens_of(decode(session, PROMPT, max_tokens=60)) == truth
    note = session.target.spec.note
    assert (
        note is not None and "has no adapter of its own" in note and "the model's own logits on 15 probe tokens" in note
    )


@pytest.mark.parametrize("name", [family.name for family in PROBED])
def test_its_forward_equals_the_model_far_beyond_the_probe(name: str) -> None:
    """The probe looks at 15 tokens; these are 300."""
    model = tiny(name)
    target = target_for(model)
    cache, theirs = TargetCache(target.make_entries(), 0), make_prompt_cache(model)
    for width in (200, 1, 8, 90, 1):
        ids = mx.array([prompt_of(width, seed=width)])
        cache.begin(width)
        ours = target.logits(target.forward(ids, cache).hidden)
        cache.commit(width)
        assert mx.array_equal(ours, model(ids, cache=theirs)), width


def test_a_shell_gets_the_adapter_of_its_text_part() -> None:
    """Also where that slides or keeps a recurrent state, which the generic adapter refuses."""
    expected = {"mistral3": "llama", "qwen3_vl": "qwen3", "gemma3": "gemma3_text", "lfm2-vl": "lfm2"}
    for name, text in expected.items():
        target = target_for(tiny(name))
        assert type(target) is type(target_for(tiny(text))) and f"text part ({text})" in (target.spec.note or "")


@pytest.mark.parametrize("name", ["llama", "qwen3_5-shell", "gemma4"])
def test_a_family_with_an_adapter_is_not_probed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(BY_NAME[name])
    heard = overhear(monkeypatch, type(model))
    assert target_for(model).spec.note is None and heard == []


BASE = BY_NAME["llama"].config
GRANITE = dict(logits_scaling=1.0, attention_multiplier=0.25, embedding_multiplier=1.0, residual_multiplier=0.5)
BIASES = dict(attention_bias=False, mlp_bias=False)
LLAMA4 = BASE | dict(
    attention_chunk_size=8,
    interleave_moe_layer_step=2,
    num_local_experts=2,
    num_experts_per_tok=1,
    intermediate_size_mlp=64,
    attention_bias=False,
    head_dim=16,
    rope_scaling=None,
    use_qk_norm=False,
)
SLIDING = dict(sliding_window=64, layer_types=["sliding_attention", "full_attention"] * 2)
REFUSED = [
    ("gemma", dict(head_dim=16), "its own forward gives other logits over 9 rows"),  # scales its embeddings
    ("granite", GRANITE | BIASES | dict(embedding_multiplier=12.0), "its own forward gives other logits over 9 rows"),
    ("granite", GRANITE | BIASES | dict(logits_scaling=8.0), "its own forward gives other logits over 9 rows"),
    ("cohere", dict(logit_scale=0.0625), "its own forward gives other logits over 9 rows"),
    ("minicpm", dict(dim_model_base=32, scale_depth=1.4, scale_emb=12.0), "its own forward gives other logits"),
    ("gpt2", dict(n_ctx=64, n_embd=64, n_head=4, n_layer=2, n_positions=64, layer_norm_epsilon=1e-5), "other logits"),
    (
        "cohere2",
        dict(head_dim=16),
        r"its 4 layers have 4 cache entries \(KVCache, RotatingKVCache\), not a KVCache each",
    ),
    ("olmo3", SLIDING, r"4 cache entries \(KVCache, RotatingKVCache\)"),
    ("nanbeige", dict(num_loops=2), "its 4 layers have 8 cache entries"),
    ("smollm3", SLIDING, "`layer_types` has full_attention, sliding_attention"),
    ("smollm3", dict(sliding_window=64), "`sliding_window` is 64, which may hide positions"),
    ("deepseek_v3", dict(n_routed_experts=None, q_lora_rank=16, kv_lora_rank=16), "cannot be called one by one"),
    ("gpt_neox", dict(layer_norm_eps=1e-5, rotary_emb_base=1000, rotary_pct=0.5), "no token embedding under the name"),
    ("nanochat", dict(), "it has no final norm under the name norm or ln_f"),
    (
        "mamba2",
        dict(
            num_heads=8,
            head_dim=16,
            state_size=16,
            conv_kernel=4,
            n_groups=2,
            time_step_limit=(0.0, 100.0),
            layer_norm_epsilon=1e-5,
            use_bias=False,
            use_conv_bias=True,
            time_step_rank=4,
        ),
        "no token embedding",
    ),
]


@pytest.mark.parametrize(
    ("module", "config", "reason"), REFUSED, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_model_that_does_more_than_its_layers_is_refused_with_the_check_that_failed(
    module: str, config: dict, reason: str
) -> None:
    """Served, it would write other text than mlx_lm, and nobody would know."""
    file = importlib.import_module(f"mlx_lm.models.{module}")
    mx.random.seed(0)
    model = file.Model(file.ModelArgs.from_dict(BASE | {"model_type": module} | config))
    message = rf"{module}\.Model has no adapter .*llama, .*does not serve it: .*{reason}.*Generate with mlx_lm"
    for _ in range(2):
        with pytest.raises(UnsupportedTarget, match=message):
            target_for(model)


def test_multipliers_of_one_are_no_reason_to_refuse() -> None:
    """The numbers decide, not the name: granite's multipliers inside the layers are the layers' own business."""
    from mlx_lm.models import granite

    mx.random.seed(0)
    model = granite.Model(granite.ModelArgs.from_dict(BASE | GRANITE | BIASES | {"model_type": "granite"}))
    assert "granite has no adapter" in (target_for(model).spec.note or "")


class Odd(llama.Model):
    """Not mlx_lm's own: adds one to the logits of forwards over `odd` rows."""

    odd = 0

    def __call__(
        self, inputs: mx.array, cache: list | None = None, input_embeddings: mx.array | None = None
    ) -> mx.array:
        logits = super().__call__(inputs, cache, input_embeddings)
        return logits + 1 if inputs.shape[1] == self.odd else logits


def odd(width: int = 0) -> Odd:
    mx.random.seed(0)
    model = Odd(llama.ModelArgs.from_dict(BASE))
    model.odd = width
    return model


@pytest.mark.parametrize("width", [9, 5, 1])
def test_prefill_block_and_single_row_are_all_compared(width: int) -> None:
    """A difference in any of them changes text."""
    with pytest.raises(UnsupportedTarget, match=rf"Odd has no adapter .* other logits over {width} rows"):
        target_for(odd(width))
    assert "Odd" in type(odd()).__name__ and target_for(odd()).spec.note


def test_a_custom_class_named_like_a_family_is_probed_and_not_trusted() -> None:
    """A model's own file may be called llama too."""
    impostor = type("Model", (Odd,), {"__module__": "custom.llama", "odd": 1})
    with pytest.raises(UnsupportedTarget, match=r"custom\.llama\.Model has no adapter"):
        target_for(impostor(llama.ModelArgs.from_dict(BASE)))


def test_a_model_is_examined_once_and_forgotten_with_it() -> None:
    """Every request asks for the adapter; a probe each time would cost three forwards."""
    held = set(probe._verdicts)
    for width in (0, 5):
        model, forwards = odd(width), []
        with pytest.MonkeyPatch.context() as patch:
            forwards = overhear(patch, Odd)
            for _ in range(3):
                try:
                    target_for(model)
                except UnsupportedTarget:
                    assert width
        assert forwards == [9, 5, 1][: 2 if width else 3]
        assert set(vars(model)) == {"_no_grad", "_training", "args", "model_type", "odd"}
        assert id(model) in probe._verdicts
        del model
        gc.collect()
        assert set(probe._verdicts) <= held


def test_an_error_of_the_models_own_is_not_a_verdict() -> None:
    """Weights that could not be read now may be there at the next try."""
    model = odd()

    def fail(*args: object, **kwargs: object) -> mx.array:
        raise RuntimeError("no memory")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Odd, "__call__", fail)
        with pytest.raises(RuntimeError, match="no memory"):
            target_for(model)
    assert target_for(model).spec.note


@pytest.mark.skipif(mx.default_device() != mx.cpu, reason="only MLX's CPU has no bfloat16 experts")
def test_an_error_that_comes_with_evaluation_is_the_models_own_too() -> None:
    """Said as a check that failed, it would send the user after the wrong thing."""
    with pytest.raises((RuntimeError, ValueError), match=r"(?i)gather|float32"):
        target_for(build(BY_NAME["mixtral"], mx.bfloat16))


def test_a_model_without_args_or_on_several_machines_is_refused() -> None:
    model = odd()
    del model.args
    with pytest.raises(UnsupportedTarget, match="no `args` that would say how far its attention reaches"):
        target_for(model)
    model = odd()
    model.model.pipeline_size = 3
    with pytest.raises(
        UnsupportedTarget, match="does not serve it: This test_target_probe model is split over 3 machines"
    ):
        target_for(model)


def test_a_model_with_nothing_in_common_is_refused() -> None:
    class Other(nn.Module):
        def __call__(self, ids: mx.array, cache: list) -> mx.array:
            return ids

    with pytest.raises(UnsupportedTarget, match=r"Other has no adapter .* no stack of layers under the name model or"):
        target_for(Other())


def overhear(patch: pytest.MonkeyPatch, kind: type) -> list[int]:
    """Widths of the forwards of models of this class from now on."""
    widths: list[int] = []
    call = kind.__call__

    def note(self, inputs, *args, **kwargs):
        widths.append(inputs.shape[1])
        return call(self, inputs, *args, **kwargs)

    patch.setattr(kind, "__call__", note)
    return widths


def test_a_family_whose_cache_has_no_exact_rollback_is_refused_before_the_first_token(tokenizer) -> None:
    """Rejected drafts would stay in it; not one forward may have run."""
    from mlx_lm.models import llama4

    args = llama4.ModelArgs.from_dict({"model_type": "llama4", "text_config": LLAMA4})
    with pytest.MonkeyPatch.context() as patch:
        forwards = overhear(patch, llama4.Model)
        with pytest.raises(UnsupportedTarget, match=r"llama4\.Model has no adapter .*\(ChunkedKVCache, KVCache\)"):
            next(stream_generate(llama4.Model(args), tokenizer, PROMPT, max_tokens=4))
    assert forwards == []


def test_a_cache_list_with_no_exact_rollback_is_refused_before_the_first_token(tokenizer) -> None:
    """Also under a family with an adapter, where the caller's list decides."""
    model, entries = tiny("llama"), [*(KVCache() for _ in range(3)), CacheList(KVCache(), KVCache())]
    with pytest.MonkeyPatch.context() as patch:
        layers = overhear(patch, type(model.layers[0]))
        with pytest.raises(UnsupportedTarget, match="entry 3 is a CacheList, for which no exact rollback is known"):
            next(stream_generate(model, tokenizer, PROMPT, max_tokens=4, prompt_cache=entries))
    assert layers == []


def test_supported_lists_adapters_only() -> None:
    assert not set(supported()) & {family.module for family in PROBED}
    assert {"nemotron_h", "llama4_text", "muse_glimmer", "lfm2_moe"} < set(supported())


def test_the_readme_names_every_adapter() -> None:
    """The list of targets there is the list here."""
    text = (Path(__file__).parent.parent / "README.md").read_text()
    paragraph = text.partition("## Supported pairs")[2].partition("\n## ")[0]
    assert not [name for name in supported() if f"`{name}`" not in paragraph]
