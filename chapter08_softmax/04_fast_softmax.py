"""Puzzle 8, fast: a ladder of kernels from the puzzle's to nearly the speed of a copy.

Softmax must read x once and write z once, so a copy of as many bytes is the yardstick. Fractions
of its speed on an H200 (4.15 TB/s) for float32 rows (--bench prints every length, and bfloat16):

    1  two passes, 32 columns at a time        0.10  of 131072 columns: small loads, few in flight
    2  two passes, 4096 columns at a time      0.64  of 131072: wide loads, but x is read twice
    3  short rows: several rows per program    1.01  of 256: no program is left with little to do
    4  middle rows: one row in registers       0.99  of 16384: x is read once
    5  long rows: a row split over programs    0.97  of 131072: x is read once, nobody holds it all
    6  its pieces wait in shared memory        0.98  of 131072: more bytes are on their way

Rungs 5 and 6 rest on what online softmax is about: the maximum and sum of a piece can be merged
with those of the other pieces. A row's programs exchange these two numbers while each keeps its
piece: they wait for one another, so all of a row must run at the same time. The interpreter runs
them one by one and therefore takes rung 2 instead, as do AMD GPUs. Rung 6 needs a Hopper GPU or a
newer one; in bfloat16, where rung 5 has registers for fewer pieces at a time, it is 0.97 to rung
5's 0.90. Many small programs that end do better here than few that go on to the next piece: while
some wait, others load.

    python 04_fast_softmax.py                     checks, on small sizes
    python 04_fast_softmax.py --bench [--out DIR] a table beside other libraries
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

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.ampere import async_copy

    # The older name is gone from triton 3.9.
    copy_in = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
except ImportError:  # no Gluon, or another one: then rung 6 is defined, but cannot run
    gluon, gl, copy_in = triton, tl, None

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
IN_REGISTERS = 16384  # the longest row that one program holds
REGISTERS = 65536  # of one multiprocessor, on every NVIDIA GPU that Triton supports


@triton.jit
def exp_approx(x):
    """e^x as 2^(log2(e) x): the GPU's exponential unit computes powers of two."""
    return tl.exp2(1.44269504 * x)


@triton.jit
def two_pass_kernel(x_ptr, z_ptr, T, x_stride, z_stride, B1: tl.constexpr):
    """Rungs 1 and 2: the puzzle's online softmax, one row per program."""
    row = tl.program_id(0).to(tl.int64)
    x_row, z_row = x_ptr + row * x_stride, z_ptr + row * z_stride
    row_max = tl.full((1,), float("-inf"), tl.float32)
    row_sum_exp = tl.zeros((1,), tl.float32)
    for start in range(0, T, B1):
        cols = start + tl.arange(0, B1)
        x = tl.load(x_row + cols, mask=cols < T, other=float("-inf")).to(tl.float32)
        new_max = tl.maximum(row_max, tl.max(x, axis=0, keep_dims=True))
        # A row of nothing but -inf so far: subtract 0, as -inf - -inf is NaN.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        row_sum_exp *= exp_approx(row_max - shift)
        row_sum_exp += tl.sum(exp_approx(x - shift), axis=0, keep_dims=True)
        row_max = new_max
    for start in range(0, T, B1):
        cols = start + tl.arange(0, B1)
        x = tl.load(x_row + cols, mask=cols < T, other=float("-inf")).to(tl.float32)
        tl.store(z_row + cols, exp_approx(x - row_max) / row_sum_exp, mask=cols < T)


@triton.jit
def split_edges(start, T, i, EDGE: tl.constexpr):
    """Split the row of T columns at offset start into aligned groups of EDGE columns and edges.

    A row that starts anywhere cannot be loaded 16 bytes at a time, but all of it except its edges
    can: fewer than EDGE columns before its first aligned address and after its last. i: 2 * EDGE
    numbers from 0 on. Returns the offset of the first group, how many columns are in groups, the
    edges' columns, and which of these exist.
    """
    head = (EDGE - start % EDGE) % EDGE
    body = (T - head) // EDGE * EDGE
    # Written as a multiple of EDGE, so that the compiler sees the alignment.
    aligned = (start + EDGE - 1) // EDGE * EDGE
    cols = tl.where(i < EDGE, i, head + body + i - EDGE)
    return aligned, body, cols, tl.where(i < EDGE, i < head, cols < T)


@triton.jit
def load_rows(ptr, at, cols, mask, rows, N0):
    """Columns of rows in float32, -inf where there is none."""
    # A row past the last one reads 0, so that nothing computes -inf - -inf for it.
    x = tl.load(ptr + at + cols, mask=mask & (rows < N0), other=float("-inf")).to(tl.float32)
    return x if x.shape[0] == 1 else tl.where(rows < N0, x, 0.0)


@triton.jit
def max_of_rows(x):
    """[ROWS, 1], or a number if that is one row, which edges can use however they are spread."""
    return tl.max(x) if x.shape[0] == 1 else tl.max(x, axis=1, keep_dims=True)


@triton.jit
def sum_of_rows(x):
    return tl.sum(x) if x.shape[0] == 1 else tl.sum(x, axis=1, keep_dims=True)


@triton.jit
def rows_kernel(
    x_ptr, z_ptr, N0, T, x_stride, z_stride,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Rungs 3 and 4: ROWS whole rows, each in PARTS blocks, stay in registers; x is read once."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    x_at, z_at = rows * x_stride, rows * z_stride
    body = T
    if EDGE:
        edge = tl.arange(0, 2 * EDGE)[None, :]
        x_aligned, body, edge_cols, edge_mask = split_edges(x_at, T, edge, EDGE)
        edges = load_rows(x_ptr, x_at, edge_cols, edge_mask, rows, N0)
        z_edges = z_ptr + z_at + edge_cols
        x_at, z_at = x_aligned, (z_at + EDGE - 1) // EDGE * EDGE
    # All parts lie in the same threads: combine them first, then reduce across threads once.
    parts = ()
    for i in tl.static_range(PARTS):
        cols = i * BLOCK + tl.arange(0, BLOCK)[None, :]
        x = load_rows(x_ptr, x_at, cols, cols < body, rows, N0)
        parts = parts + (x,)
    largest = parts[0]
    for i in tl.static_range(1, PARTS):
        largest = tl.maximum(largest, parts[i])
    row_max = max_of_rows(largest)
    if EDGE:
        row_max = tl.maximum(row_max, max_of_rows(edges))
    exps = ()
    for i in tl.static_range(PARTS):
        exps = exps + (exp_approx(parts[i] - row_max),)
    sums = exps[0]
    for i in tl.static_range(1, PARTS):
        sums += exps[i]
    row_sum_exp = sum_of_rows(sums)
    if EDGE:
        edges = exp_approx(edges - row_max)
        row_sum_exp += sum_of_rows(edges)
        tl.store(z_edges, edges / row_sum_exp, mask=edge_mask & (rows < N0))
    scale = 1.0 / row_sum_exp  # one division per row, not one per column
    for i in tl.static_range(PARTS):
        cols = i * BLOCK + tl.arange(0, BLOCK)[None, :]
        tl.store(z_ptr + z_at + cols, exps[i] * scale, mask=(rows < N0) & (cols < body))


@triton.jit
def load_edges(x_ptr, z_ptr, x_at, z_at, T, piece, i, EDGE: tl.constexpr):
    """The edges at both ends, all taken by the row's first piece, and what lies between them.

    i: 2 * EDGE numbers from 0 on. Returns the edges' x in float32, where their z goes, and which
    are this piece's; then where x and z start between them, and how many columns are there.
    """
    x_aligned, body, cols, mask = split_edges(x_at, T, i, EDGE)
    x_edges, z_edges = x_ptr + x_at + cols, z_ptr + z_at + cols
    mask = mask & (piece == 0)
    edges = tl.load(x_edges, mask=mask, other=float("-inf")).to(tl.float32)
    return edges, z_edges, mask, x_aligned, (z_at + EDGE - 1) // EDGE * EDGE, body


@triton.jit
def merge_pieces(words_ptr, row, PIECES, slots, piece_max, piece_sum):
    """Tell the row's other programs this piece's maximum and sum; the row's maximum, and 1 / sum.

    slots: numbers from 0 on, at least PIECES of them.
    """
    # Publish both numbers in one 64-bit word, which nobody can see half written. It is its own
    # flag: a maximum of 0 comes with a sum of 1 or more, so the word is never 0. Relaxed, as no
    # other data need be visible with it.
    high = piece_max.to(tl.int32, bitcast=True).to(tl.int64) << 32
    low = piece_sum.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    tl.atomic_xchg(words_ptr + tl.program_id(0), high | low, sem="relaxed")

    # Wait for the row's words; those that have come are not loaded again.
    row_words = words_ptr + row * PIECES + slots
    words = tl.load(row_words, mask=slots < PIECES, other=1, volatile=True)
    while tl.min((words != 0).to(tl.int32), axis=0) == 0:
        words = tl.load(row_words, mask=words == 0, other=words, volatile=True)

    # Merge: every sum is relative to its own maximum and is made relative to the row's.
    maxima = (words >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    maxima = tl.where(slots < PIECES, maxima, float("-inf"))
    sums = tl.where(slots < PIECES, words.to(tl.int32).to(tl.float32, bitcast=True), 0.0)
    row_max = tl.max(maxima, axis=0)
    return row_max, 1.0 / tl.sum(sums * exp_approx(maxima - row_max), axis=0)


@triton.jit
def split_row_kernel(
    x_ptr, z_ptr, words_ptr, T, x_stride, z_stride, PIECES, SIZE,
    BLOCK: tl.constexpr, SLOTS: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Rung 5: PIECES programs share a row; each holds SIZE columns in registers.

    They wait for one another. In practice GPUs start programs in the order of their ids: CUDA does
    not promise it, but the scans of NVIDIA's CUB rely on it, too. A program waits only after it has
    published, so the oldest unfinished row always ends, if the GPU has room for all its programs.
    """
    row = (tl.program_id(0) // PIECES).to(tl.int64)
    piece = tl.program_id(0) % PIECES
    x_at, z_at, body = row * x_stride, row * z_stride, T
    if EDGE:
        edges, z_edges, edge_mask, x_at, z_at, body = load_edges(
            x_ptr, z_ptr, x_at, z_at, T, piece, tl.arange(0, 2 * EDGE), EDGE
        )
    first = piece * SIZE
    cols = tl.arange(0, BLOCK)
    mask = cols < tl.minimum(SIZE, body - first)
    # Kept as loaded, not as float32: a 16-bit x takes half the registers while the program waits.
    x = tl.load(x_ptr + x_at + first + cols, mask=mask, other=float("-inf"))

    piece_max = tl.max(x.to(tl.float32))
    if EDGE:
        piece_max = tl.maximum(piece_max, tl.max(edges))
    shift = tl.where(piece_max == float("-inf"), 0.0, piece_max)
    piece_sum = tl.sum(exp_approx(x.to(tl.float32) - shift))
    if EDGE:
        piece_sum += tl.sum(exp_approx(edges - shift))

    row_max, scale = merge_pieces(words_ptr, row, PIECES, tl.arange(0, SLOTS), piece_max, piece_sum)
    z = exp_approx(x.to(tl.float32) - row_max) * scale
    tl.store(z_ptr + z_at + first + cols, z, mask=mask)
    if EDGE:
        tl.store(z_edges, exp_approx(edges - row_max) * scale, mask=edge_mask)


@triton.jit
def clear_kernel(words_ptr, N, BLOCK: tl.constexpr):
    """N zeros."""
    # From here on the next kernel may start. It loads x meanwhile; whatever wrote x has ended, as
    # this kernel was launched in the ordinary way.
    tl.extra.cuda.gdc_launch_dependents()
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(words_ptr + i, tl.zeros((BLOCK,), tl.int64), mask=i < N)


@gluon.jit
def larger(a, b):
    """The larger of two; of 16-bit numbers, stored in pairs, one instruction compares two pairs.

    gl.maximum would unpack them. Both drop a NaN, which the sum brings back.
    """
    if a.dtype == gl.float32:
        return gl.maximum(a, b)
    else:
        BF16: tl.constexpr = a.dtype == gl.bfloat16
        MAX: tl.constexpr = "max.bf16x2 $0, $1, $2;" if BF16 else "max.f16x2 $0, $1, $2;"
        return gl.inline_asm_elementwise(MAX, "=r,r,r", [a, b], dtype=a.dtype, is_pure=True, pack=2)


@gluon.jit
def split_row_shared_kernel(
    x_ptr, z_ptr, words_ptr, T, x_stride, z_stride, PIECES, BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr, SLOTS: tl.constexpr, EDGE: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Rung 6: as rung 5, but a piece waits in shared memory: a multiprocessor has 228 KiB of it.

    Copies to it need no registers either, so more bytes are on their way. In Gluon, where a layout
    says which thread holds what: elements per thread, threads per warp, warps, order of dimensions.
    Triton functions that create no tensor of their own can be called here, too.
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    # 16 bytes per thread, the most that it copies at once; or one element.
    blocked: tl.constexpr = gl.BlockedLayout([BLOCK // (32 * WARPS)], [32], [WARPS], [0])
    single: tl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    row = (gl.program_id(0) // PIECES).to(gl.int64)
    piece = gl.program_id(0) % PIECES
    x_at, z_at, body = row * x_stride, row * z_stride, T
    if EDGE:
        edges, z_edges, edge_mask, x_at, z_at, body = load_edges(
            x_ptr, z_ptr, x_at, z_at, T, piece, gl.arange(0, 2 * EDGE, single), EDGE
        )
    first = piece * (BLOCKS * BLOCK)
    # Not below 0: the last piece may lie past the end.
    size = gl.maximum(gl.minimum(BLOCKS * BLOCK, body - first), 0).to(gl.int32)
    x_at, z_at = x_ptr + x_at + first, z_ptr + z_at + first

    plain: tl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])  # not swizzled at all
    blocks = gl.allocate_shared_memory(dtype, [BLOCKS, BLOCK], plain)
    cols = gl.arange(0, BLOCK, blocked)
    count = gl.cdiv(size, BLOCK)
    for i in range(0, count):
        inside = i * BLOCK + cols < size
        copy_in(blocks.index(i), x_at + i * BLOCK + cols, mask=inside)
    # Wait until all has come. Each thread reads just what it copied itself.
    async_copy.commit_group()
    async_copy.wait_group(0)
    if size % BLOCK != 0:
        # -inf past the end, once, so that no block below needs a mask to be read.
        last = blocks.index(count - 1)
        x = last.load(blocked)
        inside = cols + (count - 1) * BLOCK < size
        last.store(gl.where(inside, x, float("-inf")).to(dtype))

    largest = gl.full((BLOCK,), float("-inf"), dtype, blocked)
    for i in range(0, count):
        largest = larger(largest, blocks.index(i).load(blocked))
    piece_max = gl.max(largest.to(gl.float32), axis=0)
    if EDGE:
        piece_max = gl.maximum(piece_max, gl.max(edges, axis=0))
    shift = gl.where(piece_max == float("-inf"), 0.0, piece_max)
    sums = gl.zeros((BLOCK,), gl.float32, blocked)
    for i in range(0, count):
        sums += exp_approx(blocks.index(i).load(blocked).to(gl.float32) - shift)
    piece_sum = gl.sum(sums, axis=0)
    if EDGE:
        piece_sum += gl.sum(exp_approx(edges - shift), axis=0)

    tl.extra.cuda.gdc_wait()  # until all words are cleared
    slots = gl.arange(0, SLOTS, single)
    row_max, scale = merge_pieces(words_ptr, row, PIECES, slots, piece_max, piece_sum)
    for i in range(0, count):
        z = exp_approx(blocks.index(i).load(blocked).to(gl.float32) - row_max) * scale
        gl.store(z_at + i * BLOCK + cols, z.to(dtype), mask=i * BLOCK + cols < size)
    if EDGE:
        gl.store(z_edges, (exp_approx(edges - row_max) * scale).to(dtype), mask=edge_mask)


def alike(x, z, alignment=16):
    """Do x and z start at a multiple of alignment bytes, and row i of both equally far from one?

    The compiler knows only of pointers, not of rows, where they start.
    """
    # The stride of one row may be any number.
    apart = (x.stride(0) - z.stride(0)) * x.element_size() % alignment if len(x) > 1 else 0
    return apart == 0 and x.data_ptr() % alignment == z.data_ptr() % alignment == 0


def edge_width(x, z, alignment=16):
    """Columns in alignment bytes if rows are unaligned; 0 if they are not, or cannot be split."""
    T, width = x.shape[1], alignment // x.element_size()
    # In columns: Triton tells the compiler of multiples of 16 only.
    if T % 16 == 0 and x.stride(0) % 16 == 0 and z.stride(0) % 16 == 0:
        return 0
    return width if alike(x, z, alignment) and T >= 64 else 0


def launch_two_pass(x, z, B1=4096):
    N0, T = x.shape
    two_pass_kernel[(N0,)](x, z, T, x.stride(0), z.stride(0), B1)


def launch_rows(x, z):
    N0, T = x.shape
    columns, EDGE = triton.next_power_of_2(T), edge_width(x, z)
    # A row of 5003 would leave two fifths of 8192 columns empty, but a fifth of 3 x 2048.
    PARTS, BLOCK = 1, columns
    if columns >= 4096 and T <= columns // 4 * 3:
        PARTS, BLOCK = 3, columns // 4
    ROWS = max(1, 1024 // columns)
    # Measured: about 1024 elements per warp, twice that from 8192 columns of 2 bytes on.
    warps = max(1, columns // 1024)
    options = {}
    if x.element_size() == 2 and columns >= 8192:
        warps //= 2
        if BLOCK == 16384 and not EDGE and DEVICE == "cuda" and torch.version.hip is None:
            options["maxnreg"] = 80  # so that three programs fit a multiprocessor, not two
    rows_kernel[(triton.cdiv(N0, ROWS),)](
        x, z, N0, T, x.stride(0), z.stride(0), ROWS, BLOCK, PARTS, EDGE,
        num_warps=warps, **options,
    )  # fmt: skip


def split(itemsize):
    """Columns per piece, and registers per thread, of rung 5 (4 warps per program): measured."""
    return (4096, 56) if itemsize == 4 else (8192, 80)


def resident(itemsize):
    """How many programs of rung 5 the GPU runs at the same time."""
    if DEVICE == "cpu" or torch.version.hip is not None:
        return 1
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    threads = min(REGISTERS // split(itemsize)[1], gpu.max_threads_per_multi_processor)
    return threads // (4 * 32) * gpu.multi_processor_count


def launch_split_row(x, z):
    N0, T = x.shape
    columns, registers = split(x.element_size())
    PIECES = triton.cdiv(T, columns)
    SIZE = triton.cdiv(triton.cdiv(T, PIECES), 16) * 16  # so that pieces start aligned
    words = torch.zeros(N0 * PIECES, dtype=torch.int64, device=x.device)
    # At least a slot a thread: fewer would be repeated in every warp, and each would watch.
    SLOTS = max(4 * 32, triton.next_power_of_2(PIECES))
    options = {"maxnreg": registers} if DEVICE == "cuda" else {}
    split_row_kernel[(N0 * PIECES,)](
        x, z, words, T, x.stride(0), z.stride(0), PIECES, SIZE,
        triton.next_power_of_2(SIZE), SLOTS, edge_width(x, z), num_warps=4, **options,
    )  # fmt: skip


def launch_split_row_shared(x, z):
    N0, T = x.shape
    # Whole cache lines: a copy past the L1 cache would fetch those between two warps twice.
    EDGE = edge_width(x, z, 128) or edge_width(x, z)
    # Measured. A Hopper's multiprocessor has room for 8 programs of 26 KiB, or 6 of 32 KiB.
    WARPS, most_bytes = (8, 32768) if x.element_size() == 2 and not EDGE else (4, 26624)
    BLOCK = 32 * WARPS * 16 // x.element_size()
    blocks = triton.cdiv(T, BLOCK)
    BLOCKS = triton.cdiv(blocks, triton.cdiv(blocks, most_bytes // (32 * WARPS * 16)))
    PIECES = triton.cdiv(blocks, BLOCKS)
    words = torch.empty(N0 * PIECES, dtype=torch.int64, device=x.device)
    clear_kernel[(triton.cdiv(len(words), 1024),)](words, len(words), 1024)
    SLOTS = max(32 * WARPS, triton.next_power_of_2(PIECES))
    # launch_pdl: it may start while clear_kernel runs.
    split_row_shared_kernel[(len(words),)](
        x, z, words, T, x.stride(0), z.stride(0), PIECES,
        BLOCKS, BLOCK, SLOTS, EDGE, WARPS, num_warps=WARPS, launch_pdl=True,
    )  # fmt: skip


def gpu_only_launches(arch=90):
    """For the tests: launches whose programs wait for one another compile here, but cannot run."""
    for dtype in DTYPES:
        for T in (20001, 32768):
            # A GPU's tensors start at cache lines.
            memory = torch.empty(2 * T + 128, dtype=dtype)
            x = memory[-memory.data_ptr() % 128 // memory.element_size() :][: 2 * T].view(2, T)
            launch_split_row(x, x)
            if arch >= 90 and copy_in is not None:
                launch_split_row_shared(x, x)


def shared_fits(x, z):
    """Can rung 6 run? It needs Hopper or newer, rows alike, and room for two rows' programs."""
    if DEVICE == "cpu" or torch.version.hip is not None or copy_in is None:
        return False
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    # A program takes up to 32 KiB, a little for reductions, and 1 KiB that CUDA keeps. It holds
    # 24 KiB of the row or more, the last one aside.
    programs = gpu.shared_memory_per_multiprocessor // 34816 * gpu.multi_processor_count
    return gpu.major >= 9 and alike(x, z) and 2 * triton.cdiv(x[0].nbytes, 24576) <= programs


def choose_rung(x, z):
    """The launcher for softmax of x's rows into z's."""
    T = x.shape[1]
    if T <= IN_REGISTERS:
        return launch_rows
    if shared_fits(x, z):
        return launch_split_row_shared
    # Room for two rows' programs: of two launches at the same time, each may hold one.
    if 2 * triton.cdiv(T, split(x.element_size())[0]) <= resident(x.element_size()):
        return launch_split_row
    return launch_two_pass


def fast_softmax(x, out=None):
    """Softmax of each row of x [N0, T], T up to 2**20, float32 inside, in x's dtype; forward only.

    Rows may lie apart; if columns do, x is copied first. out: a tensor like x, or x itself, but no
    other that overlaps x. Fastest if x and out start at a multiple of 128 bytes, as tensors that
    torch allocates do, and have the same strides. Of calls with more than 16384 columns at most two
    may run at the same time, on two streams: of more, all might wait for ever.
    Raises TypeError for a dtype other than float32, float16 and bfloat16, ValueError for
    another shape or device, or if x requires grad.
    """
    if x.ndim != 2 or x.shape[1] > 2**20:
        raise ValueError(f"x must be [N0, T] with T <= 2**20, got shape {tuple(x.shape)}")
    if x.dtype not in DTYPES:
        raise TypeError(f"x must be float32, float16 or bfloat16, got {x.dtype}; use x.float()")
    if x.requires_grad:
        raise ValueError("forward only, but x requires grad; use x.detach()")
    if x.device.type != DEVICE:
        raise ValueError(f"x is on {x.device}, the kernel runs on {DEVICE}; use x.to({DEVICE!r})")
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if (out.shape, out.dtype, out.device) != (x.shape, x.dtype, x.device):
        raise ValueError(
            f"out must be like x: {tuple(x.shape)}, {x.dtype}, {x.device}; "
            f"got {tuple(out.shape)}, {out.dtype}, {out.device}"
        )
    if x.numel() == 0:
        return out
    if x.shape[1] > 1 and out.stride(1) != 1 or x.shape[0] > 1 and out.stride(0) < x.shape[1]:
        raise ValueError(f"out's rows must be contiguous and apart, got strides {out.stride()}")
    if x.shape[1] > 1 and x.stride(1) != 1:
        x = x.contiguous()
    with torch.cuda.device_of(x):
        choose_rung(x, out)(x, out)
    return out


def fast_right(x, **options):
    """Is fast_softmax(x) the softmax in float64, to the precision of x's dtype?"""
    want = torch.softmax(x.double(), dim=1)
    z = fast_softmax(x.to(DEVICE), **options).cpu()
    rtol = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}[x.dtype]
    atol = 1e-37 if x.dtype != torch.float16 else 1e-7
    return z.dtype == x.dtype and torch.allclose(z.double(), want, rtol=rtol, atol=atol)


def puzzle_8_fast():
    torch.manual_seed(0)
    print("=== Puzzle 8, fast: short, middle and long rows against float64 ===")
    for name, shape in {
        "several rows per program": (37, 200),
        "a row in registers": (3, 5003),
        "a long row": (2, 20000),
    }.items():
        for dtype in DTYPES:
            x = (torch.randn(*shape) * 5).to(dtype)
            print(f"{name}, {str(dtype)[6:]}: right? {fast_right(x)}")
    z = torch.empty(2, 300, device=DEVICE)
    x = torch.randn(2, 300)
    for B1 in (32, 4096):
        launch_two_pass(x.to(DEVICE), z, B1)
        right = torch.allclose(z.cpu(), torch.softmax(x, dim=1), rtol=1e-5, atol=0)
        print(f"two passes, {B1} columns at a time: right? {right}")

    print("\n=== Puzzle 8, fast: strided rows, in place ===")
    buffer = torch.randn(5, 128)
    print(f"rows of a wider buffer: right? {fast_right(buffer[:, 3:80])}")
    x, want = buffer.to(DEVICE), torch.softmax(buffer, dim=1)
    z = fast_softmax(x, out=x).cpu()
    same = torch.allclose(z, want, rtol=1e-5, atol=0)
    print(f"in place: right? {same}")

    print("\n=== Puzzle 8, fast: what the puzzle's own input does not test ===")
    print(f"rows near -200: right? {fast_right(torch.randn(4, 100) - 200)}")
    x = torch.randn(2, 20000)
    x[:, :9000] = float("-inf")
    print(f"9000 x -inf first: right? {fast_right(x)}")
    chosen = choose_rung(x.to(DEVICE), x.to(DEVICE)).__name__
    print(f"a row of 20000 took {chosen} here; rungs 5 and 6 need a GPU", file=sys.stderr)


BENCH_COLUMNS = (256, 1000, 1024, 4096, 5003, 16384, 50257, 65536, 128256, 131072, 262144)


def bench_peers():
    """Name to function; Liger and quack where they import."""
    peers = {"torch": lambda x: torch.softmax(x, dim=1)}
    peers["torch.compile"] = torch.compile(lambda x: torch.softmax(x, dim=1))
    try:
        from liger_kernel.transformers import LigerSoftmax

        peers["Liger"] = LigerSoftmax()
    except ImportError:
        pass
    try:
        from quack.softmax import softmax_fwd

        peers["quack"] = softmax_fwd
    except ImportError:
        pass
    return peers


def bench_cell(T, dtype, peers):
    """One row of the table: our ms and GB/s, a copy's GB/s, each peer's time over ours."""
    from harness.bench import median_ms

    rows = 2**29 // dtype.itemsize // T
    x = torch.randn(rows, T, device=DEVICE).to(dtype)
    z = torch.empty_like(x)

    def error(got):
        some = slice(-256, None)
        want = torch.softmax(x[some].double(), dim=1)
        return ((got[some].double() - want).norm() / want.norm()).item()

    tolerance = 1e-5 if dtype == torch.float32 else 5e-3
    z.fill_(float("nan"))
    fast_softmax(x, out=z)
    whole = torch.softmax(x, dim=1)
    close = torch.allclose(z, whole, rtol=1e-4 if dtype == torch.float32 else 2e-2, atol=1e-9)
    if error(z) > tolerance or not close:
        raise RuntimeError(f"wrong result: {rows} x {T} {dtype}")
    del whole
    cell = {"rows": rows, "columns": T, "dtype": str(dtype)[6:]}
    cell["rung"] = choose_rung(x, z).__name__.removeprefix("launch_")
    cell["ms"] = median_ms(lambda: fast_softmax(x, out=z))
    copy = median_ms(lambda: z.copy_(x))
    cell["GB/s"] = 2 * x.nbytes / cell["ms"] / 1e6
    cell["copy GB/s"] = 2 * x.nbytes / copy / 1e6
    cell["of copy"] = copy / cell["ms"]
    for name, peer in peers.items():
        torch._dynamo.reset()
        try:
            if not error(peer(x)) <= tolerance:
                raise ValueError("wrong result")
            cell[f"{name} / ours"] = median_ms(lambda peer=peer: peer(x)) / cell["ms"]
        except Exception as problem:
            print(f"{name} refuses {rows} x {T}: {type(problem).__name__}", file=sys.stderr)
            cell[f"{name} / ours"] = float("nan")
    print(f"{T} {cell['dtype']}: {cell['of copy']:.3f}", file=sys.stderr, flush=True)
    return cell


def bench_ladder():
    """Fractions of the copy's speed on rows of 131072 float32, for the docstring's table."""
    from harness.bench import median_ms

    x = torch.randn(1024, 131072, device=DEVICE)
    z = torch.empty_like(x)
    time = {
        "copy": lambda: z.copy_(x),
        "two passes, 32 columns": lambda: launch_two_pass(x, z, 32),
        "two passes, 4096 columns": lambda: launch_two_pass(x, z),
        "a row split over programs": lambda: launch_split_row(x, z),
    }
    if shared_fits(x, z):
        time["its pieces in shared memory"] = lambda: launch_split_row_shared(x, z)
    time = {name: median_ms(f) for name, f in time.items()}
    return {name: time["copy"] / ms for name, ms in time.items()}


def bench(out):
    """Print the table; write softmax.csv and softmax.png into out, or benchmarks/<gpu>."""
    from harness.bench import draw, results_folder, save_table

    folder = results_folder(out)
    for name, fraction in bench_ladder().items():
        print(f"rows of 131072 float32, {name}: {fraction:.3f} of copy", flush=True)
    peers = bench_peers()
    cells = (
        bench_cell(T, dtype, peers)
        for dtype in (torch.float32, torch.bfloat16)
        for T in BENCH_COLUMNS
    )
    table = save_table(cells, folder / "softmax.csv")

    def plot(axes):
        for panel, (dtype, part) in zip(axes, table.groupby("dtype", sort=False), strict=True):
            part = part.sort_values("columns")
            panel.plot(part["columns"], part["copy GB/s"], "k--", label="copy")
            panel.plot(part["columns"], part["GB/s"], "o-", label="fast_softmax")
            for name in peers:
                speed = part["GB/s"] / part[f"{name} / ours"]
                panel.plot(part["columns"], speed, ".-", label=name)
            panel.set(
                xscale="log", xlabel="columns", title=f"softmax, {dtype}, {part['GPU'].iloc[0]}"
            )
        axes[0].set_ylabel("GB/s, read once and written once")

    draw(folder / "softmax.png", 2, plot)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Fast softmax: checks, or with --bench a table.")
    parser.add_argument(
        "--bench", action="store_true", help="measure, on a GPU; needs pandas, matplotlib"
    )
    parser.add_argument("--out", help="folder for softmax.csv and .png (default: benchmarks/<gpu>)")
    options = parser.parse_args()
    if options.bench:
        # Only --bench needs this repository beside the script.
        sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
        bench(options.out)
    else:
        puzzle_8_fast()
