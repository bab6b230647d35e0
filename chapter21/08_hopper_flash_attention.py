"""Section 21.2, on Hopper: attention whose softmax hides under the tensor cores' work.

    out = softmax(scale * q k^T) v     q [B, Hq, M, D], k and v [B, Hkv, N, D], causal or not

bfloat16 or float16, D = 64 or 128, for GPUs of compute capability 9.0 (H100, H200). In Triton's
Gluon the kernel says what Triton otherwise decides: who copies, who multiplies, who waits for whom.

On a multiprocessor the exponentials of a block of scores take as long as its two products if
D = 64, half as long if D = 128: done one after the other, the tensor cores rest for a third of the
time or more. Each rung lets more happen at the same time. TFLOP/s on an H200, M = N = 4096, B * Hq
* D = 8192 (--bench prints other sizes, beside other libraries; causal counts half the operations):

                                                          D = 128   causal   D = 64, causal
    1  one warpgroup, one producer warp: copies hide          463      432      283
    2  two warpgroups, taking turns: one multiplies,
       the other does its softmax                             666      602      400
    3  persistent programs: one tile's end and the
       next one's start overlap                               638      605      397
    4  softmax held under its own P V: a warpgroup
       overlaps the two by itself, too                        664      642      424

Another run may be 7 % off, as the GPU's clock moves with the load. Rung 3 is for short rows: at
N = 512, D = 128 it reaches 563, rung 2 411. Rung 4 is used where it was faster in every run, which
is D = 64, causal, from N = 2048 on.

If causal, tiles differ in length, but if M = N the longest and the shortest of a head have together
as many blocks, to within one, as the second longest and the second shortest: a program takes them
in such pairs, in rungs 1 and 2 too. A middle tile is dealt out singly, as all are if not causal.

One program is a producer warp and NUM_WG consumer warpgroups of 4 warps. A warpgroup owns 64
queries; all share the tiles of k and v. A warpgroup works on one stream of blocks, tile of queries
after tile of queries, a tile's blocks of keys from the last to the first. In one step it starts
S = Q K^T of block i + 1, then O += P V of block i; waits for S, does the softmax of i + 1 while P V
runs; waits for O and rescales it. The step from a tile's last block to the next tile's first is no
different, save that O is then finished and stored: only the first and last step of a program have
nothing to overlap with.

The barriers. i counts blocks and t counts tiles since the program began, both the same in every
warp. Block i is in slot i % STAGES, use i // STAGES; the queries of tile t are in slot t % 2, use
t // 2. A barrier starts in phase 0; wait(p) returns once the latest completed phase has parity p,
so wait(1) on a fresh one returns at once.

    barrier             arrivals  completed by                       waited on by
    k_full[slot]        1         producer's expect + all bytes      consumer, parity use & 1
    k_empty[slot]       NUM_WG    consumers, once Q K^T is done      producer, parity (use & 1) ^ 1
    v_full, v_empty     the same, released once P V is done
    q_full[slot, wg]    1         producer's expect + all bytes      its warpgroup, parity use & 1
    q_empty[slot, wg]   1         its warpgroup after the tile's     producer, parity (use & 1) ^ 1
                                  last Q K^T
    turn[wg]            1         warpgroup wg - 1, cyclic, when     warpgroup wg, before it starts
                                  it has started step i's products   its own: parity i & 1, for
                                                                     wg = 0 (i & 1) ^ 1: it begins

The producer copies in the order in which consumers ask, Q K0 | K1 V0 | K2 V1 | ..., so no warp
waits for something that is queued behind what it holds. No phase is lapped: a slot is not filled
again before NUM_WG releases, and a warpgroup gets its next turn only after all others had theirs.
One warpgroup alone takes no turns.

    python 08_hopper_flash_attention.py                     checks, on small sizes
    python 08_hopper_flash_attention.py --bench [--out DIR] a table beside other libraries
"""

import argparse
import math
import os
import sys

import torch

# Without a GPU, Triton's interpreter runs the kernels; it must be chosen before triton is imported.
INTERPRET = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRET else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

import triton
import triton.language as tl

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    # The older names are gone from triton 3.9.
    copy_in = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
    copy_out = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
except ImportError:  # no Gluon, or another one: then the kernels below are defined, but cannot run
    gluon, gl, TensorDescriptor = triton, tl, None

LOG2_E = 1.4426950408889634
BLOCK_N = 128  # keys in a block

KINDS = [(64, False), (64, True), (128, False), (128, True)]  # D, causal
STAGES = {64: 4, 128: 2}  # by D: blocks of k and v in flight, as many as shared memory takes

# num_wg: warpgroups. persistent: one program a multiprocessor, else one a tile, or pair of tiles.
# overlap: softmax held under P V, for which three warpgroups have too few registers.
RUNGS = {
    "1, one warpgroup": {"num_wg": 1, "overlap": False, "persistent": False},
    "2, two in turns": {"num_wg": 2, "overlap": False, "persistent": False},
    "3, persistent programs": {"num_wg": 2, "overlap": False, "persistent": True},
    "4, overlap": {"num_wg": 2, "overlap": True, "persistent": True},
}


def choose_config(D, causal, N):
    """The fastest measured, as in RUNGS: a third warpgroup pays if D = 64, unless causal."""
    num_wg = 3 if D == 64 and not causal else 2
    return {"num_wg": num_wg, "overlap": D == 64 and causal and N >= 2048, "persistent": True}


@gluon.jit
def share(units, place):
    """How many of units, dealt out one by one, come to a program in this place."""
    return (units - place + gl.num_programs(0) - 1) // gl.num_programs(0)


@gluon.jit
def count_tiles(tiling, CAUSAL: gl.constexpr):
    """(how many tiles this program works on in pairs, how many in all)."""
    num_m, heads, Hq, N = tiling
    pairs = 0
    alone = heads * num_m
    if CAUSAL:
        pairs = heads * (num_m // 2)
        alone -= 2 * pairs
    pid = gl.program_id(0)
    paired = 2 * share(pairs, pid)
    # From the other end, as those who come last have the fewest pairs.
    return paired, paired + share(alone, gl.num_programs(0) - 1 - pid)


@gluon.jit
def find_tile(
    t, paired, tiling, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr
):
    """The t-th tile of this program: (batch * head, first row, number of blocks of keys)."""
    num_m, heads, Hq, N = tiling
    programs = gl.num_programs(0)
    i = (t - paired) * programs + programs - 1 - gl.program_id(0)
    if CAUSAL:
        # If M = N, tiles m and num_m - 1 - m have about as many blocks as any other such pair.
        half = gl.maximum(num_m // 2, 1)
        pair = t // 2 * programs + gl.program_id(0)
        m = pair % half
        m = gl.where(t % 2 == 0, num_m - 1 - m, m)
        head = gl.where(t < paired, pair // half, i)
        m = gl.where(t < paired, m, num_m // 2)
    else:
        head = i // num_m
        m = i % num_m
    first_row = m * BLOCK_M
    end = N
    if CAUSAL:
        end = gl.minimum(N, first_row + BLOCK_M)
    return head, first_row, gl.cdiv(end, BLOCK_N)


@gluon.jit
def copy_tile(desc, batch, head, row, smem, full):
    """Start the copy of a tile; full completes when all of its bytes are there."""
    mbarrier.expect(full, desc.block_type.shape[2] * desc.block_type.shape[3] * 2)
    copy_in(desc, [batch, head, row, 0], full, smem)


@gluon.jit
def copy_block(desc, batch, head, row, smem, full, empty, i):
    """Start the copy of block i of k or v into its slot, once that is free."""
    STAGES: gl.constexpr = smem.shape[0]
    slot = i % STAGES
    mbarrier.wait(empty.index(slot), ((i // STAGES) & 1) ^ 1)
    copy_tile(desc, batch, head, row, smem.index(slot), full.index(slot))


@gluon.jit
def produce(
    q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, bars, tiling, queries_per_kv,
    CAUSAL: gl.constexpr,
):  # fmt: skip
    """The producer warp: all copies to shared memory, in the order in which they are used."""
    NUM_WG: gl.constexpr = q_smem.shape[0] // 2
    BLOCK_N: gl.constexpr = k_smem.shape[3]
    q_full, q_empty, k_full, k_empty, v_full, v_empty, turn = bars
    num_m, heads, Hq, N = tiling
    i = 0
    last_b = 0  # where the v of block i - 1 is
    last_h = 0
    last_row = 0
    paired, tiles = count_tiles(tiling, CAUSAL)
    for t in range(tiles):
        bh, first_row, blocks = find_tile(t, paired, tiling, 64 * NUM_WG, BLOCK_N, CAUSAL)
        b = bh // Hq
        h = bh - b * Hq
        hk = h // queries_per_kv
        for wg in gl.static_range(NUM_WG):
            slot = (t % 2) * NUM_WG + wg
            mbarrier.wait(q_empty.index(slot), ((t // 2) & 1) ^ 1)
            copy_tile(q_desc, b, h, first_row + 64 * wg, q_smem.index(slot), q_full.index(slot))
        for j in range(blocks):
            row = (blocks - 1 - j) * BLOCK_N
            copy_block(k_desc, b, hk, row, k_smem, k_full, k_empty, i)
            if i > 0:
                copy_block(v_desc, last_b, last_h, last_row, v_smem, v_full, v_empty, i - 1)
            last_b = b
            last_h = hk
            last_row = row
            i += 1
    copy_block(v_desc, last_b, last_h, last_row, v_smem, v_full, v_empty, i - 1)


@gluon.jit
def start_scores(q, k_smem, k_full, i):
    """Start S = Q K^T of block i."""
    STAGES: gl.constexpr = k_smem.shape[0]
    BLOCK_N: gl.constexpr = k_smem.shape[3]
    D: gl.constexpr = k_smem.shape[4]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    slot = i % STAGES
    mbarrier.wait(k_full.index(slot), (i // STAGES) & 1)
    k = k_smem.index(slot).reshape([BLOCK_N, D])
    zero = gl.zeros([64, BLOCK_N], gl.float32, layout)
    return warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def start_values(p, o, v_smem, v_full, i):
    """Start O += P V of block i."""
    STAGES: gl.constexpr = v_smem.shape[0]
    BLOCK_N: gl.constexpr = v_smem.shape[3]
    D: gl.constexpr = v_smem.shape[4]
    slot = i % STAGES
    mbarrier.wait(v_full.index(slot), (i // STAGES) & 1)
    v = v_smem.index(slot).reshape([BLOCK_N, D])
    return warpgroup_mma(p, v, o, use_acc=True, is_async=True)


@gluon.jit
def weigh(s, m_i, scale, limit, MASKED: gl.constexpr):
    """Weights of a block of scores, the new running maximum (scaled), the old sums' factor."""
    if MASKED:
        cols = gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
        s = gl.where(cols[None, :] < limit[:, None], s, float("-inf"))
    # The scale is positive, so the maximum may be taken before it is applied.
    m_new = gl.maximum(m_i, gl.max(s, 1) * scale)
    shift = gl.where(m_new == float("-inf"), 0.0, m_new)
    p = gl.exp2(s * scale - shift[:, None])  # compiles to one multiply-add and one 2^x
    return p, m_new, gl.exp2(m_i - shift)


@gluon.jit
def row_parts(p):
    """Sums of p [64, n] as [64, 4]: each thread adds up only what it holds.

    Of every 8 columns the layout gives 2 to each of 4 threads. Adding the 4 parts of a row up takes
    exchanges between threads, so that is left to the end.
    """
    n: gl.constexpr = p.shape[1]
    return gl.sum(gl.sum(p.reshape([64, n // 8, 4, 2]), 3), 1)


@gluon.jit
def spread(x, like):
    """x [64], one number a row, in a layout in which it multiplies like [64, n]."""
    return gl.convert_layout(x, gl.SliceLayout(1, like.type.layout), assert_trivial=True)[:, None]


@gluon.jit
def visible_keys(first_row, N, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr):
    """How many keys each of 64 queries sees."""
    layout: gl.constexpr = gl.SliceLayout(
        1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    )
    limit = gl.full([64], 0, gl.int32, layout) + N
    if CAUSAL:
        limit = gl.minimum(first_row + gl.arange(0, 64, layout) + 1, limit)
    return limit


@gluon.jit
def step(
    q, p, o, m_i, parts, scale, limit, i, k_smem, v_smem, bars,
    WG: gl.constexpr, NUM_WG: gl.constexpr, OVERLAP: gl.constexpr,
    MASKED: gl.constexpr, NEW_TILE: gl.constexpr,
):  # fmt: skip
    """Scores and softmax of block i + 1 while P V of block i runs."""
    STAGES: gl.constexpr = k_smem.shape[0]
    q_full, q_empty, k_full, k_empty, v_full, v_empty, turn = bars
    if NUM_WG > 1:
        FIRST: gl.constexpr = 1 if WG == 0 else 0
        mbarrier.wait(turn.index(WG), (i & 1) ^ FIRST)
    s = start_scores(q, k_smem, k_full, i + 1)
    o = start_values(p, o, v_smem, v_full, i)
    if NUM_WG > 1:
        mbarrier.arrive(turn.index((WG + 1) % NUM_WG))
    s = warpgroup_mma_wait(1, [s])
    mbarrier.arrive(k_empty.index((i + 1) % STAGES))
    p32, m_i, alpha = weigh(s, m_i, scale, limit, MASKED)
    if NEW_TILE:
        parts = row_parts(p32)
    else:
        parts = parts * spread(alpha, parts) + row_parts(p32)
    p_next = gl.convert_layout(p32.to(p.dtype), p.type.layout)
    if OVERLAP:
        # Passes at once, as this slot is still ours. Without it ptxas moves the exponentials behind
        # the next wait, out of the shadow of P V; across a loop, as this wait is, it does not.
        mbarrier.wait(v_full.index(i % STAGES), (i // STAGES) & 1)
    o, p = warpgroup_mma_wait(0, [o, p])
    mbarrier.arrive(v_empty.index(i % STAGES))
    if not NEW_TILE:
        o = o * spread(alpha, o)
    return o, p_next, m_i, parts


@gluon.jit
def last_step(p, o, v_smem, v_full, v_empty, i):
    """P V of a program's last block, overlapped with nothing."""
    o = start_values(p, o, v_smem, v_full, i)
    o, p = warpgroup_mma_wait(0, [o, p])
    mbarrier.arrive(v_empty.index(i % v_smem.shape[0]))
    return o


@gluon.jit
def consume(
    o_desc, q_smem, k_smem, v_smem, o_smem, bars, tiling, scale,
    WG: gl.constexpr, CAUSAL: gl.constexpr, MASKED: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """A warpgroup: 64 queries of every tile of this program."""
    NUM_WG: gl.constexpr = o_smem.shape[0]
    BLOCK_M: gl.constexpr = 64 * NUM_WG
    BLOCK_N: gl.constexpr = k_smem.shape[3]
    D: gl.constexpr = k_smem.shape[4]
    # Then a causal tile has something to hide only in its last block of keys, which comes first.
    gl.static_assert(not CAUSAL or BLOCK_N % BLOCK_M == 0)
    q_full, q_empty, k_full, k_empty, v_full, v_empty, turn = bars
    num_m, heads, Hq, N = tiling
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    o_tile = o_smem.index(WG)
    paired, tiles = count_tiles(tiling, CAUSAL)
    nothing = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, s_layout))

    # Scores and softmax of the program's first block, overlapped with nothing.
    head0, row0, blocks0 = find_tile(0, paired, tiling, BLOCK_M, BLOCK_N, CAUSAL)
    limit0 = visible_keys(row0 + 64 * WG, N, BLOCK_N, CAUSAL) - (blocks0 - 1) * BLOCK_N
    mbarrier.wait(q_full.index(WG), 0)
    s0 = start_scores(q_smem.index(WG).reshape([64, D]), k_smem, k_full, 0)
    s0 = warpgroup_mma_wait(0, [s0])
    mbarrier.arrive(k_empty.index(0))
    p0, m_i, alpha0 = weigh(s0, nothing, scale, limit0, MASKED)
    parts = row_parts(p0)
    p = gl.convert_layout(p0.to(o_desc.dtype), p_layout)

    i = 0
    for t in range(tiles):
        slot = (t % 2) * NUM_WG + WG
        # Found again, not carried, and so under other names than above and below: triton 3.6's
        # loop-aware CSE took a number of blocks that came out of the `if` below for that of the
        # first tile, and the program hung.
        bh, first_row, blocks = find_tile(t, paired, tiling, BLOCK_M, BLOCK_N, CAUSAL)
        limit = visible_keys(first_row + 64 * WG, N, BLOCK_N, CAUSAL)
        q = q_smem.index(slot).reshape([64, D])
        o = gl.zeros([64, D], gl.float32, o_layout)
        for _ in range(blocks - 1):
            o, p, m_i, parts = step(
                q, p, o, m_i, parts, scale, limit, i, k_smem, v_smem, bars,
                WG, NUM_WG, OVERLAP, False, False,
            )  # fmt: skip
            i += 1
        mbarrier.arrive(q_empty.index(slot))

        tile_parts = parts
        if t + 1 < tiles:
            next_head, next_row, next_blocks = find_tile(
                t + 1, paired, tiling, BLOCK_M, BLOCK_N, CAUSAL
            )
            next_limit = visible_keys(next_row + 64 * WG, N, BLOCK_N, CAUSAL)
            next_slot = ((t + 1) % 2) * NUM_WG + WG
            mbarrier.wait(q_full.index(next_slot), ((t + 1) // 2) & 1)
            next_q = q_smem.index(next_slot).reshape([64, D])
            o, p, m_i, parts = step(
                next_q, p, o, nothing, parts, scale, next_limit - (next_blocks - 1) * BLOCK_N,
                i, k_smem, v_smem, bars, WG, NUM_WG, OVERLAP, MASKED, True,
            )  # fmt: skip
        else:
            o = last_step(p, o, v_smem, v_full, v_empty, i)
        i += 1

        row_sum = gl.sum(tile_parts, 1)
        row_sum = gl.where(row_sum == 0.0, 1.0, row_sum)
        o = o * spread(1.0 / row_sum, o)
        tma.store_wait(0)  # the previous tile has left the buffer
        o_tile.reshape([64, D]).store(o.to(o_desc.dtype))
        # What ordinary stores wrote must be made visible to the copy engine. All other tiles were
        # written by it and are read through a barrier.
        fence_async_shared()
        b = bh // Hq
        copy_out(o_desc, [b, bh - b * Hq, first_row + 64 * WG, 0], o_tile)
    tma.store_wait(0)


# Sizes are run-time values even where they are 1 or multiples of 16: one kernel for all shapes.
@gluon.jit(do_not_specialize=["num_m", "heads", "Hq", "queries_per_kv", "N"])
def hopper_attention_kernel(
    q_desc, k_desc, v_desc, o_desc,
    num_m, heads, Hq, queries_per_kv, N, scale,
    STAGES: gl.constexpr, NUM_WG: gl.constexpr,
    CAUSAL: gl.constexpr, MASKED: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Allocate tiles and barriers, then split into warpgroups and producer."""
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[2]
    D: gl.constexpr = k_desc.block_type.shape[3]
    dtype: gl.constexpr = q_desc.dtype
    q_smem = gl.allocate_shared_memory(dtype, [2 * NUM_WG, 1, 1, 64, D], q_desc.layout)
    o_smem = gl.allocate_shared_memory(dtype, [NUM_WG, 1, 1, 64, D], o_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, D], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [2 * NUM_WG, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2 * NUM_WG, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [NUM_WG, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2 * NUM_WG):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(NUM_WG):
        mbarrier.init(turn.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=NUM_WG)
        mbarrier.init(v_empty.index(i), count=NUM_WG)
    fence_async_shared()

    bars = (q_full, q_empty, k_full, k_empty, v_full, v_empty, turn)
    tiling = (num_m, heads, Hq, N)
    # The first warpgroup is the program's own; the list after the functions has the warps of the
    # others, the last list how many registers a thread of theirs has. The rest is the first's.
    if NUM_WG == 1:
        gl.warp_specialize([
            (consume, (o_desc, q_smem, k_smem, v_smem, o_smem, bars, tiling, scale, 0,
                       CAUSAL, MASKED, OVERLAP)),
            (produce, (q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, bars, tiling,
                       queries_per_kv, CAUSAL)),
        ], [1], [24])  # fmt: skip
    elif NUM_WG == 2:
        gl.warp_specialize([
            (consume, (o_desc, q_smem, k_smem, v_smem, o_smem, bars, tiling, scale, 0,
                       CAUSAL, MASKED, OVERLAP)),
            (consume, (o_desc, q_smem, k_smem, v_smem, o_smem, bars, tiling, scale, 1,
                       CAUSAL, MASKED, OVERLAP)),
            (produce, (q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, bars, tiling,
                       queries_per_kv, CAUSAL)),
        ], [4, 1], [240, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (o_desc, q_smem, k_smem, v_smem, o_smem, bars, tiling, scale, 0,
                       CAUSAL, MASKED, OVERLAP)),
            (consume, (o_desc, q_smem, k_smem, v_smem, o_smem, bars, tiling, scale, 1,
                       CAUSAL, MASKED, OVERLAP)),
            (consume, (o_desc, q_smem, k_smem, v_smem, o_smem, bars, tiling, scale, 2,
                       CAUSAL, MASKED, OVERLAP)),
            (produce, (q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, bars, tiling,
                       queries_per_kv, CAUSAL)),
        ], [4, 4, 1], [160, 160, 32])  # fmt: skip


def gluon_fits():
    """Whether this triton's Gluon is one that the kernel is written in."""
    return TensorDescriptor is not None and not triton.__version__.startswith(("3.4.", "3.5."))


def not_here():
    """Why the kernel cannot run here, or ""."""
    if DEVICE == "cpu" or torch.version.hip or torch.cuda.get_device_capability() != (9, 0):
        return "needs an NVIDIA GPU of compute capability 9.0 (H100, H200)"
    if not gluon_fits():
        return f"needs the Gluon of triton 3.6 or newer, this is triton {triton.__version__}"
    return ""


def copyable(x):
    """x, or a contiguous copy where the copy engine refuses its address or strides."""
    fits = x.data_ptr() % 16 == 0 and x.stride(3) == 1
    for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True):
        fits = fits and (size == 1 or (stride > 0 and stride % 8 == 0))
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def tile_descriptor(x, rows):
    """What the copy engine has to know of x [B, H, L, D] to copy tiles of some rows of a head."""
    B, H, L, D = x.shape
    # The stride of a dimension of size 1 is never used, but must still be a valid one.
    strides = [D if size == 1 else x.stride(i) for i, size in enumerate((B, H, L))] + [1]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    return TensorDescriptor(x, [B, H, L, D], strides, [1, 1, rows, D], layout)


def launch_hopper(q, k, v, out, causal, scale, num_wg, overlap, persistent):
    """Run the kernel as one of RUNGS."""
    B, Hq, M = q.shape[:3]
    Hkv, N = k.shape[1:3]
    num_m = triton.cdiv(M, 64 * num_wg)
    grid = B * Hq * (triton.cdiv(num_m, 2) if causal else num_m)
    if persistent:
        grid = min(grid, torch.cuda.get_device_properties(q.device).multi_processor_count)
    hopper_attention_kernel[(grid,)](
        tile_descriptor(copyable(q), 64),
        tile_descriptor(copyable(k), BLOCK_N),
        tile_descriptor(copyable(v), BLOCK_N),
        tile_descriptor(out, 64),
        num_m, B * Hq, Hq, Hq // Hkv, N, scale * LOG2_E,
        STAGES[q.shape[3]], num_wg,
        causal, causal or N % BLOCK_N != 0, overlap,
        num_warps=4,
    )  # fmt: skip


def gpu_only_launches(arch=90):
    """Launches that the checks make on Hopper only: to compile, not to run."""
    if arch != 90 or not gluon_fits():
        return
    for D, causal in KINDS:
        for dtype, N in (torch.bfloat16, 300), (torch.float16, 256), (torch.bfloat16, 4096):
            q, k, v = (torch.empty(2, 4, length, D, dtype=dtype) for length in (70, N, N))
            config = choose_config(D, causal, N) | {"persistent": False}
            launch_hopper(q, k, v, q, causal, 1.0, **config)
    for rung in RUNGS.values():
        q = torch.empty(1, 1, 1, 128, dtype=torch.bfloat16)
        for causal in False, True:
            launch_hopper(q, q, q, q, causal, 1.0, **rung | {"persistent": False})


def check_hopper_inputs(q, k, v):
    """Raise TypeError or ValueError for tensors that hopper_flash_attention does not take."""
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.ndim == k.ndim == v.ndim == 4 or k.shape != v.shape or q.shape[0] != k.shape[0]:
        raise ValueError(f"want q [B, Hq, M, D], k and v [B, Hkv, N, D]; got {shapes}")
    if q.shape[3] != k.shape[3] or q.shape[3] not in (64, 128):
        raise ValueError(f"want one D of 64 or 128; got {shapes}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"want Hq a multiple of Hkv, both 1 or more; got {shapes}")
    for name, x in {"q": q, "k": k, "v": v}.items():
        if x.dtype not in (torch.float16, torch.bfloat16) or x.dtype != q.dtype:
            raise TypeError(f"want q, k and v all float16 or all bfloat16; {name} is {x.dtype}")
        if x.requires_grad:
            raise ValueError(f"forward only, but {name} requires grad; use {name}.detach()")
        if x.device != q.device:
            raise ValueError(f"want q, k and v on one GPU; q is on {q.device}, {name} {x.device}")


def hopper_flash_attention(q, k, v, causal=False, scale=None):
    """softmax(scale * q k^T) v: q [B, Hq, M, D], k and v [B, Hkv, N, D] -> out [B, Hq, M, D].

    float16 or bfloat16, float32 inside, out in q's dtype, contiguous; forward only. D is 64 or 128.
    Hq is a multiple of Hkv: query head h uses head h // (Hq // Hkv) of k and v. causal: query i
    sees the keys 0..i, also where M and N differ. Without keys the result is 0. scale:
    1 / sqrt(D) unless given. Tensors may have any strides; one is copied first if its rows are not
    in one piece, another stride is 0 or not a multiple of 8, or it does not begin at 16 bytes.
    Raises TypeError for another dtype, ValueError for shapes, devices or a scale that do not fit,
    RuntimeError on another GPU.
    """
    check_hopper_inputs(q, k, v)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    if not 1e-30 <= scale <= 1e30:
        raise ValueError(f"scale must be from 1e-30 to 1e30, got {scale}")
    if q.device.type != "cuda":
        raise ValueError(f"q is on {q.device}, want a GPU of compute capability 9.0 (H100, H200)")
    if not_here():
        raise RuntimeError(f"hopper_flash_attention {not_here()}")
    if q.numel() == 0 or k.numel() == 0:
        return torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    config = choose_config(q.shape[3], bool(causal), k.shape[2])
    with torch.cuda.device_of(q):
        launch_hopper(q, k, v, out, bool(causal), float(scale), **config)
    return out


def float64_heads(q, k, v, causal=False, scale=None):
    """Reference in float64, on the CPU: the whole M x N matrix of scores of every head."""
    q, k, v = (x.cpu().double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = q @ k.mT * (q.shape[3] ** -0.5 if scale is None else scale)
    if causal:
        scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    return torch.softmax(scores, dim=-1) @ v


def nearly(out, want):
    """Is out, rounded to its dtype, the float64 want? The error is relative to the largest value.

    In 16 bits the weights are rounded too, before they multiply v.
    """
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[out.dtype]
    return bool((out.cpu().double() - want).abs().max() <= tolerance * want.abs().max())


def hopper_right(q, k, v, **options):
    """Is hopper_flash_attention right, for tensors on the CPU?"""
    out = hopper_flash_attention(*(x.to(DEVICE) for x in (q, k, v)), **options)
    return nearly(out, float64_heads(q, k, v, **options))


def hopper_rung_right(config, causal):
    """Is a rung right, in a grid that gives every program work?"""
    q, k, v = (torch.randn(5, 16, L, 128).to(torch.bfloat16).to(DEVICE) for L in (300, 450, 450))
    out = torch.full_like(q, math.nan)
    launch_hopper(q, k, v, out, causal, 0.3, **config)
    return nearly(out, float64_heads(q, k, v, causal, 0.3))


def section_21_2_hopper():
    if not_here():
        print(f"skipped: {not_here()}", file=sys.stderr)
        sys.exit(77)
    torch.manual_seed(0)
    print("=== Section 21.2, on Hopper: every rung, full and causal, against float64 ===")
    for name, config in RUNGS.items():
        right = [hopper_rung_right(config, causal) for causal in (False, True)]
        print(f"rung {name}: right? {all(right)}")

    print("\n=== Section 21.2, on Hopper: dtypes, widths and shapes ===")
    for dtype in torch.bfloat16, torch.float16:
        for D, causal in KINDS:
            right = []
            for B, Hq, Hkv, M, N in (
                (1, 1, 1, 1, 1),
                (2, 3, 3, 200, 513),
                (2, 3, 3, 513, 127),
                (3, 8, 2, 65, 200),
                (5, 16, 8, 300, 512),
            ):
                q = torch.randn(B, Hq, M, D).to(dtype)
                k, v = torch.randn(2, B, Hkv, N, D).to(dtype)
                right.append(hopper_right(q, k, v, causal=causal))
            kind = "causal" if causal else "full"
            print(f"{str(dtype)[6:]}, D = {D}, {kind}, five shapes: right? {all(right)}")

    print("\n=== Section 21.2, on Hopper: strides, scores and keys that break kernels ===")
    q, k, v = torch.randn(2, 150, 3, 4, 64).to(torch.bfloat16).permute(2, 0, 3, 1, 4)
    print(f"q, k and v interleaved: right? {hopper_right(q, k, v, causal=True)}")
    v = v[:, :1].expand(2, 4, 150, 64)
    print(f"four heads of v that are one, copied: right? {hopper_right(q, k, v, causal=True)}")
    q, k, v = torch.randn(3, 1, 2, 200, 128).to(torch.bfloat16)
    print(f"scores in the hundreds: right? {hopper_right(10 * q, 10 * k, v)}")
    q = torch.full((1, 1, 3, 64), -512.0).to(torch.float16)
    k = (512 + torch.arange(70.0) / 2)[:, None].expand(1, 1, 70, 64).to(torch.float16)
    v = torch.randn(1, 1, 70, 64).to(torch.float16)
    print(f"scores below -16 million: right? {hopper_right(q, k, v, scale=1.0)}")
    buffer = torch.full((2, 1, 2, 200, 128), math.nan, dtype=torch.bfloat16, device=DEVICE)
    buffer[:, :, :, :77] = torch.randn(2, 1, 2, 77, 128)
    k, v = buffer[:, :, :, :77]
    q = torch.randn(1, 2, 65, 128).to(torch.bfloat16).to(DEVICE)
    out = hopper_flash_attention(q, k, v)
    print(f"NaN beyond the last key: right? {nearly(out, float64_heads(q, k, v))}")
    print(f"no keys: all zeros? {not hopper_flash_attention(q, k[:, :, :0], v[:, :, :0]).any()}")

    print("\n=== Section 21.2, on Hopper: the same bits every time ===")
    for D, causal in KINDS:
        q, k, v = torch.randn(3, 4, 8, 1000, D).to(torch.bfloat16).to(DEVICE)
        first = hopper_flash_attention(q, k, v, causal)
        same = all(torch.equal(hopper_flash_attention(q, k, v, causal), first) for _ in range(19))
        print(f"D = {D}, {'causal' if causal else 'full'}: 20 runs equal? {same}")


BENCH_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)


def bench_hopper_shape(N, D, causal, peers):
    """One row of the table: TFLOP/s of ours and of these peers."""
    from harness.bench import attention_cell, attention_inputs

    q, k, v = attention_inputs(N, D)
    out = torch.full_like(q, math.nan)
    launch_hopper(q, k, v, out, causal, D**-0.5, **choose_config(D, causal, N))
    ours = lambda: hopper_flash_attention(q, k, v, causal)  # noqa: E731
    return attention_cell(out, ours, q, k, v, causal, peers)


def bench_hopper_rungs():
    """Print the docstring's table."""
    from harness.bench import attention_error, attention_inputs, attention_tflops

    for name, config in RUNGS.items():
        speeds = []
        for D, causal in (128, False), (128, True), (64, True):
            q, k, v = attention_inputs(4096, D)
            out = torch.full_like(q, math.nan)

            def run(q=q, k=k, v=v, out=out, causal=causal, config=config):
                launch_hopper(q, k, v, out, causal, q.shape[3] ** -0.5, **config)

            run()
            if not attention_error(out, q, k, v, causal) < 5e-3:
                raise RuntimeError(f"wrong result: rung {name}, D = {D}, causal: {causal}")
            speeds.append(attention_tflops(run, q, causal))
        print(f"{name:24}" + "".join(f"{speed:8.1f}" for speed in speeds), flush=True)


def bench_hopper(out, only, peers):
    """Print the tables; write attention_hopper.csv and .png into out, or benchmarks/<gpu>.

    only: a (D, causal, N) to measure and print, and write nothing. peers: words of their names.
    """
    from harness.bench import attention_peers, draw_attention, results_folder, save_table

    if not_here():
        raise SystemExit(f"--bench {not_here()}")
    names = attention_peers(peers)
    if only:
        D, causal, N = only
        print(bench_hopper_shape(N, D, causal, names))
        return
    folder = results_folder(out)
    print("TFLOP/s, N = 4096: D = 128 full, D = 128 causal, D = 64 causal")
    bench_hopper_rungs()
    cells = (bench_hopper_shape(N, D, causal, names) for D, causal in KINDS for N in BENCH_LENGTHS)
    table = save_table(cells, folder / "attention_hopper.csv")
    draw_attention(folder / "attention_hopper.png", table, "hopper_flash_attention", names)


def shape_to_measure(text):
    """D,causal,N as on the command line: 128,1,4096."""
    D, causal, N = map(int, text.split(","))
    if (D, causal) not in KINDS or N not in BENCH_LENGTHS:
        raise ValueError
    return D, bool(causal), N


def peers_to_measure(text):
    """The comma-separated words, in lower case; none for an empty text."""
    return [word.lower() for word in text.split(",") if word]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Hopper attention: checks, or --bench a table.")
    parser.add_argument("--bench", action="store_true", help="measure; needs pandas, matplotlib")
    parser.add_argument("--out", help="folder for the .csv and .png (default: benchmarks/<gpu>)")
    parser.add_argument("--only", type=shape_to_measure, metavar="D,CAUSAL,N", help="as 128,1,4096")
    parser.add_argument(
        "--peers", type=peers_to_measure, metavar="NAME,...",
        help="only peers whose names contain one of these, as cudnn,cute",
    )  # fmt: skip
    options = parser.parse_args()
    if options.bench:
        # Only --bench needs this repository beside the script.
        sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
        bench_hopper(options.out, options.only, options.peers)
    else:
        section_21_2_hopper()
