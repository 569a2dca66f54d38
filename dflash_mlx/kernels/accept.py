"""Acceptance on the device: accepted drafts, the tokens that become final, the next block, and whether to stop.

    accept(draft, target, eos, budget, mask_id, next_rows) -> n, commit, next_block, flags

| argument | what |
|---|---|
| draft [B, L]  | block of ids, column 0 the anchor; int32 or uint32; the kernel takes L <= 32 |
| target [B, L] | the target's own choice after each column, likewise |
| eos [E]       | stop tokens, ids of at least 0; E may be 0 |
| budget [B]    | tokens that may still become final, at least 0, int32 (no limit: any number of at least L) |
| mask_id, next_rows | the draft's mask token and the rows of its next block, ints |

| result | what |
|---|---|
| n [B] int32          | drafts that were accepted and kept, 0..L-1 |
| commit [B, L] int32  | the tokens that become final, then -1 |
| next_block [B, next_rows] int32 | [last final token, mask_id, ...]; the anchor again where nothing became final |
| flags [B] uint32     | STOPPED: the last token of `commit` is a stop token; SPENT: `commit` has `budget` tokens |

With m drafts that match, `commit` starts as the m drafts and the correction or bonus token, m + 1 tokens. It is cut to
`budget` tokens and then after its first stop token, which stays, exactly as `Verdict(m, tokens).truncate(budget, eos)`:
n = min(m, length of `commit`). So a row of flags 0 was not cut, has n + 1 tokens, and the next anchor is at n + 1
places further; a row that was cut has n or n + 1 tokens and a flag set. (SPENT is also set where all m + 1 tokens just
fit; STOPPED also where the bonus token is the stop token. Then n + 1 tokens are there and nothing was cut away.)
"""

from __future__ import annotations

import mlx.core as mx

from dflash_mlx.kernels.operation import Arrays, Call, Case, Launch, MetalKernel, Operation, Runner
from dflash_mlx.metal import source

STOPPED, SPENT = 1, 2
CASE = Case("accept", "int32", ())  # the only one: a block of any length is one launch
_LANES = 32

KERNEL = MetalKernel(
    name="dflash_accept",
    inputs=("draft", "target", "eos", "budget", "mask_id", "next_rows"),
    outputs=("n", "commit", "next_block", "flags"),
    body="""
    accept_block(
        draft, target, eos, budget, mask_id, next_rows, n, commit, next_block, flags, draft_shape[1], eos_shape[0],
        int(threadgroup_position_in_grid.y), int(thread_index_in_simdgroup));
    """,
    header=source("accept"),
)


def reference(
    draft: mx.array, target: mx.array, eos: mx.array, budget: mx.array, mask_id: int, next_rows: int
) -> Arrays:
    draft, target = draft.astype(mx.int32), target.astype(mx.int32)
    batch, columns = draft.shape
    place = mx.arange(columns, dtype=mx.int32)[None]  # [1, L]
    agree = (draft[:, 1:] == target[:, :-1]).astype(mx.int32)
    matched = mx.cumprod(agree, axis=1).sum(axis=1, keepdims=True).astype(mx.int32)  # [B, 1]
    stop = (target[..., None] == eos.astype(mx.int32)).any(axis=-1)
    end = mx.where(stop, place + 1, columns + 1).min(axis=1, keepdims=True)  # beyond any length: none
    room = budget.astype(mx.int32)[:, None]
    length = mx.minimum(mx.minimum(matched + 1, end), room)
    commit = mx.where(place < length, target, -1)
    last = mx.take_along_axis(target, mx.maximum(length - 1, 0), axis=1)
    anchor = mx.where(length > 0, last, draft[:, :1])
    masks = mx.full((batch, next_rows - 1), mask_id, dtype=mx.int32)
    flags = (end <= length).astype(mx.uint32) * STOPPED + (length >= room).astype(mx.uint32) * SPENT
    return mx.minimum(matched, length)[:, 0], commit, mx.concatenate([anchor, masks], axis=1), flags[:, 0]


def why_not(
    draft: mx.array, target: mx.array, eos: mx.array, budget: mx.array, mask_id: int, next_rows: int
) -> str | None:
    if draft.shape[1] > _LANES:
        return f"a block of {draft.shape[1]} rows is longer than {_LANES}"
    wide = [ids.dtype for ids in (draft, target, eos, budget) if ids.dtype not in (mx.int32, mx.uint32)]
    return f"ids of {wide[0]} are not 32 bits wide" if wide else None


def launch(
    run: Runner, draft: mx.array, target: mx.array, eos: mx.array, budget: mx.array, mask_id: int, next_rows: int
) -> Arrays:
    batch, columns = draft.shape
    stops = eos if eos.size else mx.array([-1], mx.int32)  # a buffer cannot be empty; no id is -1
    inputs = (draft, target, stops, budget, mx.array(mask_id, mx.int32), mx.array(next_rows, mx.int32))
    call = Launch(
        inputs=inputs,
        shapes=((batch,), (batch, columns), (batch, next_rows), (batch,)),
        dtypes=(mx.int32, mx.int32, mx.int32, mx.uint32),
        grid=(_LANES, batch, 1),
        threadgroup=(_LANES, 1, 1),
    )
    return tuple(run(KERNEL, call))


def case(draft: mx.array, target: mx.array, eos: mx.array, budget: mx.array, mask_id: int, next_rows: int) -> Case:
    return CASE


def sample(case: Case, rows: int, seed: int, hard: bool) -> Call:
    """One block of `rows`; hard: every draft matches and the last token is the stop token."""
    keys = mx.random.split(mx.random.key(seed), 2)
    target = mx.random.randint(0, 50_000, (1, rows), dtype=mx.int32, key=keys[0])
    draft = mx.concatenate([mx.array([[7]], mx.int32), target[:, :-1]], axis=1)
    if not hard:
        draft = mx.where(mx.random.uniform(shape=draft.shape, key=keys[1]) < 0.2, draft + 1, draft)
    eos = target[0, -1:] if hard else mx.array([50_001], mx.int32)
    return Call((draft, target, eos, mx.array([rows if hard else 1 << 20], mx.int32), 50_000, rows))


def floor(
    draft: mx.array, target: mx.array, eos: mx.array, budget: mx.array, mask_id: int, next_rows: int
) -> dict[str, int]:
    batch = len(draft)
    return {
        "draft": draft.nbytes - 4 * batch,  # not the anchor, unless nothing becomes final
        "target": target.nbytes,
        "eos": 4 * batch * max(eos.size, 1),
        "budget": 4 * batch,
        "mask_id": 4 * batch,
        "next_rows": 4 * batch,
    }


OPERATION = Operation(
    name="accept",
    kernels=(KERNEL,),
    why_not=why_not,
    reference=reference,
    launch=launch,
    case=case,
    sample=sample,
    first_rows=None,  # a later row decides nothing about an earlier one, but n is of the whole block
    floor=floor,
)
