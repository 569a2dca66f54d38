"""What the forward over one piece of a prompt holds beside weights and caches: a formula over the target's sizes.

Arrays that are alive at once, counted by their sizes. The counts are fitted to MLX's peak on a CPU (mlx 0.32.4) of
random models of 15 families whose sizes were varied one at a time; `tests/test_fit.py` holds them to it. With Metal
the same counts are assumed, without what its kernels do not store; that was never measured.
"""

from __future__ import annotations

from dflash_mlx.layer_sizes import Layer, TextSizes

# Per position: rows of hidden size, of all query heads, of a convolution's channels, of an MLP (gate and up), and of
# each expert (its two products, and three rows of hidden size on the way).
_HIDDEN, _QUERIES, _CHANNELS, _MLP, _EXPERT, _ROUTED = 6, 5, 3, 2, 2, 3
_GEMMA_HIDDEN, _GEMMA_MLP = 7, 3  # four norms a layer, and a GELU that is not compiled into one array
_PLAIN_MLP = 1  # nemotron_h: one matrix before a squared ReLU
_SINK_SCORES, _SINK_EXPERT = 3, 4  # gpt_oss on a CPU: sinks are put beside scores, in copies; an activation in parts
_SQUARES, _SQUARE = 2.7, 256  # Mamba-2: matrices of positions by positions, of at most so many at a time
_WIDENED = 1.5  # on a CPU norms and rotations of bfloat16 are computed in float32
# Widths of a head for which Metal's kernel for many rows stores no scores (mlx 0.32, scaled_dot_product_attention.cpp;
# it can do 192 and 256 too, and prefers not to).
_FUSED = (64, 72, 80, 96, 128)


def piece_bytes(
    sizes: TextSizes, context: int, chunk: int, size: int, *, metal: bool, quantized: bool = False, taps: tuple = ()
) -> int:
    """Bytes at the end of a context, where most is attended to.

    Args:
        context: positions, those of the piece included. chunk: positions of the piece.
        size: bytes of an activation.
        metal: whether Metal's kernels run.
        quantized: keys and values are, which are attended to without a kernel of MLX's.
        taps: layers whose outputs are kept for the draft until the piece is read.
    """
    computed = _computed(sizes, taps)
    attending = [layer for layer in computed if layer.attends]
    recurrent = [layer for layer in sizes.layers if layer.state]
    each = _per_position(sizes, attending, recurrent) * (_WIDENED if size < 4 and not metal else 1)
    found = round(size * chunk * (each + len(taps) * sizes.hidden)) + _masks(attending, context, chunk)
    stored = [layer for layer in attending if not metal or quantized or layer.width not in _FUSED]
    copies = _SINK_SCORES if sizes.kind == "gpt_oss" and not metal else 1
    found += size * chunk * copies * max((layer.heads * _columns(layer, context, chunk) for layer in stored), default=0)
    squares = _SQUARES * max((layer.square for layer in recurrent), default=0)
    found += round(4 * chunk * min(chunk, _SQUARE) * squares)  # in float32
    # Without a kernel the state after every position is kept until the outputs are read off; in float32. Mamba-2 has
    # no kernel for many rows.
    carried = [layer.carried for layer in recurrent if layer.square or not metal]
    return found + 4 * min(chunk, _SQUARE) * max(carried, default=0)


def _computed(sizes: TextSizes, taps: tuple) -> list[Layer]:
    """Layers that run to their end: of the last one that keeps something only keys and values are wanted."""
    last = max((index for index, layer in enumerate(sizes.layers) if layer.keeps), default=0)
    return list(sizes.layers[: max(last, 1 + max(taps, default=-1))])


def _per_position(sizes: TextSizes, attending: list[Layer], recurrent: list[Layer]) -> int:
    """Elements for each position of a piece."""
    hidden, dense, expert = _HIDDEN, _MLP, _EXPERT
    if sizes.kind.startswith("gemma"):
        hidden, dense = _GEMMA_HIDDEN, _GEMMA_MLP
    elif sizes.kind == "nemotron_h":
        dense = _PLAIN_MLP
    elif sizes.kind == "gpt_oss":
        expert = _SINK_EXPERT
    mlp = sizes.mlp
    queries = _QUERIES * max((layer.heads * layer.width for layer in attending), default=0)
    experts = mlp.experts * (expert * mlp.expert + _ROUTED * sizes.hidden) + dense * mlp.dense
    channels = _CHANNELS * max((layer.channels for layer in recurrent), default=0)
    wide = max(queries, experts) if mlp.held else queries + dense * mlp.dense
    return hidden * sizes.hidden + wide + channels


def _columns(layer: Layer, context: int, chunk: int) -> int:
    """Positions that a piece's positions attend to."""
    return context if layer.window is None else min(context, layer.window - 1 + chunk)


def _masks(attending: list[Layer], context: int, chunk: int) -> int:
    """A byte for each pair of positions, one mask for full layers and one for sliding ones."""
    return chunk * sum({layer.window: _columns(layer, context, chunk) for layer in attending}.values())
