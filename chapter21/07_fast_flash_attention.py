"""Section 21.2, fast: a ladder of kernels from the lesson's to one that keeps tensor cores busy.

    out = softmax(scale * q k^T) v     q [B, Hq, M, D], k and v [B, Hkv, N, D], causal or not

The rungs, in TFLOP/s on an H200, M = N = 4096, D = 128 (causal counts half the operations; --bench
prints other sizes, beside other libraries):

                                                  full    causal
    1  the lesson: float32, 16 x 16                  6         6  K and V read anew for 16 queries
    2  float32, 32 x 32                              6         6  they are read half as often
    3  bfloat16, larger tiles                      382       283  tensor cores; float32 sums
    4  exp2, and programs in another order         416       323  one multiply-add and 2^x a score
    5  a mask only where it hides something        383       360  most blocks of keys need none
    6  tiles fetched by the copy engine            507       479  no thread computes an address

From rung 4 on the longest query blocks start first, and neighbours share K and V in the L2 cache.
Rung 5 splits the keys of a query block into those that all of its queries see and the rest. Rung 6
uses the tensor memory accelerator of an H100, H200 or B200; float32, other GPUs and strides that it
refuses take rung 5.

    python 07_fast_flash_attention.py                     checks, on small sizes
    python 07_fast_flash_attention.py --bench [--out DIR] a table beside other libraries
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
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # before triton 3.4: no rung 6
    TensorDescriptor = None

# What tl.dot multiplies, by the dtype of q, k and v.
DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
LOG2_E = 1.4426950408889634

# BLOCK_M, BLOCK_N, num_warps, num_stages (and registers per thread, if limited) for heads up to 64,
# 128 and 256 wide. The limit is the shared memory of a program: a tile of q, and num_stages tiles
# each of k and of v.
TILES = {
    "descriptors": (
        (128, 64, 4, 3),
        (64, 64, 4, 3),
        (128, 64, 8, 2),
    ),  # 227 KiB: sm_90, 100, 103
    "160 KiB": ((128, 64, 4, 3), (128, 64, 8, 2), (64, 32, 4, 2)),  # sm_80
    "96 KiB": ((128, 64, 4, 2), (128, 32, 8, 2), (64, 32, 4, 1)),  # sm_86, 89, 120
    "64 KiB": ((64, 32, 4, 1), (64, 32, 8, 1), (32, 32, 8, 1)),  # sm_75, AMD
    "float32": ((64, 32, 8, 1), (32, 32, 8, 1), (32, 16, 8, 1)),  # no tensor cores, any GPU
}
# By architecture; any other has "96 KiB".
ROWS = {0: "64 KiB", 75: "64 KiB", 80: "160 KiB", 87: "160 KiB"}
ROWS |= dict.fromkeys((90, 100, 103), "descriptors")


@triton.jit
def simple_attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr,
    M, N, HEADS, GROUP,
    q_strides, k_strides, v_strides, out_strides,
    scale,
    D: tl.constexpr, CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Rungs 1 to 3: the lesson's loop for every head; tl.dot multiplies in the type DOT."""
    blocks = tl.cdiv(M, BLOCK_M)
    head = (tl.program_id(0) // blocks).to(tl.int64)
    batch, head = head // HEADS, head % HEADS
    rows = tl.program_id(0) % blocks * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
    dims = tl.arange(0, BLOCK_D).to(tl.int64)
    q_ptr += batch * q_strides[0] + head * q_strides[1]
    # GROUP query heads share one head of keys and values.
    k_ptr += batch * k_strides[0] + head // GROUP * k_strides[1]
    v_ptr += batch * v_strides[0] + head // GROUP * v_strides[1]
    out_ptr += batch * out_strides[0] + head * out_strides[1]
    q_inside = (rows[:, None] < M) & (dims[None, :] < D)
    q_at = rows[:, None] * q_strides[2] + dims[None, :] * q_strides[3]
    q = tl.load(q_ptr + q_at, mask=q_inside, other=0.0).to(DOT)

    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    end = N
    if CAUSAL:
        end = tl.minimum(N, (tl.program_id(0) % blocks + 1) * BLOCK_M)
    for start in range(0, end, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N).to(tl.int64)
        inside = (cols[:, None] < N) & (dims[None, :] < D)
        k_at = cols[:, None] * k_strides[2] + dims[None, :] * k_strides[3]
        v_at = cols[:, None] * v_strides[2] + dims[None, :] * v_strides[3]
        k = tl.load(k_ptr + k_at, mask=inside, other=0.0).to(DOT)
        v = tl.load(v_ptr + v_at, mask=inside, other=0.0).to(DOT)

        qk = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        seen = cols[None, :] < N
        if CAUSAL:
            seen = seen & (rows[:, None] >= cols[None, :])
        qk = tl.where(seen, qk, float("-inf"))

        m_new = tl.maximum(m_i, tl.max(qk, axis=1))
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp(qk - shift[:, None])
        alpha = tl.exp(m_i - shift)
        l_i = l_i * alpha + tl.sum(p, axis=1)
        acc = acc * alpha[:, None] + tl.dot(p.to(DOT), v, input_precision="ieee")
        m_i = m_new

    acc = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
    out_at = rows[:, None] * out_strides[2] + dims[None, :] * out_strides[3]
    tl.store(out_ptr + out_at, acc.to(out_ptr.dtype.element_ty), mask=q_inside)


@triton.jit
def block_and_head(M, HEADS, TOGETHER, BLOCK_M: tl.constexpr):
    """The query block of this program, and its head out of HEADS over all batches.

    TOGETHER heads at a time are in work, so that their keys and values stay in the L2 cache. The
    last query blocks start first: if causal they see most keys, and the short ones fill the gaps.
    """
    blocks = tl.cdiv(M, BLOCK_M)
    first = tl.program_id(0) // (TOGETHER * blocks) * TOGETHER
    heads = tl.minimum(TOGETHER, HEADS - first)
    place = tl.program_id(0) - first * blocks
    return blocks - 1 - place // heads, first + place % heads


@triton.jit
def key_range(first_row, N, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(full, end): all queries of a block see the keys before full, none those from end on."""
    full, end = N, N
    if CAUSAL:
        full = tl.minimum(N, first_row + 1)
        end = tl.minimum(N, first_row + BLOCK_M)
    return full // BLOCK_N * BLOCK_N, end


@triton.jit
def attend(
    q, k, v, m_i, l_i, acc, rows, cols, N, scale,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """One block of keys joins the running maximum, sum and output. The scale contains log2(e)."""
    qk = tl.dot(q, tl.trans(k), input_precision="ieee")
    if MASKED:
        seen = cols[None, :] < N
        if CAUSAL:
            seen = seen & (rows[:, None] >= cols[None, :])
        qk = tl.where(seen, qk, float("-inf"))
    # The scale is positive, so the maximum may be taken before it is applied.
    m_new = tl.maximum(m_i, tl.max(qk, axis=1) * scale)
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    # Fused, as the rounding of a large qk * scale would be a factor of its weight.
    p = tl.exp2(tl.fma(qk, scale, -shift[:, None]))
    alpha = tl.exp2(m_i - shift)
    l_i = l_i * alpha + tl.sum(p, axis=1)
    acc = tl.dot(p.to(DOT), v, acc * alpha[:, None], input_precision="ieee")
    return m_new, l_i, acc


@triton.jit
def blocks_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr,
    M, N, HEADS, GROUP, BATCH_HEADS, TOGETHER,
    q_strides, k_strides, v_strides, out_strides,
    scale,
    D: tl.constexpr, CAUSAL: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Rungs 4 and 5: with SPLIT, blocks of keys that all queries see are not masked."""
    block, head = block_and_head(M, BATCH_HEADS, TOGETHER, BLOCK_M)
    batch, head = (head // HEADS).to(tl.int64), (head % HEADS).to(tl.int64)
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
    lanes = tl.arange(0, BLOCK_N).to(tl.int64)
    dims = tl.arange(0, BLOCK_D).to(tl.int64)
    q_ptr += batch * q_strides[0] + head * q_strides[1]
    k_ptr += batch * k_strides[0] + head // GROUP * k_strides[1]
    v_ptr += batch * v_strides[0] + head // GROUP * v_strides[1]
    out_ptr += batch * out_strides[0] + head * out_strides[1]
    q_inside = (rows[:, None] < M) & (dims[None, :] < D)
    q_at = rows[:, None] * q_strides[2] + dims[None, :] * q_strides[3]
    q = tl.load(q_ptr + q_at, mask=q_inside, other=0.0).to(DOT)

    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    full, end = key_range(block * BLOCK_M, N, CAUSAL, BLOCK_M, BLOCK_N)
    if not SPLIT:
        full = 0
    # The loop stands here twice: over the full blocks, then over those with something to hide.
    for MASKED in tl.static_range(2):
        for start in range(full if MASKED else 0, end if MASKED else full, BLOCK_N):
            cols = start + lanes
            # A width that is a power of two needs no mask in a full block.
            inside = dims[None, :] < D
            if MASKED:
                inside = inside & (cols[:, None] < N)
            k_at = cols[:, None] * k_strides[2] + dims[None, :] * k_strides[3]
            v_at = cols[:, None] * v_strides[2] + dims[None, :] * v_strides[3]
            if MASKED or D < BLOCK_D:
                k = tl.load(k_ptr + k_at, mask=inside, other=0.0).to(DOT)
                v = tl.load(v_ptr + v_at, mask=inside, other=0.0).to(DOT)
            else:
                k, v = tl.load(k_ptr + k_at).to(DOT), tl.load(v_ptr + v_at).to(DOT)
            m_i, l_i, acc = attend(
                q, k, v, m_i, l_i, acc, rows, cols, N, scale, CAUSAL, MASKED, DOT
            )

    acc = acc * (1.0 / tl.where(l_i == 0.0, 1.0, l_i))[:, None]
    out_at = rows[:, None] * out_strides[2] + dims[None, :] * out_strides[3]
    tl.store(out_ptr + out_at, acc.to(out_ptr.dtype.element_ty), mask=q_inside)


@triton.jit
def descriptors_kernel(
    q_desc, k_desc, v_desc, out_desc,
    M, N, HEADS, GROUP, BATCH_HEADS, TOGETHER,
    scale,
    CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Rung 6: descriptors know shapes and strides; what lies past an end reads 0."""
    block, head = block_and_head(M, BATCH_HEADS, TOGETHER, BLOCK_M)
    batch, head = head // HEADS, head % HEADS
    first_row = block * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)
    q = q_desc.load([batch, head, first_row, 0]).reshape(BLOCK_M, BLOCK_D).to(DOT)

    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    full, end = key_range(first_row, N, CAUSAL, BLOCK_M, BLOCK_N)
    for MASKED in tl.static_range(2):
        for start in range(full if MASKED else 0, end if MASKED else full, BLOCK_N):
            k = k_desc.load([batch, head // GROUP, start, 0]).reshape(BLOCK_N, BLOCK_D).to(DOT)
            v = v_desc.load([batch, head // GROUP, start, 0]).reshape(BLOCK_N, BLOCK_D).to(DOT)
            cols = start + tl.arange(0, BLOCK_N)
            m_i, l_i, acc = attend(
                q, k, v, m_i, l_i, acc, rows, cols, N, scale, CAUSAL, MASKED, DOT
            )

    acc = acc * (1.0 / tl.where(l_i == 0.0, 1.0, l_i))[:, None]
    acc = acc.to(out_desc.dtype).reshape(1, 1, BLOCK_M, BLOCK_D)
    out_desc.store([batch, head, first_row, 0], acc)


def architecture():
    """90 for an H200, say; 0 for an AMD GPU; None for the interpreter."""
    if DEVICE == "cpu":
        return None
    if torch.version.hip is not None:
        return 0
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def heads_together(q, k):
    """How many query heads' keys and values fill 16 MB of L2 cache, a third of an H200's."""
    one = 2 * k.shape[2] * k.shape[3] * k.element_size()
    together = max(1, 2**24 // max(1, one)) * (q.shape[1] // k.shape[1])
    return min(together, q.shape[0] * q.shape[1])


def compiler_options(num_warps, num_stages, maxnreg=None):
    """What a launch hands to the compiler; maxnreg makes room for another program."""
    options = {"num_warps": num_warps, "num_stages": num_stages}
    return options | ({"maxnreg": maxnreg} if maxnreg else {})


def launch_simple(q, k, v, out, causal, scale, tiles, dot):
    """Rungs 1 to 3."""
    (B, H, M, D), N = q.shape, k.shape[2]
    BLOCK_M, BLOCK_N, *options = tiles
    simple_attention_kernel[(B * H * triton.cdiv(M, BLOCK_M),)](
        q, k, v, out,
        M, N, H, H // k.shape[1],
        q.stride(), k.stride(), v.stride(), out.stride(),
        scale,
        D, causal,
        BLOCK_M, BLOCK_N, max(16, triton.next_power_of_2(D)), dot,
        **compiler_options(*options),
    )  # fmt: skip


def launch_blocks(q, k, v, out, causal, scale, tiles, dot, split=True):
    """Rung 5, or without split rung 4."""
    (B, H, M, D), N = q.shape, k.shape[2]
    BLOCK_M, BLOCK_N, *options = tiles
    blocks_kernel[(B * H * triton.cdiv(M, BLOCK_M),)](
        q, k, v, out,
        M, N, H, H // k.shape[1], B * H, heads_together(q, k),
        q.stride(), k.stride(), v.stride(), out.stride(),
        scale * LOG2_E,
        D, causal, split,
        BLOCK_M, BLOCK_N, max(16, triton.next_power_of_2(D)), dot,
        **compiler_options(*options),
    )  # fmt: skip


def launch_descriptors(q, k, v, out, causal, scale, tiles, dot):
    """Rung 6."""
    (B, H, M, D), N = q.shape, k.shape[2]
    BLOCK_M, BLOCK_N, *options = tiles
    BLOCK_D = max(16, triton.next_power_of_2(D))

    def describe(x, rows):
        return TensorDescriptor(x, x.shape, x.stride(), [1, 1, rows, BLOCK_D])

    descriptors_kernel[(B * H * triton.cdiv(M, BLOCK_M),)](
        describe(q, BLOCK_M), describe(k, BLOCK_N), describe(v, BLOCK_N), describe(out, BLOCK_M),
        M, N, H, H // k.shape[1], B * H, heads_together(q, k),
        scale * LOG2_E,
        causal,
        BLOCK_M, BLOCK_N, BLOCK_D, dot,
        **compiler_options(*options),
    )  # fmt: skip


def describable(x):
    """Whether a descriptor can stand for x: columns in one piece, all else at 16 bytes."""
    steps = [x.data_ptr(), *(stride * x.element_size() for stride in x.stride()[:3])]
    apart = all(step > 0 and step % 16 == 0 for step in steps)
    return TensorDescriptor is not None and x.numel() > 0 and x.stride(3) == 1 and apart


def choose(q, k, v, out, arch):
    """(launcher, tiles, type that tl.dot multiplies) for these tensors on this architecture."""
    D = q.shape[3]
    # The interpreter cannot multiply bfloat16.
    dot = tl.float32 if arch is None else DTYPES[q.dtype]
    row = "float32" if dot == tl.float32 else ROWS.get(arch, "96 KiB")
    rung_6 = row == "descriptors" and all(map(describable, (q, k, v, out)))
    return launch_descriptors if rung_6 else launch_blocks, TILES[row][(D > 64) + (D > 128)], dot


def gpu_only_launches(arch=75):
    """Launches of a GPU of this architecture that the checks do not make: to compile, not to run.

    The default's tiles fit every GPU.
    """
    for D in (64, 128, 256):
        q = torch.empty(1, 2, 300, D, dtype=torch.bfloat16)
        launch, tiles, dot = choose(q, q, q, q, arch)
        for one in {launch, launch_blocks}:
            one(q, q, q, q, True, 1.0, tiles, dot)


def check_inputs(q, k, v):
    """Raise TypeError or ValueError for tensors that fast_flash_attention does not take."""
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.ndim == k.ndim == v.ndim == 4 or k.shape != v.shape or q.shape[0] != k.shape[0]:
        raise ValueError(f"want q [B, Hq, M, D], k and v [B, Hkv, N, D]; got {shapes}")
    if q.shape[3] != k.shape[3] or not 1 <= q.shape[3] <= 256:
        raise ValueError(f"want one D from 1 to 256; got {shapes}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"want Hq a multiple of Hkv, both 1 or more; got {shapes}")
    for name, x in {"q": q, "k": k, "v": v}.items():
        if x.dtype not in DTYPES or x.dtype != q.dtype:
            raise TypeError(
                f"want q, k and v all float32, all float16 or all bfloat16; {name} is {x.dtype}"
            )
        if x.requires_grad:
            raise ValueError(f"forward only, but {name} requires grad; use {name}.detach()")
        if x.device.type != DEVICE:
            raise ValueError(f"{name} is on {x.device}, not {DEVICE}; use {name}.to({DEVICE!r})")


def fast_flash_attention(q, k, v, causal=False, scale=None, out=None):
    """softmax(scale * q k^T) v: q [B, Hq, M, D], k and v [B, Hkv, N, D] -> out [B, Hq, M, D].

    float32, float16 or bfloat16, float32 inside, out in q's dtype; forward only. Hq is a multiple
    of Hkv: query head h uses head h // (Hq // Hkv) of k and v. D is 1 to 256; q, k and v may have
    any strides. causal: query i sees the keys 0..i, also where M and N differ. Without keys the
    result is 0. Scores may be as large as 1e8. scale: 1 / sqrt(D) unless given, from 1e-30 to 1e30.
    out: a contiguous tensor like q to write to, which must not overlap k or v.
    Raises TypeError for another dtype, ValueError for shapes, devices or a scale that do not fit.
    """
    check_inputs(q, k, v)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    if not 1e-30 <= scale <= 1e30:
        raise ValueError(f"scale must be from 1e-30 to 1e30, got {scale}")
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if (out.shape, out.dtype, out.device) != (q.shape, q.dtype, q.device):
        raise ValueError(
            f"out must be like q: {tuple(q.shape)}, {q.dtype}, {q.device}; "
            f"got {tuple(out.shape)}, {out.dtype}, {out.device}"
        )
    if not out.is_contiguous():
        raise ValueError(f"out must be contiguous, got strides {out.stride()}")
    if out.numel() > 0:
        with torch.cuda.device_of(q):
            launch, tiles, dot = choose(q, k, v, out, architecture())
            launch(q, k, v, out, bool(causal), float(scale), tiles, dot)
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


def attention_right(q, k, v, **options):
    """Is fast_flash_attention right, for tensors on the CPU?"""
    out = fast_flash_attention(*(x.to(DEVICE) for x in (q, k, v)), **options)
    return nearly(out, float64_heads(q, k, v, **options))


def rung_right(launch, dtype, **options):
    """Is a launcher's result right, causal and in tiles that an odd shape fills partly?"""
    B, H, M, N, D = 1, 2, 75, 41, 24
    q, k, v = (torch.randn(B, H, L, D).to(dtype).to(DEVICE) for L in (M, N, N))
    dot = choose(q, k, v, q, architecture())[2]
    out = torch.full_like(q, math.nan)
    launch(q, k, v, out, True, 0.3, dot=dot, **options)
    return nearly(out, float64_heads(q, k, v, True, 0.3))


def section_21_2_fast():
    torch.manual_seed(0)
    print("=== Section 21.2, fast: every rung, causal, against float64 ===")
    tiles = (32, 32, 4, 1)
    rungs = {
        "1, the lesson's tiles": (launch_simple, torch.float32, {"tiles": (16, 16, 4, 1)}),
        "2, larger tiles": (launch_simple, torch.float32, {"tiles": tiles}),
        "3, bfloat16": (launch_simple, torch.bfloat16, {"tiles": tiles}),
        "4, exp2": (launch_blocks, torch.bfloat16, {"tiles": tiles, "split": False}),
        "5, masks where needed": (launch_blocks, torch.bfloat16, {"tiles": tiles}),
        "6, descriptors": (launch_descriptors, torch.bfloat16, {"tiles": tiles}),
    }
    for name, (launch, dtype, options) in rungs.items():
        no_copy_engine = DEVICE == "cuda" and ROWS.get(architecture()) != "descriptors"
        if launch is launch_descriptors and (TensorDescriptor is None or no_copy_engine):
            print("skipped here: rung 6 (rung 5 in its place)", file=sys.stderr)
            launch = launch_blocks
        print(f"rung {name}: right? {rung_right(launch, dtype, **options)}")

    print("\n=== Section 21.2, fast: shapes and dtypes ===")
    for dtype, B, Hq, Hkv, M, N, D, causal in (
        (torch.float32, 1, 2, 2, 130, 90, 64, True),
        (torch.float16, 2, 4, 2, 40, 100, 16, False),
        (torch.bfloat16, 1, 1, 1, 70, 50, 80, False),
    ):
        q = torch.randn(B, Hq, M, D).to(dtype)
        k, v = torch.randn(2, B, Hkv, N, D).to(dtype)
        shape = f"q {[*q.shape]}, k and v {[*k.shape]}, {'causal' if causal else 'full'}"
        print(f"{str(dtype)[6:]}, {shape}: right? {attention_right(q, k, v, causal=causal)}")

    print("\n=== Section 21.2, fast: strides, scores and keys that break kernels ===")
    q, k, v = torch.randn(1, 50, 3, 2, 16).permute(2, 0, 3, 1, 4)
    v = v[:, :1].expand(1, 2, 50, 16)
    print(f"q and k interleaved, two heads of v that are one: right? {attention_right(q, k, v)}")
    far = torch.full((1, 1, 3, 16), -512.0), (512 + torch.arange(70.0) / 16)[:, None].expand(70, 16)
    q, k, v = far[0], far[1][None, None], torch.randn(1, 1, 70, 16)
    print(f"scores below -4 million: right? {attention_right(q, k, v, scale=1.0)}")
    buffer = torch.full((1, 1, 100, 16), math.nan)
    buffer[:, :, :70] = torch.randn(1, 1, 70, 16)
    k = v = buffer[:, :, :70]
    q = torch.randn(1, 1, 5, 16)
    print(f"NaN beyond the last key: right? {attention_right(q, k, v)}")
    none = torch.empty(1, 1, 0, 16, device=DEVICE)
    zeros = fast_flash_attention(q.to(DEVICE), none, none)
    print(f"no keys: all zeros? {not zeros.any()}")


BENCH_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)


def bench_shape(N, D, causal):
    """One row of the table: TFLOP/s of ours and of the peers."""
    from harness.bench import attention_cell, attention_inputs, attention_peers

    q, k, v = attention_inputs(N, D)
    out = torch.full_like(q, math.nan)

    def ours():
        return fast_flash_attention(q, k, v, causal, out=out)

    rung = choose(q, k, v, out, architecture())[0].__name__.removeprefix("launch_")
    return attention_cell(ours(), ours, q, k, v, causal, attention_peers()) | {"rung": rung}


def bench_rung(launch, dtype, tokens, causal, **options):
    """TFLOP/s of one rung at N = 4096, D = 128."""
    from harness.bench import attention_error, attention_inputs, attention_tflops

    q, k, v = attention_inputs(4096, 128, tokens, dtype)
    out = torch.full_like(q, math.nan)

    def run():
        launch(q, k, v, out, causal, 128**-0.5, dot=DTYPES[dtype], **options)

    run()
    if not attention_error(out, q, k, v, causal) < (1e-5 if dtype == torch.float32 else 5e-3):
        raise RuntimeError(f"wrong result: {launch.__name__}, {dtype}, causal: {causal}, {options}")
    return attention_tflops(run, q, causal)


def bench_rungs():
    """Rung to TFLOP/s, full and causal, for the docstring's table; the slow rungs on less work."""
    row = ROWS.get(architecture(), "96 KiB")
    tiles, half, single = TILES[row][1], torch.bfloat16, torch.float32
    rungs = {
        "1  float32, 16 x 16": (launch_simple, single, 4096, {"tiles": (16, 16, 4, 1)}),
        "2  float32, 32 x 32": (launch_simple, single, 4096, {"tiles": (32, 32, 8, 1)}),
        "3  bf16 in the tiles of 6": (launch_simple, half, 16384, {"tiles": tiles}),
        "4  exp2": (launch_blocks, half, 16384, {"tiles": tiles, "split": False}),
        "5  masks where needed": (launch_blocks, half, 16384, {"tiles": tiles}),
    }
    if row == "descriptors":
        rungs["6  descriptors"] = (launch_descriptors, half, 16384, {"tiles": tiles})
    return {
        name: [bench_rung(*rung, causal, **options) for causal in (False, True)]
        for name, (*rung, options) in rungs.items()
    }


def bench_attention(out):
    """Print the tables; write attention.csv and .png into the folder out, or benchmarks/<gpu>."""
    from harness.bench import attention_peers, draw_attention, results_folder, save_table

    folder = results_folder(out)
    for name, (full, causal) in bench_rungs().items():
        print(f"{name:28}{full:8.1f} TFLOP/s{causal:8.1f} causal", flush=True)
    cells = (
        bench_shape(N, D, causal)
        for D in (64, 128)
        for causal in (False, True)
        for N in BENCH_LENGTHS
    )
    table = save_table(cells, folder / "attention.csv")
    draw_attention(folder / "attention.png", table, "fast_flash_attention", attention_peers())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Fast attention: checks, or with --bench a table.")
    parser.add_argument(
        "--bench", action="store_true", help="measure, on a GPU; needs pandas, matplotlib"
    )
    parser.add_argument(
        "--out", help="folder for attention.csv and .png (default: benchmarks/<gpu>)"
    )
    options = parser.parse_args()
    if options.bench:
        # Only --bench needs this repository beside the script.
        sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
        bench_attention(options.out)
    else:
        section_21_2_fast()
