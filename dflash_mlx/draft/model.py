"""The DFlash draft: a small decoder that denoises a whole block of masked positions in one forward.

Its keys and values in every layer are [projected, fused target features of all committed positions ; the block's
own rows]; queries come from the block only. Embedding and head are the target's, unless it carries its own.
DFlash 2 adds convolutions around the sublayers (`convolution`) and a selector behind the head (`selector`).
Sources: DFlash paper (arXiv 2602.06036) sections 3.1-3.3; tensor names are z-lab's checkpoints'.
"""

from __future__ import annotations

import weakref

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.activations import swiglu

from dflash_mlx.blocksize import Acceptance, Costs, lasting_acceptance
from dflash_mlx.config import SLIDING, DraftConfig
from dflash_mlx.draft.context import DraftContext, FullLayer, SlidingLayer
from dflash_mlx.draft.convolution import DynamicConvolution
from dflash_mlx.draft.rope import make_rope, rotation_by
from dflash_mlx.draft.selector import CandidateSelector
from dflash_mlx.kernels import qk_norm_rope, sdpa_rows
from dflash_mlx.kernels.choice import STOCK, Kernels
from dflash_mlx.kernels.modules.linear import cases_of, linear
from dflash_mlx.kernels.operation import Case
from dflash_mlx.kernels.sdpa_rows import Attend, Sight
from dflash_mlx.stats import Track
from dflash_mlx.threads import compute_constants


class Attention(nn.Module):
    """Block rows attend to the context and to each other."""

    def __init__(self, config: DraftConfig, index: int) -> None:
        super().__init__()
        hidden, dim, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.n_heads, self.n_kv_heads, self.scale = config.num_heads, config.num_kv_heads, dim**-0.5
        self.q_proj = nn.Linear(hidden, config.num_heads * dim, bias=bias)
        self.k_proj = nn.Linear(hidden, config.num_kv_heads * dim, bias=bias)
        self.v_proj = nn.Linear(hidden, config.num_kv_heads * dim, bias=bias)
        self.o_proj = nn.Linear(config.num_heads * dim, hidden, bias=bias)
        self.q_norm = nn.RMSNorm(dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(dim, eps=config.rms_norm_eps)
        self.rope = make_rope(config)
        self._rotation = rotation_by(self.rope)
        self._causal = config.is_causal(index)
        self._window = config.sliding_window if config.layer_types[index] == SLIDING else None
        self._sight = Sight("causal" if self._causal else "full", self._window)

    def keys_values(self, x: mx.array, position: int | mx.array, kernels: Kernels = STOCK) -> tuple[mx.array, mx.array]:
        """[1, S, H] rows at position.. -> keys, values [1, kv_heads, S, D]."""
        keys, values = self._keys_values(x, kernels)
        (keys,) = self._turn(position, kernels, (keys, self.k_norm))
        return keys, values

    def _keys_values(self, x: mx.array, kernels: Kernels) -> tuple[mx.array, mx.array]:
        """[1, S, H] -> keys as projected [1, S, kv_heads, D], and values [1, kv_heads, S, D]."""
        shape = (*x.shape[:2], self.n_kv_heads, -1)
        keys, values = (linear(layer, x, kernels).reshape(shape) for layer in (self.k_proj, self.v_proj))
        return keys, values.transpose(0, 2, 1, 3)

    def _turn(
        self, position: int | mx.array, kernels: Kernels, *heads: tuple[mx.array, nn.RMSNorm]
    ) -> tuple[mx.array, ...]:
        """[1, S, heads, D] each, with their norms -> [1, heads, S, D], normed and turned to position.."""
        rotation = self._rotation
        if rotation is None or not kernels.wired:
            return tuple(self.rope(norm(x).transpose(0, 2, 1, 3), offset=position) for x, norm in heads)
        (first, norm), (second, other) = heads if len(heads) == 2 else (heads[0], (None, None))
        start = position if isinstance(position, int) else position.reshape(1, 1)
        weights = (norm.weight, None if other is None else other.weight)
        turning = qk_norm_rope.Heads(first, second, *weights, start, rotation, norm.eps)
        return kernels.run(qk_norm_rope.OPERATION, turning)

    def __call__(
        self, x: mx.array, context: FullLayer | SlidingLayer, position: int | mx.array, kernels: Kernels = STOCK
    ) -> mx.array:
        """[1, T, H] block rows at position.. (int, or [1] int32) -> [1, T, H]."""
        batch, rows, _ = x.shape
        queries = linear(self.q_proj, x, kernels).reshape(batch, rows, self.n_heads, -1)
        keys, values = self._keys_values(x, kernels)
        queries, keys = self._turn(position, kernels, (queries, self.q_norm), (keys, self.k_norm))

        def joined() -> tuple[mx.array, mx.array, mx.array | None]:
            mask = self._mask(rows, context)
            return *context.with_block(keys, values), mask

        seen = context.seen if kernels.wired else None
        attend = Attend(queries, seen, keys, values, scale=self.scale, sight=self._sight, joined=joined)
        (out,) = kernels.run(sdpa_rows.OPERATION, attend)
        return linear(self.o_proj, out, kernels)

    def cases(self) -> list[Case]:
        """What has to be raced before the kernel serves this layer."""
        stored = self.q_norm.weight.dtype
        dtype = mx.float32 if stored == mx.float16 else stored  # of the activations, as `DraftModel.dtype`
        heads, sight = (self.n_heads, self.n_kv_heads), self._sight
        dim, rotation = round(self.scale**-2), self._rotation
        cases = sdpa_rows.cases_of(dtype, dim, *heads, mode=sight.mode, window=sight.window)
        if rotation is None or stored != dtype:
            return cases
        block = qk_norm_rope.case_of(dtype, *heads, dim, rotation, normed=True)
        context = qk_norm_rope.case_of(dtype, self.n_kv_heads, 0, dim, rotation, normed=True)
        return [*cases, block, context]

    def _mask(self, rows: int, context: FullLayer | SlidingLayer) -> mx.array | None:
        """[T, context + T] of bool, or None where every row sees everything.

        Row i sees a key iff the key is less than a window before it and, in a causal layer, not after it; and none that
        is not final.
        """
        if not self._causal and self._window is None and context.ahead is None:
            return None
        key, final = context.places(rows)
        query = mx.arange(rows)[:, None]
        seen = query >= key if self._causal else mx.ones((rows, len(key)), dtype=mx.bool_)
        if self._window is not None:
            seen = seen & (query - key < self._window)
        return seen if final is None else seen & final


class MLP(nn.Module):
    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def __call__(self, x: mx.array, kernels: Kernels = STOCK) -> mx.array:
        gated = swiglu(linear(self.gate_proj, x, kernels), linear(self.up_proj, x, kernels))
        return linear(self.down_proj, gated, kernels)


class Layer(nn.Module):
    def __init__(self, config: DraftConfig, index: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, index)
        self.mlp = MLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self._convolves = config.convolution is not None
        if config.convolution is not None:
            self.attention_conv = DynamicConvolution(config.hidden_size, config.convolution)
            self.mlp_conv = DynamicConvolution(config.hidden_size, config.convolution)

    def __call__(
        self, x: mx.array, context: FullLayer | SlidingLayer, position: int | mx.array, kernels: Kernels = STOCK
    ) -> mx.array:
        def attend(rows: mx.array) -> mx.array:
            return self.self_attn(rows, context, position, kernels)

        def feed(rows: mx.array) -> mx.array:
            return self.mlp(rows, kernels)

        u = self.input_layernorm(x)
        h = x + (self.attention_conv.around(attend, u) if self._convolves else attend(u))
        u = self.post_attention_layernorm(h)
        return h + (self.mlp_conv.around(feed, u) if self._convolves else feed(u))


class DraftModel(nn.Module):
    """A DFlash or DFlash 2 draft.

    name:       where it came from, for messages.
    block_size: the block to run when the caller does not say (at most `config.block_size`).
    costs, acceptance: what cycles with it cost on this machine, and how often it is right, learnt while it runs.
    track:      what was accepted of it (`dflash_mlx.health`).
    notes:      what the user should know about it, shown with every request.
    fault:      what was found broken while it ran.
    context_window: context rows that its layers keep at most; None keeps all that they see.
    largest_id: the largest target id that a reduced vocabulary proposes; -1 for a full one, whose padding is cut off.
    known_tokens: ids below this are in the tokenizer, and no other is a candidate of the selector; None: all are.
    vocabulary: [n] ascending target ids, the only ones that it proposes through the target's head (`draft.vocabulary`
        has it borrow their rows); None: all, or what a head of its own says.
    lender:     the head that it borrowed from.
    """

    def __init__(self, config: DraftConfig, name: str = "draft") -> None:
        super().__init__()
        self.config = config
        self.name = name
        self.block_size = min(config.runtime_block_size or config.block_size, config.block_size)
        self.costs = Costs()
        self.acceptance: Acceptance = lasting_acceptance(config.block_size)
        self.track = Track()
        self.notes: tuple[str, ...] = ()
        self.fault: str | None = None
        self.context_window = config.context_window
        self.known_tokens: int | None = None
        self.vocabulary: np.ndarray | None = None
        self.lender: weakref.ref[nn.Module] | None = None
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = [Layer(config, index) for index in range(config.num_layers)]
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self._ids: mx.array | None = None
        self._borrowed: nn.Module | None = None  # no part of its parameters: they are what its checkpoint holds
        self.largest_id = -1
        if config.selector is not None:
            self.candidate_selector = CandidateSelector(config.hidden_size, config.vocab_size, config.selector)
        if config.draft_vocab_size is not None:
            self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        compute_constants(self)

    @property
    def dtype(self) -> mx.Dtype:
        """Of the activations: that of the norms, which are never quantised; float32 instead of float16.

        Fused features overflow float16, and a draft of NaN accepts nothing.
        """
        stored = self.norm.weight.dtype
        return mx.float32 if stored == mx.float16 else stored

    def map_ids(self, ids: mx.array) -> None:
        """Say which target id each row of an own head of reduced vocabulary means.

        Args:
            ids: [draft_vocab_size] int32, absolute.
        Raises:
            ValueError: there is no such head, or its size is another.
        """
        if ids.shape != (self.config.draft_vocab_size,):
            raise ValueError(
                f"`ids` has to have one entry for each row of the draft's head ({self.config.draft_vocab_size}), got "
                f"shape {list(ids.shape)}."
            )
        self._ids = ids.astype(mx.int32)
        mx.eval(self._ids)  # another thread could not
        if self.config.draft_vocab_size != self.config.vocab_size:
            largest: int = self._ids.max().item()  # type: ignore[assignment]
            self.largest_id = largest

    def borrow_head(self, head: nn.Module, ids: mx.array) -> None:
        """Propose through these rows of the target's head: row i means the target id ids[i], [n] int32."""
        self._ids = ids.astype(mx.int32)
        mx.eval(self._ids)
        self._borrowed = head

    def share_head(self) -> None:
        """Propose through the target's whole head again."""
        self._ids = self._borrowed = None

    @property
    def head(self) -> nn.Module | None:
        """Its own head, or borrowed rows of the target's; None: it shares the target's, whole."""
        return self._borrowed if self.config.draft_vocab_size is None else self.lm_head

    @property
    def reduced_size(self) -> int | None:
        """How many tokens it proposes from, if not all."""
        if self._borrowed is not None:
            return None if self._ids is None else len(self._ids)
        rows = self.config.draft_vocab_size
        return rows if rows is not None and rows < self.config.vocab_size else None

    def make_context(self, start: int = 0) -> DraftContext:
        return DraftContext(self.config, start, window=self.context_window)

    def extend(
        self,
        context: DraftContext,
        features: mx.array,
        count: mx.array | None = None,
        kernels: Kernels = STOCK,
    ) -> None:
        """Add committed positions.

        Args:
            features: [1, S, n_taps * H] outputs of the tapped target layers, of positions context.length...
            count: [1] int32: only so many of them are committed, and `context.settle` will say how many. None is all.
            kernels: what runs the operations.
        """
        rows = features.shape[1]
        fused = linear(self.fc, features.astype(self.dtype), kernels)
        fused = self.hidden_norm(fused)  # [1, S, H]: project, then norm
        if count is not None:  # a row that is dropped is not seen, but its NaN would be
            fused = mx.where(mx.arange(rows)[:, None] < count, fused, 0)
        start, context.length = context.length, -1  # after an interrupt between two layers it covers nothing
        for layer, state in zip(self.layers, context.layers, strict=True):
            skip = rows - state.rows_for(rows) if count is None else 0
            state.append(*layer.self_attn.keys_values(fused[:, skip:], start + skip, kernels), count)
        context.length = start + rows if count is None else start

    def denoise(self, embeddings: mx.array, context: DraftContext, kernels: Kernels = STOCK) -> mx.array:
        """One forward over a block.

        Args:
            embeddings: [1, K+1, H] the target's embeddings of [anchor, mask x K]; the anchor is at
                context.position.
            kernels: what runs the operations.
        Returns:
            [1, K, H] after the final norm; row k predicts the token at context.position + 1 + k.
        """
        h = embeddings.astype(self.dtype)
        if self.config.input_embedding_scale != 1.0:
            h = h * self.config.input_embedding_scale
        position = context.position
        for layer, state in zip(self.layers, context.layers, strict=True):
            h = layer(h, state, position, kernels)
        return self.norm(h[:, 1:])

    def cases(self) -> list[Case]:
        """What has to be raced before the kernel serves its linear layers; its attention says what it wants itself."""
        called = [m for name, m in self.named_modules() if name.endswith("_proj") or name in ("fc", "lm_head")]
        return [case for module in called for case in cases_of(module, self.dtype)]

    def embed(self, ids: mx.array) -> mx.array:
        """[1, T] -> [1, T, H] through its own embedding, if it has one; the target's may have more rows."""
        return self.embed_tokens(mx.minimum(ids, self.config.vocab_size - 1))

    def transform_logits(self, logits: mx.array) -> mx.array:
        """The draft's own scaling and soft cap on the raw head's output, [.., V]."""
        if self.config.output_multiplier != 1.0:
            logits = logits * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        return mx.tanh(logits / cap) * cap if cap else logits

    def target_ids(self, rows: mx.array) -> mx.array:
        """[K] rows of the head -> [K] int32 ids of the target."""
        return (rows if self._ids is None else self._ids[rows]).astype(mx.int32)

    def over_target_ids(self, logits: mx.array, vocab_size: int) -> mx.array:
        """[K, rows of the head] -> [K, vocab_size]: by target id, -inf where the head has no row."""
        if self._ids is not None:
            width = max(vocab_size, self.config.vocab_size)
            everything = mx.full((len(logits), width), -mx.inf, dtype=logits.dtype)
            everything[:, self._ids] = logits
            logits = everything
        missing = vocab_size - logits.shape[1]
        if missing > 0:
            logits = mx.pad(logits, [(0, 0), (0, missing)], constant_values=-mx.inf)
        return logits[:, :vocab_size]
