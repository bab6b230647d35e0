"""Section 21.3, fast: a ladder of gates towards the speed of reading the logits.

A gate reads M x E logits once and writes k weights and k ids per token, so a copy that moves as
many bytes is the yardstick. Fractions of its speed on an H200 for 1048576 x 256 float32 and k = 8
(--bench prints every shape, and bfloat16):

    1  one token per program          0.07  21.3's way: softmax, then two reductions per pick
    2  sixteen tokens per program     0.15  fewer programs, each with more to do
    3  logit and id in one number     0.21  a token per warp, a reduction per pick, k terms
    4  one token per thread           0.85  a thread needs no other to find its token's best k
    5  a token in several threads     1.00  fewer tokens at a time, so memory is read once

Rungs 3 to 5 choose on the logits; 1 and 2 on probabilities, which tie where they underflow to 0.
When the weights are renormalised the sum S over all experts cancels, e^a / S / (e^a / S + e^b / S),
so only the k terms picked are computed.

To sort more than 16 logits is too much for one thread, so rung 4 then works in two steps. The k
best logits lie in the k groups of V neighbours, V = 2 or 4, with the k best maxima. A maximum is
one cheap operation per logit; what is left for the sorting network is E / V maxima, at most 32 at a
time, and then the members of those k groups: all V of the best one, but only 1 of the k-th.

Those k groups are read again, a sector of 32 bytes each: 256 of a token's 1024 bytes. But what all
warps have read until then, 32 tokens each, is more than the caches hold: Nsight Compute sees rung 4
read 1.36 GB of memory for 1.07 GB of logits. Rung 5 cuts a token into parts, one per thread. Each
sorts its own, then they exchange their best. A warp holds fewer tokens, and memory is read once.

    python 09_fast_moe_gating.py                     checks, on small sizes
    python 09_fast_moe_gating.py --bench [--out DIR] a table beside other libraries
"""

import argparse
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

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# GPUs whose double-precision unit is half as wide as the other (V100, A100, H100, H200, B200).
FAST_DOUBLES = ((7, 0), (8, 0), (9, 0), (10, 0))
# For fewer tokens than this, more threads per token are better than a good use of each of them.
FEW_TOKENS = 8192


@triton.jit
def exp_approx(x):
    """e^x as 2^(log2(e) x): the GPU's exponential unit computes powers of two."""
    return tl.exp2(1.44269504 * x)


@triton.jit
def probabilities_kernel(
    x_ptr, weights_ptr, ids_ptr, M, E, stride, k: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rungs 1 and 2: ROWS tokens per program, the k most probable experts one after the other."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    experts = tl.arange(0, BLOCK)[None, :]
    mask = (rows < M) & (experts < E)
    # A token past the last one reads zeros, so that nothing computes -inf - -inf for it.
    x = tl.load(x_ptr + rows * stride + experts, mask=mask, other=0.0).to(tl.float32)
    x = tl.where(experts < E, x, float("-inf"))
    p = exp_approx(x - tl.max(x, axis=1, keep_dims=True))
    p = tl.where(experts < E, p / tl.sum(p, axis=1, keep_dims=True), -1.0)
    raw_sum = tl.zeros((ROWS, 1), tl.float32)
    tops = ()
    for j in tl.static_range(k):
        top = tl.max(p, axis=1, keep_dims=True)
        best = tl.min(tl.where(p == top, experts, BLOCK), axis=1, keep_dims=True)
        tl.store(ids_ptr + rows * k + j, best, mask=rows < M)
        raw_sum += top
        tops = tops + (top,)
        p = tl.where(experts == best, -1.0, p)
    for j in tl.static_range(k):
        tl.store(weights_ptr + rows * k + j, tops[j] / raw_sum, mask=rows < M)


@triton.jit
def nan_max(a, b):
    """The larger of two, NaN if either is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def pack(x, index, KEY: tl.constexpr):
    """Logit and id in one number that sorts by logit, then by lower id: no two keys are equal.

    A float's bits, read as an integer, sort like the float if it is positive, and backwards if
    not. The id goes below them, where bfloat16 and float16 have zeros (KEY int32), or into a
    second word (int64, or the low word of a float64, whose high word sorts as a float does).
    NaN, of either sign, sorts no lower than infinity.
    """
    # Adding 0.0 makes -0.0 a 0.0, which it must tie with.
    x += 0.0
    if KEY == tl.float64:
        # As the high word of a float64, infinity is an ordinary number, but NaN might be NaN again.
        x = tl.where(x < float("inf"), x, float("inf"))
    bits = x.to(tl.int32, bitcast=True)
    sign = bits >> 31  # all ones if x is negative
    if KEY == tl.float64:
        low = ((1023 - index) ^ sign).to(tl.uint32, bitcast=True)
        return ((bits.to(tl.int64) << 32) | low.to(tl.int64)).to(tl.float64, bitcast=True)
    elif KEY == tl.int64:
        # -inf becomes the least integer; what is below it, NaN with a sign, wraps to the top.
        high = (bits ^ (sign & 0x7FFFFFFF)) - 0x7FFFFF
        return (high.to(tl.int64) << 32) | (1023 - index)
    else:
        # A GPU's NaN has ones where the id goes, unlike infinity. Shifted by 21, not 31: there are
        # as many copies of the sign as are needed, and the compiler thinks of nothing worse.
        bits = tl.minimum(bits, 0x7F800000)
        return (bits ^ ((bits >> 21) & 0x7FFFFC00)) + (1023 - 0x7FFC00 - index)


@triton.jit
def unpack(key, KEY: tl.constexpr):
    """The logit, in float32, and the id that pack() put into key."""
    if KEY == tl.float64:
        key = key.to(tl.int64, bitcast=True)
        bits = (key >> 32).to(tl.int32)
        index = 1023 - ((key.to(tl.int32) ^ (bits >> 31)) & 1023)
    elif KEY == tl.int64:
        index = 1023 - (key & 1023).to(tl.int32)
        bits = (key >> 32).to(tl.int32) + 0x7FFFFF
        bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    else:
        index = 1023 - (key & 1023)
        bits = (key & -1024) + 0x7FFC00
        bits = bits ^ ((bits >> 21) & 0x7FFFFC00)
    return bits.to(tl.float32, bitcast=True), index


@triton.jit
def lowest(KEY: tl.constexpr):
    """A key below that of any logit; its id, 1023, is past the end wherever it is looked up."""
    if KEY == tl.float64:
        return -1.7976931348623157e308
    elif KEY == tl.int64:
        return -(2**63)
    else:
        return -(2**31)


@triton.jit
def packed_kernel(
    x_ptr, weights_ptr, ids_ptr, M, E, stride, k: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, KEY: tl.constexpr,
):  # fmt: skip
    """Rung 3: ROWS tokens per warp, one reduction per pick, softmax over the picks."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    experts = tl.arange(0, BLOCK)[None, :]
    mask = (rows < M) & (experts < E)
    x = tl.load(x_ptr + rows * stride + experts, mask=mask, other=0.0).to(tl.float32)
    keys = pack(x, experts, KEY)
    keys = tl.where(experts < E, keys, lowest(KEY))
    total = tl.zeros((ROWS, 1), tl.float32)
    weights = ()
    for j in tl.static_range(k):
        top = tl.max(keys, axis=1, keep_dims=True)
        keys = tl.where(keys == top, lowest(KEY), keys)
        value, index = unpack(top, KEY)
        if j == 0:
            first = value
        weight = exp_approx(value - first)
        total += weight
        weights = weights + (weight,)
        tl.store(ids_ptr + rows * k + j, index, mask=rows < M)
    for j in tl.static_range(k):
        tl.store(weights_ptr + rows * k + j, weights[j] / total, mask=rows < M)


@triton.jit
def exchange(a, b):
    """The larger and the smaller: one comparator of a network."""
    if a.dtype == tl.float64:
        # One comparison by the double-precision unit, which has nothing else to do.
        swap = a < b
        high = tl.where(swap, b, a)
        low = tl.where(swap, a, b)
    elif a.dtype == tl.int64:
        # No GPU compares 64 bits at once; given the larger, the smaller is cheaper by XOR.
        high = tl.maximum(a, b)
        low = a ^ b ^ high
    else:
        high = tl.maximum(a, b)
        low = tl.minimum(a, b)
    return high, low


@triton.jit
def merge(s, t, LENGTH: tl.constexpr):
    """Batcher's odd-even merge of two sorted tuples (Knuth, TAOCP 5.3.4); LENGTH is that of s.

    What a caller drops of the result, say with merge(...)[:k], the compiler never computes. Triton
    3.6 tells versions of a function apart by all its arguments' elements in a row, by which lengths
    1 and 2 would be 2 and 1: hence LENGTH.
    """
    if len(s) == 0 or len(t) == 0:
        return s + t
    elif len(s) == 1 and len(t) == 1:
        return exchange(s[0], t[0])
    else:
        even = merge(s[::2], t[::2], len(s[::2]))
        odd = merge(s[1::2], t[1::2], len(s[1::2]))
        both = even[:1]
        for i in tl.static_range(len(odd)):
            if i + 1 < len(even):
                both = both + exchange(odd[i], even[i + 1])
        return both + even[1 + len(odd) :] + odd[len(even) - 1 :]


@triton.jit
def best_of(t, k: tl.constexpr):
    """The best k of a tuple, sorted."""
    if len(t) == 1:
        return t
    else:
        first = best_of(t[: len(t) // 2], k)
        return merge(first, best_of(t[len(t) // 2 :], k), len(first))[:k]


@triton.jit
def xor(a, b):
    return a ^ b


@triton.jit
def swap_halves(x, PARTS: tl.constexpr):
    """x [R], where the halves of every PARTS neighbours have changed places."""
    if x.dtype == tl.float64:
        x = swap_halves(x.to(tl.int64, bitcast=True), PARTS).to(tl.float64, bitcast=True)
    else:
        halves = tl.reshape(x, (x.shape[0] // PARTS, 2, PARTS // 2))
        # a ^ b without a is b. All that the compiler makes of this is a shuffle per 32 bits.
        swapped = halves ^ tl.reduce(halves, 1, xor, keep_dims=True)
        x = tl.reshape(swapped, (x.shape[0],))
    return x


@triton.jit
def merge_parts(t, k: tl.constexpr, PARTS: tl.constexpr):
    """t is a sorted tuple for each of R rows: each row gets the best k of PARTS neighbours."""
    if PARTS == 1:
        return t
    else:
        t = merge_parts(t, k, PARTS // 2)
        others = ()
        for i in tl.static_range(len(t)):
            others = others + (swap_halves(t[i], PARTS),)
        return merge(t, others, len(t))[:k]


@triton.jit
def unstack(x):
    """[R, n] as a tuple of n columns [R]. Columns that lie in one thread are only renamed."""
    t = (x,)
    for _ in tl.static_range(5):
        if len(t) < x.shape[1]:
            even = ()
            odd = ()
            for i in tl.static_range(len(t)):
                a, b = tl.split(tl.reshape(t[i], (x.shape[0], x.shape[1] // len(t) // 2, 2)))
                even = even + (a,)
                odd = odd + (b,)
            t = even + odd
    columns = ()
    for i in tl.static_range(len(t)):
        columns = columns + (tl.reshape(t[i], (x.shape[0],)),)
    return columns


@triton.jit
def stack(t):
    """Columns [R] as one [R, len(t)], which stores several values per instruction."""
    parts = ()
    for i in tl.static_range(len(t)):
        parts = parts + (tl.reshape(t[i], (t[i].shape[0], 1)),)
    for _ in tl.static_range(5):
        if len(parts) > 1:
            joined = ()
            for i in tl.static_range(len(parts) // 2):
                x = tl.join(parts[i], parts[i + len(parts) // 2])
                joined = joined + (tl.reshape(x, (x.shape[0], x.shape[1] * 2)),)
            parts = joined
    return parts[0]


@triton.jit
def load_groups(
    ptr, there, start, N: tl.constexpr, WIDTH: tl.constexpr, V: tl.constexpr, GROUPS: tl.constexpr
):
    """The logits of N <= GROUPS groups of V neighbours from group start on: [R, GROUPS * V]."""
    at = start * V + tl.arange(0, GROUPS * V)[None, :]
    # Neighbouring threads read neighbouring addresses, a warp a few whole rows. Caches shall evict
    # them last: if V > 1, some are wanted again.
    if WIDTH % V == 0:
        mask = there if N == GROUPS else there & (at < WIDTH)
        return tl.load(ptr + at, mask=mask, eviction_policy="evict_last")
    else:
        mask = there & (at < WIDTH)
        return tl.load(ptr + at, mask=mask, other=float("-inf"), eviction_policy="evict_last")


@triton.jit
def best_groups(
    x, start, N: tl.constexpr, k: tl.constexpr, V: tl.constexpr, GROUPS: tl.constexpr,
    KEY: tl.constexpr,
):  # fmt: skip
    """The k best maxima, sorted, of N of GROUPS groups of V neighbours; start is the first one."""
    x = x.to(tl.float32)
    if V > 1:
        x = tl.reduce(tl.reshape(x, (x.shape[0], GROUPS, V)), 2, nan_max)
    # unstack() hands each thread all maxima of one token: from here on no thread needs another.
    maxima = unstack(x)
    keys = ()
    for i in tl.static_range(N):
        keys = keys + (pack(maxima[i], start + i, KEY),)
    return best_of(keys, k)


@triton.jit
def network_kernel(
    x_ptr, weights_ptr, ids_ptr, counts_ptr, M, TILES, stride: tl.constexpr,
    E: tl.constexpr, k: tl.constexpr, V: tl.constexpr, GROUPS: tl.constexpr, REST: tl.constexpr,
    ROWS: tl.constexpr, PARTS: tl.constexpr, KEY: tl.constexpr, RENORMALIZE: tl.constexpr,
    BINS: tl.constexpr,
):  # fmt: skip
    """Rungs 4 and 5: ROWS tokens at a time, a token in PARTS threads, GROUPS groups at a time.

    REST is a power of two that holds the groups that are left in the end.
    """
    WIDTH: tl.constexpr = E // PARTS
    ALL: tl.constexpr = (WIDTH + V - 1) // V
    LAST: tl.constexpr = (ALL - 1) // GROUPS * GROUPS
    FIRST: tl.constexpr = GROUPS if LAST > 0 else ALL
    if BINS:
        counts = tl.zeros((BINS,), tl.int32)
    for tile in range(tl.program_id(0), TILES, tl.num_programs(0)):
        first_row = tl.cast(tile, tl.int64) * ROWS
        row = tl.arange(0, ROWS * PARTS) // PARTS
        there = (row < M - first_row)[:, None]
        rows_ptr = x_ptr + first_row * stride + row[:, None] * stride
        # A thread's part of its token is like a shorter row of its own.
        part = tl.arange(0, ROWS * PARTS) % PARTS
        part_ptr = rows_ptr + part[:, None] * WIDTH
        first_group = part * (WIDTH // V)
        x = load_groups(part_ptr, there, 0, FIRST, WIDTH, V, GROUPS)
        if LAST > 0 and REST < GROUPS:
            # A short rest is little to hold: it arrives while the network sorts.
            rest = load_groups(part_ptr, there, LAST, ALL - LAST, WIDTH, V, REST)
        best = best_groups(x, first_group, FIRST, k, V, GROUPS, KEY)
        if LAST > GROUPS:  # a loop is compiled even if it has nothing to do
            for start in range(GROUPS, LAST, GROUPS):
                x = load_groups(part_ptr, there, start, GROUPS, WIDTH, V, GROUPS)
                more = best_groups(x, first_group + start, GROUPS, k, V, GROUPS, KEY)
                best = merge(best, more, len(best))[:k]
        if LAST > 0:
            if REST == GROUPS:
                rest = load_groups(part_ptr, there, LAST, ALL - LAST, WIDTH, V, REST)
            more = best_groups(rest, first_group + LAST, ALL - LAST, k, V, REST, KEY)
            best = merge(best, more, len(best))[:k]

        best = merge_parts(best, k, PARTS)  # from here on a token's threads know the same

        if V > 1:
            WHOLE: tl.constexpr = E % V == 0 and len(best) % PARTS == 0
            groups = best
            for _ in tl.static_range(-len(best) % PARTS):
                groups = groups + (lowest(KEY),)
            best = ()
            # In turn, each thread of a token reads the members of one of its best groups.
            for turn in tl.static_range(len(groups) // PARTS):
                key = groups[turn * PARTS]
                for i in tl.static_range(1, PARTS):
                    key = tl.where(part == i, groups[turn * PARTS + i], key)
                _, group = unpack(key, KEY)
                at = group[:, None] * V + tl.arange(0, V)[None, :]
                # Still in a cache, if programs do not hold too much at once; if weights are
                # renormalised, not needed after.
                x = tl.load(
                    rows_ptr + at, mask=there if WHOLE else there & (at < E),
                    eviction_policy="evict_first",
                )  # fmt: skip
                keys = pack(x.to(tl.float32), at, KEY)
                if not WHOLE:
                    keys = tl.where(at < E, keys, lowest(KEY))
                # The best of turn * PARTS better groups are ahead of this one's members, so they
                # have k - turn * PARTS places left. turn of those best begin this thread's list.
                more = best_of(unstack(keys), k - turn * PARTS)
                best = best[:turn] + merge(best[turn:], more, len(best[turn:]))[: k - turn]
            best = merge_parts(best, k, PARTS)

        first, _ = unpack(best[0], KEY)
        # From NaN every weight becomes NaN, as it should if the best is inf, or was NaN, or -inf.
        first = tl.where(tl.abs(first) < float("inf"), first, float("nan"))
        total = tl.zeros((ROWS * PARTS,), tl.float32)
        weights = ()
        ids = ()
        for j in tl.static_range(k):
            value, index = unpack(best[j], KEY)
            weight = exp_approx(value - first)
            total += weight
            weights = weights + (weight,)
            ids = ids + (index,)
        if not RENORMALIZE:
            # The whole row's sum, from one more reading, out of a cache too.
            terms = tl.zeros((ROWS * PARTS, GROUPS * V), tl.float32)
            for start in range(0, WIDTH, GROUPS * V):
                columns = start + tl.arange(0, GROUPS * V)[None, :]
                logits = tl.load(part_ptr + columns, mask=there & (columns < WIDTH), other=0.0)
                logits = tl.where(columns < WIDTH, logits.to(tl.float32), float("-inf"))
                terms += exp_approx(logits - first[:, None])
            total = tl.reshape(tl.sum(terms, axis=1), (ROWS, PARTS))
            total = tl.broadcast_to(tl.sum(total, axis=1, keep_dims=True), (ROWS, PARTS))
            total = tl.reshape(total, (ROWS * PARTS,))

        scale = (1.0 / total)[:, None]
        # Four columns at once or two: more, or one alone, would change threads. An odd k needs one
        # to spare, which is not stored.
        WIDE: tl.constexpr = 2 if k % 4 else 4
        there = there & (part == 0)[:, None]  # one of a token's threads stores
        weights = weights + (total,)
        ids = ids + (index,)
        for j in tl.static_range(0, k, WIDE):
            column = j + tl.arange(0, WIDE)[None, :]
            place = row[:, None] * k + column
            picked = there & (column < k) if k % WIDE else there
            shares = stack(weights[j : j + WIDE]) * scale
            chosen = stack(ids[j : j + WIDE])
            tl.store(weights_ptr + first_row * k + place, shares, mask=picked)
            tl.store(ids_ptr + first_row * k + place, chosen, mask=picked)
            if BINS:
                # What is no token's pick is counted past the last expert.
                chosen = tl.where(picked, chosen, BINS - 1)
                counts += tl.histogram(tl.reshape(chosen, (ROWS * PARTS * WIDE,)), BINS)
    if BINS:
        # One addition per expert and program, not one per pick.
        experts = tl.arange(0, BINS)
        mask = (experts < E) & (counts > 0)
        tl.atomic_add(counts_ptr + experts, counts, mask=mask, sem="relaxed")


def key_type(dtype):
    """What pack() packs logits of this dtype into."""
    if dtype != torch.float32:
        return tl.int32
    if DEVICE == "cpu":
        return tl.float64
    fast = torch.version.hip is None and torch.cuda.get_device_capability() in FAST_DOUBLES
    return tl.float64 if fast else tl.int64


def launch_probabilities(x, weights, ids, ROWS):
    M, E = x.shape
    probabilities_kernel[(triton.cdiv(M, ROWS),)](
        x, weights, ids, M, E, x.stride(0), ids.shape[1], ROWS, triton.next_power_of_2(E)
    )


def launch_packed(x, weights, ids):
    M, E = x.shape
    BLOCK = triton.next_power_of_2(E)
    ROWS = max(1, 256 // BLOCK)
    packed_kernel[(triton.cdiv(M, ROWS),)](
        x, weights, ids, M, E, x.stride(0), ids.shape[1], ROWS, BLOCK, key_type(x.dtype),
        num_warps=1,
    )  # fmt: skip


def shape_of_network(M, E, k, itemsize, parts=None):
    """V neighbours per group, groups and tokens at a time, threads per token: measured.

    parts: threads per token of more than 16 experts, at most, if not the best number.
    """
    few = M < FEW_TOKENS
    if k <= 4 and E * itemsize <= 32:
        return 1, 8, 128, 1  # a thread reads its own token, 16 bytes at a time
    if E <= 16:
        return (1, 4, 32, 4) if few and E % 4 == 0 and E > 8 else (1, 16, 32, 1)
    V = 2 if E <= 64 else 4
    if parts is None:
        # Few tokens: more threads, for a multiprocessor to have several warps. Many: as few as the
        # caches allow, which have to hold what all warps have loaded, 32 / parts rows each.
        if few:
            parts = 4 if E >= 64 else 1
        else:
            parts = 1 if E < 128 else 2 if E < 512 else 4
    while parts > 1 and E % (parts * V):
        parts //= 2  # all parts have as many groups, all of V
    groups = triton.cdiv(E // parts, V)
    return V, min(32, triton.next_power_of_2(groups)), 32 // parts, parts


def launch_network(x, weights, ids, renormalize=True, counts=None, parts=None):
    M, E = x.shape
    k = ids.shape[1]
    if counts is not None:
        parts = 1  # to count a tile takes as long for few tokens as for many
    V, GROUPS, ROWS, PARTS = shape_of_network(M, E, k, x.dtype.itemsize, parts)
    warps = ROWS * PARTS // 32
    rest = (triton.cdiv(E // PARTS, V) - 1) % GROUPS + 1
    programs = TILES = triton.cdiv(M, ROWS)
    if counts is not None:
        # Few programs with many tiles each, as every program adds its counts to the others'.
        programs = min(TILES, 2 if DEVICE == "cpu" else 32 // warps * multiprocessors())
    stride = x.stride(0) if M > 1 else E  # of one row it may be any number
    # 168 of 65536 registers a thread: 12 warps a multiprocessor, for the caches' sake. With a limit
    # the compiler also uses more than without (160, not 84, for E = 256 and k = 4), and is faster.
    options = {"maxnreg": 168} if E > 16 and DEVICE == "cuda" and not torch.version.hip else {}
    network_kernel[(programs,)](
        x, weights, ids, counts, M, TILES, stride, E, k, V, GROUPS,
        triton.next_power_of_2(rest), ROWS, PARTS, key_type(x.dtype), renormalize,
        0 if counts is None else triton.next_power_of_2(E + 1),
        num_warps=warps, **options,
    )  # fmt: skip


def too_old():
    """Why the network cannot be compiled for this GPU, or ""."""
    if DEVICE == "cuda" and triton.__version__.startswith(("3.3.", "3.4.")):
        return f"needs triton 3.5 or newer on a GPU, this is triton {triton.__version__}"
    return ""


def multiprocessors():
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


def moe_topk_gating(logits, k, renormalize=True, counts=None):
    """The k best experts of every token, and their softmax weights; forward only.

    logits [M, E], E <= 1024, float32, float16 or bfloat16; rows may be strided, columns that are
    get copied -> weights [M, k] float32, in descending order; ids [M, k] int32, of equal logits
    the lowest first. 1 <= k <= 16. renormalize: a token's weights sum to 1; else they are the
    probabilities among all E. counts [E] int32: the number of tokens that chose each expert is
    added to it. A row with a NaN or inf, or of nothing but -inf, gets NaN weights and valid ids.
    The kernel is compiled anew for every E, k and stride of rows, and for M < FEW_TOKENS.
    Raises TypeError for logits of another dtype, ValueError for another shape, k, counts or device,
    or if logits requires grad, RuntimeError on a GPU with a triton that is too old.
    """
    if logits.ndim != 2 or not 1 <= logits.shape[1] <= 1024:
        shape = tuple(logits.shape)
        raise ValueError(f"logits must be [M, E] with 1 <= E <= 1024, got shape {shape}")
    M, E = logits.shape
    if not 1 <= k <= min(16, E):
        raise ValueError(f"k must be between 1 and {min(16, E)} for {E} experts, got {k}")
    if logits.dtype not in DTYPES:
        raise TypeError(
            f"logits must be float32, float16 or bfloat16, got {logits.dtype}; use logits.float()"
        )
    if logits.requires_grad:
        raise ValueError("forward only, but logits requires grad; use logits.detach()")
    if logits.device.type != DEVICE:
        raise ValueError(f"logits is on {logits.device}, not {DEVICE}; use logits.to({DEVICE!r})")
    if counts is not None and (
        counts.dtype != torch.int32
        or counts.shape != (E,)
        or counts.device != logits.device
        or not counts.is_contiguous()
    ):
        raise ValueError(
            f"counts must be contiguous int32 [{E}] on {logits.device}, got {counts.dtype} "
            f"{tuple(counts.shape)} on {counts.device}"
        )
    if too_old():
        raise RuntimeError(f"moe_topk_gating {too_old()}")
    weights = torch.empty(M, k, dtype=torch.float32, device=logits.device)
    ids = torch.empty(M, k, dtype=torch.int32, device=logits.device)
    if M == 0:
        return weights, ids
    # The second, as offsets within a tile of tokens are 32-bit numbers.
    if E > 1 and logits.stride(1) != 1 or M > 1 and logits.stride(0) >= 2**24:
        logits = logits.contiguous()
    with torch.cuda.device_of(logits):
        launch_network(logits, weights, ids, renormalize, counts)
    return weights, ids


def gpu_only_launches():
    """Keys of int64, for GPUs whose double-precision unit is narrow, and shapes the checks lack."""
    for E, k, V, ROWS, PARTS in (8, 2, 1, 128, 1), (96, 3, 4, 8, 4):
        weights, ids = torch.empty(33, k), torch.empty(33, k, dtype=torch.int32)
        TILES = triton.cdiv(33, ROWS)
        network_kernel[(TILES,)](
            torch.empty(33, E), weights, ids, None, 33, TILES, E, E, k, V, 8, 8, ROWS, PARTS,
            tl.int64, True, 0, num_warps=ROWS * PARTS // 32,
        )  # fmt: skip
    # More picks than groups; three loads of groups; parts with a rest; many tokens, with counts.
    for M, E, k in (33, 17, 10), (33, 300, 3), (FEW_TOKENS, 384, 6), (FEW_TOKENS, 256, 8):
        weights, ids = torch.empty(M, k), torch.empty(M, k, dtype=torch.int32)
        counts = torch.zeros(E, dtype=torch.int32) if E == 256 else None
        launch_network(torch.empty(M, E, dtype=torch.bfloat16), weights, ids, counts=counts)


def gating_spec(logits, k, renormalize=True):
    """Reference, in float64: weights and ids, of equal logits the lowest id first."""
    order = torch.sort(logits.double() + 0.0, dim=1, descending=True, stable=True).indices[:, :k]
    weights = torch.softmax(logits.double(), dim=1).gather(1, order)
    if renormalize:
        weights = weights / weights.sum(dim=1, keepdim=True)
    return weights, order


def gating_right(logits, k, renormalize=True, launch=None):
    """Are ids and weights those of the reference? launch: a rung, else the function."""
    if launch is None:
        weights, ids = moe_topk_gating(logits.to(DEVICE), k, renormalize)
    else:
        weights = torch.full((len(logits), k), float("nan"), device=DEVICE)
        ids = torch.full((len(logits), k), -1, dtype=torch.int32, device=DEVICE)
        launch(logits.to(DEVICE), weights, ids)
    want_weights, want_ids = gating_spec(logits, k, renormalize)
    close = torch.allclose(weights.cpu().double(), want_weights, rtol=1e-5, atol=1e-30)
    return torch.equal(ids.cpu().long(), want_ids) and close


def section_21_3_fast():
    if too_old():
        print(f"skipped: {too_old()}", file=sys.stderr)
        sys.exit(77)
    torch.manual_seed(0)
    print("=== Section 21.3, fast: every rung against float64 ===")
    x = torch.randn(33, 96) - 9
    for name, launch in {
        "one token per program": lambda *tensors: launch_probabilities(*tensors, ROWS=1),
        "sixteen tokens per program": lambda *tensors: launch_probabilities(*tensors, ROWS=16),
        "logit and id in one number": launch_packed,
        "one token per thread": lambda *tensors: launch_network(*tensors, parts=1),
        "a token in several threads": lambda *tensors: launch_network(*tensors, parts=4),
    }.items():
        print(f"{name}: right? {gating_right(x, 3, launch=launch)}")
    for dtype in DTYPES:
        x = torch.randn(33, 8).to(dtype)
        print(f"8 experts, k = 2, {str(dtype)[6:]}: right? {gating_right(x, 2)}")
    x = torch.randn(5, 90)[:, 3:67]
    print(f"strided rows, all probabilities' sum: right? {gating_right(x, 2, renormalize=False)}")

    print("\n=== Section 21.3, fast: what random logits do not test ===")
    x = torch.randint(0, 3, (23, 70)).float() - 5
    right = gating_right(x, 3) and gating_right(x, 3, launch=launch_packed)
    print(f"ties below 0, lowest id first: right? {right}")
    x = torch.tensor([[200.0, -1.0, 0.0, -2.0]])
    print(f"probabilities that underflow: ids {moe_topk_gating(x.to(DEVICE), 3)[1].tolist()}")
    x = torch.randn(50, 16)
    x[3, 5] = float("nan")
    counts = torch.zeros(16, dtype=torch.int32, device=DEVICE)
    weights, ids = moe_topk_gating(x.to(DEVICE), 2, counts=counts)
    bad_rows = weights.isnan().any(dim=1).nonzero().flatten().tolist()
    print(f"one NaN in row 3: rows with NaN {bad_rows}")
    wanted = torch.bincount(ids.flatten().cpu().long(), minlength=16)
    same = torch.equal(counts.cpu().long(), wanted)
    print(f"tokens per expert, from the same pass: right? {same}")


BENCH_EXPERTS = (8, 16, 64, 100, 128, 160, 256, 384, 512)
BENCH_PICKS = (1, 2, 4, 6, 8)
# Peers are slow, or slow to compile: (experts, picks) where each is measured.
BENCH_PEER_CELLS = {
    "torch": [(E, k) for E in BENCH_EXPERTS for k in (2, 8)],
    "torch.compile": [(64, 8)],
    "quack": [(E, k) for E in BENCH_EXPERTS for k in (4, 8)],
}


def bench_peers():
    """Name to function of (logits, k): torch, torch.compile, and quack where it imports."""

    def eager(x, k):
        weights, ids = torch.topk(torch.softmax(x, dim=1, dtype=torch.float32), k, dim=1)
        return weights / weights.sum(dim=1, keepdim=True), ids

    peers = {"torch": eager, "torch.compile": torch.compile(eager, dynamic=False)}
    try:
        from quack.topk import topk_fwd

        # Softmax over the picks: the same as renormalising.
        peers["quack"] = lambda x, k: topk_fwd(x, k, softmax=True)
    except ImportError:
        pass
    return peers


def bench_time(run, sets, graph=True):
    """Median time in us of run(*tensors), for one after the other of the sets of tensors.

    graph: all runs in one CUDA graph, where none waits for Python.
    """
    from harness.bench import graph_ms, median_ms

    def run_all():
        for tensors in sets:
            run(*tensors)

    return 1e3 * (graph_ms if graph else median_ms)(run_all) / len(sets)


def bench_right(x, weights, ids, rtol):
    """Are the first 5000 tokens' picks, by their logits, and weights right to within rtol?"""
    part, k = slice(0, 5000), ids.shape[1]
    best = torch.sort(x[part].float(), dim=1, descending=True, stable=True).values[:, :k]
    picked = x[part].float().gather(1, ids[part].long())
    close = torch.allclose(picked, best, rtol=rtol, atol=0)
    return close and torch.allclose(weights[part].float(), best.softmax(1), rtol=rtol, atol=1e-6)


def bench_cell(M, E, k, dtype, peers):
    """One row of the table: our time, the copy of as many bytes, and the peers' times."""
    cell = {"tokens": M, "experts": E, "k": k, "dtype": str(dtype)[6:]}
    bytes_moved = M * (E * dtype.itemsize + 8 * k)
    # Many tokens: in turn so many sets of tensors that none is in the L2 cache when its turn comes.
    # Few: one set, in the cache as it is after the matrix product that makes the logits.
    many = M > 10000
    different, repeat = (1 + 2**28 // bytes_moved, 1) if many else (1, 100)
    sets, copies = [], []
    for _ in range(different):
        weights = torch.full((M, k), float("nan"), device=DEVICE)
        ids = torch.full((M, k), -1, dtype=torch.int32, device=DEVICE)
        sets.append((torch.randn(M, E, device=DEVICE).to(dtype), weights, ids))
        copies.append(torch.randn(2, bytes_moved // 8, device=DEVICE).split(1))
    sets, copies = sets * repeat, copies * repeat

    cell["us"] = bench_time(launch_network, sets)
    if not bench_right(*sets[-1], rtol=1e-5):
        raise RuntimeError(f"wrong result: {M} x {E}, k = {k}, {dtype}")
    # In a graph, large copies of some sizes run at two thirds of their speed.
    cell["copy us"] = bench_time(torch.Tensor.copy_, copies, graph=not many)
    cell["of copy"] = cell["copy us"] / cell["us"]
    if k == 8:
        counts = torch.zeros(E, dtype=torch.int32, device=DEVICE)
        count = lambda *tensors: launch_network(*tensors, counts=counts)  # noqa: E731
        cell["with counts us"] = bench_time(count, sets)
    for name, peer in peers.items():
        if (E, k) not in BENCH_PEER_CELLS[name]:
            continue
        torch._dynamo.reset()
        try:
            x = sets[0][0]
            weights, ids = peer(x, k)
            # quack keeps the id in the last bits of a logit, and some weights have 16 bits.
            rtol = 1e-3 if weights.dtype == torch.float32 else 1e-2
            if not bench_right(x, weights, ids, rtol):
                raise ValueError("wrong result")
            some = sets[:2] if many else sets
            time = bench_time(lambda x, weights, ids, peer=peer: peer(x, k), some)
            cell[f"{name} / ours"] = time / cell["us"]
        except Exception as problem:
            print(f"{name} refuses {M} x {E}, k = {k}: {repr(problem)[:100]}", file=sys.stderr)
            cell[f"{name} / ours"] = float("nan")
    print(f"{M} x {E} {cell['dtype']} {k}: {cell['of copy']:.3f}", file=sys.stderr, flush=True)
    return cell


def bench_ladder():
    """Fractions of the copy's speed, 1048576 x 256 float32, k = 8, for the docstring's table."""
    from harness.bench import median_ms

    M, E, k = 1048576, 256, 8
    x = torch.randn(M, E, device=DEVICE)
    weights = torch.empty(M, k, device=DEVICE)
    ids = torch.empty(M, k, dtype=torch.int32, device=DEVICE)
    source = torch.randn((x.nbytes + weights.nbytes + ids.nbytes) // 8, device=DEVICE)
    copy = torch.empty_like(source)
    time = {
        "copy": lambda: copy.copy_(source),
        "one token per program": lambda: launch_probabilities(x, weights, ids, ROWS=1),
        "sixteen tokens per program": lambda: launch_probabilities(x, weights, ids, ROWS=16),
        "logit and id in one number": lambda: launch_packed(x, weights, ids),
        "one token per thread": lambda: launch_network(x, weights, ids, parts=1),
        "a token in several threads": lambda: launch_network(x, weights, ids),
    }
    time = {name: median_ms(f) for name, f in time.items()}
    return {name: time["copy"] / ms for name, ms in time.items()}


def bench(out):
    """Print the table; write gating.csv and gating.png into out, or benchmarks/<gpu>."""
    from harness.bench import draw, results_folder, save_table

    folder = results_folder(out)
    for name, fraction in bench_ladder().items():
        print(f"1048576 x 256 float32, k = 8, {name}: {fraction:.3f} of copy", flush=True)
    peers = bench_peers()
    cells = (
        bench_cell(M, E, k, dtype, peers)
        for dtype in (torch.float32, torch.bfloat16)
        for M in (1048576, 4096)
        for E in BENCH_EXPERTS
        for k in BENCH_PICKS
    )
    table = save_table(cells, folder / "gating.csv")

    def plot(axes):
        many = table[table["tokens"] == 1048576]
        for panel, (dtype, part) in zip(axes, many.groupby("dtype", sort=False), strict=True):
            for k, line in part.groupby("k"):
                panel.plot(line["experts"], line["of copy"], "o-", label=f"k = {k}")
            for name, style in zip(peers, ("k.:", "ks--", "kx-."), strict=False):
                line = part[(part["k"] == 8) & part[f"{name} / ours"].notna()]
                speed = line["of copy"] / line[f"{name} / ours"]
                panel.plot(line["experts"], speed, style, label=name)
            panel.set(
                xscale="log", xlabel="experts", title=f"gating, {dtype}, {part['GPU'].iloc[0]}"
            )
        axes[0].set_ylabel("of a copy's speed, 1048576 tokens (peers: k = 8)")

    draw(folder / "gating.png", 2, plot)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Fast gating: checks, or with --bench a table.")
    parser.add_argument(
        "--bench", action="store_true", help="measure, on a GPU; needs pandas, matplotlib"
    )
    parser.add_argument("--out", help="folder for gating.csv and .png (default: benchmarks/<gpu>)")
    options = parser.parse_args()
    if options.bench:
        # Only --bench needs this repository beside the script.
        sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
        bench(options.out)
    else:
        section_21_3_fast()
