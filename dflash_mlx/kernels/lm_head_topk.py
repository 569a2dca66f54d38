"""The best few tokens of every row, from the head's weights, without writing the logits.

    lm_head_topk(best) -> values, ids [, lse]

What is wanted, and of which rows and weights, is in the argument, a `Best`.

| result | what |
|---|---|
| values [M, k] float32 | largest first |
| ids [M, k] int32      | theirs; of equal logits the lowest id first, so k = 1 is `mx.argmax` |
| lse [M] float32       | log of the sum of exp over all logits, where `best.lse` asks for it |

Logits are rounded to hidden's type before they are compared, each step of the soft cap too. A forbidden token and NaN
count as -inf. The kernel reads every weight once, whatever M; rows do not depend on M. Up to 4, 5 to 8, and 9 to 16
rows are raced on their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import mlx.core as mx

from dflash_mlx.kernels.operation import Arrays, Call, Case, Launch, MetalKernel, Operation, Rows, Runner, name_of
from dflash_mlx.metal import source

_LISTS = (1, 4, 8, 16)  # lengths that kernels are compiled for
ROWS = 16
CLASSES = Rows((4, 8, ROWS))
_SIMDGROUPS = 4  # of a threadgroup, each with a tile
_GROUPS = 8  # SIMD-groups that merge one row


@dataclass(frozen=True, eq=False)
class Head:
    """Weights of a projection without bias: [V, H], or [V, H * bits / 32] uint32 with [V, H / group_size] beside it.

    through: the layer they are from, [1, M, H] -> [1, M, all its rows]: what runs where the kernel does not.
    """

    weight: mx.array
    scales: mx.array | None = None
    biases: mx.array | None = None
    bits: int = 0
    group_size: int = 1
    through: Callable[[mx.array], mx.array] | None = None

    @property
    def vocab_size(self) -> int:
        return len(self.weight)

    def logits(self, hidden: mx.array) -> mx.array:
        """[M, H] -> [M, V], as mlx's layers compute it."""
        if self.through is not None:
            return self.through(hidden[None])[0, :, : self.vocab_size]
        if self.scales is None:
            return hidden @ self.weight.T
        return mx.quantized_matmul(
            hidden, self.weight, self.scales, self.biases, transpose=True, group_size=self.group_size, bits=self.bits
        )

    def first(self, rows: int) -> Head:
        """Without the rows of the vocabulary from `rows` on."""
        if rows >= self.vocab_size:
            return self
        weight, scales, biases = (None if a is None else a[:rows] for a in (self.weight, self.scales, self.biases))
        assert weight is not None
        return replace(self, weight=weight, scales=scales, biases=biases)


@dataclass(frozen=True, eq=False)
class Best:
    """The k best tokens of every row: the argument of this operation.

    hidden:  [M, H], rows after the final norm; the kernel takes M <= 16.
    head:    dense [V, H] of hidden's type, or MLX's affine quantisation of it, for the kernel in 4 or 8 bits.
    k:       how many, 1..V; the kernel takes up to 16.
    bitmask: [M, ceil(V / 32)] uint32, bit n % 32 of word n / 32 allows token n; None allows all.
    softcap: logits z become tanh(z / softcap) * softcap.
    lse:     whether the log of the sum of exp over all logits is wanted too.
    """

    hidden: mx.array
    head: Head
    k: int
    bitmask: mx.array | None = None
    softcap: float | None = None
    lse: bool = False

    @property
    def length(self) -> int:
        """Of the kernel's lists."""
        return next(size for size in _LISTS if size >= self.k)

    @property
    def tiles(self) -> int:
        """Parts of the vocabulary, each a SIMD-group's."""
        return -(-self.head.vocab_size // _tile(self.head.vocab_size))

    def first(self, rows: int) -> Best:
        """Of the first rows only."""
        return replace(self, hidden=self.hidden[:rows], bitmask=None if self.bitmask is None else self.bitmask[:rows])


_INPUTS = ("x", "w", "scales", "biases", "bitmask", "cap", "tile")
_HEADER = source("lm_head_topk")


def _kernels(lse: bool) -> tuple[MetalKernel, MetalKernel]:
    """The two launches; Metal has to be told of every output, so there are two pairs."""
    part, suffix = ("part_lse", "_lse") if lse else ("part_value", "")
    best = MetalKernel(
        name=f"dflash_lm_head_topk{suffix}",
        inputs=_INPUTS,
        outputs=("part_value", "part_id", *(["part_lse"] if lse else [])),
        body=f"""
        const uint rows = uint(w_shape[0]), tiles = (rows + uint(tile) - 1u) / uint(tile);
        const uint at = threadgroup_position_in_grid.y * simdgroups_per_threadgroup + simdgroup_index_in_threadgroup;
        if (at < tiles) {{
            best_of_tile<T, BITS, GS, TILES, BLOCKS, KTOP, MASK, CAP, {str(lse).lower()}>(
                x, w, scales, biases, bitmask, cap, uint(tile), uint(x_shape[0]), rows, uint(x_shape[1]), tiles,
                part_value, part_id, {part}, at, thread_index_in_simdgroup);
        }}
        """,
        header=_HEADER,
    )
    join = """
        if (group == GROUPS - 1) {
            join_parts(part_lse + int64_t(row) * tiles * 2, tiles, lse + row, lane);
        }
    """
    merge = MetalKernel(
        name=f"dflash_topk_merge{suffix}",
        inputs=("part_value", "part_id", *(["part_lse"] if lse else [])),
        outputs=("value", "id", *(["lse"] if lse else [])),
        body=f"""
        threadgroup float lists[GROUPS * KTOP];
        threadgroup int list_ids[GROUPS * KTOP];
        const int row = int(threadgroup_position_in_grid.z), tiles = part_value_shape[1];
        const int group = int(simdgroup_index_in_threadgroup), lane = int(thread_index_in_simdgroup);
        const int count = tiles * KTOP;
        {join if lse else ""}
        best_of_parts<KTOP, GROUPS>(
            part_value + int64_t(row) * count, part_id + int64_t(row) * count, count, value + row * KTOP,
            id + row * KTOP, lists, list_ids, group, lane);
        """,
        header=_HEADER,
    )
    return best, merge


_PLAIN, _WITH_LSE = _kernels(False), _kernels(True)


def reference(best: Best) -> Arrays:
    k, bitmask, softcap = best.k, best.bitmask, best.softcap
    logits = best.head.logits(best.hidden)  # [M, V]
    if softcap is not None:
        logits = mx.tanh(logits / softcap) * softcap
    logits = mx.where(mx.isnan(logits), -mx.inf, logits)
    if bitmask is not None:
        token = mx.arange(best.head.vocab_size)
        allowed = (bitmask[:, token // 32] >> (token % 32).astype(mx.uint32)) & 1
        logits = mx.where(allowed.astype(mx.bool_), logits, -mx.inf)
    # Sorting is stable: of equal logits the lowest id stays first.
    ids = mx.argmax(logits, axis=1, keepdims=True) if k == 1 else mx.argsort(-logits, axis=1)[:, :k]
    values = mx.take_along_axis(logits, ids, axis=1).astype(mx.float32)
    found = (values, ids.astype(mx.int32))
    return (*found, mx.logsumexp(logits.astype(mx.float32), axis=1)) if best.lse else found


def why_not(best: Best) -> str | None:
    hidden, head, k = best.hidden, best.head, best.k
    rows, width = hidden.shape
    stored = head.weight.dtype if head.scales is None else head.scales.dtype
    if rows > ROWS:
        return f"{rows} rows are more than {ROWS}"
    if k > min(_LISTS[-1], head.vocab_size):
        return f"{k} tokens are more than {min(_LISTS[-1], head.vocab_size)}"
    if head.scales is not None and (head.bits not in (4, 8) or head.group_size not in (32, 64, 128)):
        return f"a head quantised to {head.bits} bits in groups of {head.group_size}"
    if head.scales is not None and head.biases is None:
        return "a quantised head without biases"
    if hidden.dtype not in (mx.float16, mx.bfloat16, mx.float32) or stored != hidden.dtype:
        return f"rows of {hidden.dtype} and a head of {stored}"
    if head.vocab_size * width >= 2**32:
        return f"a head of {head.vocab_size} x {width} has more weights than 32 bits count"
    return f"rows of {width} values are no multiple of 32" if width % 32 else None


def _tile(vocab_size: int) -> int:
    """Vocabulary rows of one SIMD-group: 64, and more where that makes over a thousand of them."""
    return 64 * -(-vocab_size // 65536)


def _unit(rows: int, dtype: mx.Dtype, length: int, lse: bool) -> tuple[int, int]:
    """Tiles of 8 vocabulary rows that share a pass over x, and blocks of 8 rows; fewer tiles where registers run out.

    No result depends on it.
    """
    blocks = 1 if rows <= 8 else 2
    return (2 if dtype == mx.float32 or (blocks == 2 and (lse or length > 8)) else 4), blocks


def launch(run: Runner, best: Best) -> Arrays:
    hidden, head, bitmask = best.hidden, best.head, best.bitmask
    rows, tiles, length, results = len(hidden), best.tiles, best.length, 2 + best.lse
    per_pass, blocks = _unit(rows, hidden.dtype, length, best.lse)
    # A buffer has to be there for an input that is not read.
    nothing = mx.zeros((1,), mx.uint32)
    cap = mx.array(best.softcap or 0.0, mx.float32)
    search, merge = _WITH_LSE if best.lse else _PLAIN
    parts = run(
        search,
        Launch(
            inputs=(
                hidden,
                head.weight,
                nothing if head.scales is None else head.scales,
                nothing if head.biases is None else head.biases,
                nothing if bitmask is None else bitmask,
                cap,
                mx.array(_tile(head.vocab_size), mx.int32),
            ),
            shapes=((rows, tiles, length), (rows, tiles, length), (rows, tiles, 2))[:results],
            dtypes=(mx.float32, mx.int32, mx.float32)[:results],
            grid=(32 * _SIMDGROUPS, -(-tiles // _SIMDGROUPS), 1),
            threadgroup=(32 * _SIMDGROUPS, 1, 1),
            template=(
                ("T", hidden.dtype),
                ("BITS", head.bits),
                ("GS", head.group_size),
                ("TILES", per_pass),
                ("BLOCKS", blocks),
                ("KTOP", length),
                ("MASK", bitmask is not None),
                ("CAP", best.softcap is not None),
            ),
        ),
    )
    values, ids, *sums = run(
        merge,
        Launch(
            inputs=tuple(parts),
            shapes=((rows, length), (rows, length), (rows,))[:results],
            dtypes=(mx.float32, mx.int32, mx.float32)[:results],
            grid=(32, _GROUPS, rows),
            threadgroup=(32, _GROUPS, 1),
            template=(("KTOP", length), ("GROUPS", _GROUPS)),
        ),
    )
    return values[:, : best.k], ids[:, : best.k], *sums


def case(best: Best) -> Case:
    hidden, head = best.hidden, best.head
    sizes = {
        "vocab": head.vocab_size,
        "hidden": hidden.shape[1],
        "bits": head.bits,
        "group": head.group_size,
        "k": best.k,
        "mask": int(best.bitmask is not None),
        "cap": int(best.softcap is not None),
        "lse": int(best.lse),
        "rows": CLASSES.of(len(hidden)),
    }
    return Case("lm_head_topk", name_of(hidden.dtype), tuple(sizes.items()))


def widths(case: Case) -> tuple[int, int]:
    return CLASSES.ends(case.size["rows"])


def sample(case: Case, rows: int, seed: int, hard: bool) -> Call:
    """Random weights; hard: few different vocabulary rows, so that many logits tie, and rows of very different size.

    Where they are not hard, all are small whole numbers: sums in any order have the same bits, so ids can be compared.
    """
    size, dtype = case.size, case.type
    vocab, width, bits, group = size["vocab"], size["hidden"], size["bits"], size["group"]
    keys = mx.random.split(mx.random.key(seed), 5)
    distinct = min(vocab, 7) if hard else vocab

    def words(shape: tuple[int, int], key: mx.array) -> mx.array:
        return mx.random.randint(-(2**31), 2**31 - 1, shape, mx.int32, key).view(mx.uint32)

    def whole(low: int, high: int, shape: tuple[int, int], key: mx.array) -> mx.array:
        return mx.random.randint(low, high + 1, shape, mx.int32, key)

    def repeated(weights: mx.array) -> mx.array:
        return weights[mx.arange(vocab) % distinct] if hard else weights

    if hard:
        sizes = mx.array([1e-3, 1.0, 0.0, 30.0])[mx.arange(rows) % 4][:, None]
        hidden = mx.random.normal((rows, width), key=keys[0]) * sizes
    else:
        hidden = whole(-1, 1, (rows, width), keys[0])
    if bits:
        codes = repeated(words((distinct, width * bits // 32), keys[1]))
        codes = codes if hard or bits == 4 else codes & 0x0F0F0F0F
        shape, half = (distinct, width // group), 2 ** (bits - 1) if hard else 8
        scales = mx.random.uniform(0.5, 1.5, shape, key=keys[2]) / half if hard else whole(1, 2, shape, keys[2])
        scales = repeated(scales).astype(dtype)
        head = Head(codes, scales, -half * scales, bits, group)
    else:
        shape = (distinct, width)
        weight = mx.random.normal(shape, key=keys[1]) * width**-0.5 if hard else whole(-8, 7, shape, keys[1])
        head = Head(repeated(weight).astype(dtype))
    mask = words((rows, -(-vocab // 32)), keys[3]) if size["mask"] else None
    cap = 30.0 if size["cap"] else None
    return Call((Best(hidden.astype(dtype), head, size["k"], mask, cap, bool(size["lse"])),))


def first_rows(call: Call, rows: int) -> Call:
    (best,) = call.arguments
    return Call((best.first(rows),))


def floor(best: Best) -> dict[str, int]:
    """Weights and mask once, the rows once per tile; then the parts of all tiles once.

    A SIMD-group passes over the rows again for every 16 or 32 weight rows of its tile, from caches: `_unit`.
    """
    hidden, head, tiles = best.hidden, best.head, best.tiles
    part = 4 * len(hidden) * tiles * best.length
    return {
        "x": tiles * hidden.nbytes,
        "w": head.weight.nbytes,
        "scales": 0 if head.scales is None else head.scales.nbytes,
        "biases": 0 if head.biases is None else head.biases.nbytes,
        "bitmask": 0 if best.bitmask is None else best.bitmask.nbytes,
        "cap": 4 * tiles,
        "tile": 4 * tiles,
        "part_value": part,
        "part_id": part,
        "part_lse": 8 * len(hidden) * tiles if best.lse else 0,
    }


OPERATION = Operation(
    name="lm_head_topk",
    kernels=(*_PLAIN, *_WITH_LSE),
    why_not=why_not,
    reference=reference,
    launch=launch,
    case=case,
    sample=sample,
    first_rows=first_rows,
    floor=floor,
    widths=widths,
    matrix=True,
)
