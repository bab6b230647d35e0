"""Section 21.2: causal flash attention, and a correct kernel applied to the wrong task.

Row i may attend to keys 0..i only. Two lines differ from 21.1's kernel: the mask, and the loop's
end, as key blocks wholly past the query block need no visit.
In the output: 21.1's kernel is run on the causal task too. It is off by 1.72, far above rounding,
yet agrees with the oracle of the task it was written for: the kernel is right, the task is not.
"""

import os

import torch

# Without a GPU, Triton's interpreter runs the kernels; it must be chosen before triton is imported.
INTERPRET = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRET else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

import triton
import triton.language as tl


@triton.jit
def flash_attn_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr,
    M, N, D,
    stride_qm, stride_qd,
    stride_kn, stride_kd,
    stride_vn, stride_vd,
    stride_om, stride_od,
    scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # This program owns BLOCK_M queries. int64, as row * stride can pass 2^31.
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D).to(tl.int64)
    # Lanes past M, N or D read 0: past D that adds nothing to a dot product.
    q = tl.load(
        q_ptr + rows[:, None] * stride_qm + dims[None, :] * stride_qd,
        mask=(rows[:, None] < M) & (dims[None, :] < D),
        other=0.0,
    )

    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N).to(tl.int64)
        inside = (cols[:, None] < N) & (dims[None, :] < D)
        k_ptrs = k_ptr + cols[:, None] * stride_kn + dims[None, :] * stride_kd
        v_ptrs = v_ptr + cols[:, None] * stride_vn + dims[None, :] * stride_vd
        k = tl.load(k_ptrs, mask=inside, other=0.0)
        # A value past the end must be 0 even where its weight is 0, as 0 * NaN is NaN.
        v = tl.load(v_ptrs, mask=inside, other=0.0)

        # "ieee": by default a GPU cuts float32 operands to TF32, 10 bits of mantissa.
        qk = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        # A key past the end gets no weight: e^-inf = 0.
        qk = tl.where(cols[None, :] < N, qk, float("-inf"))

        m_new = tl.maximum(m_i, tl.max(qk, axis=1))
        # A row of nothing but -inf so far: subtract 0, as -inf - -inf is NaN.
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp(qk - shift[:, None])
        # What was summed so far is relative to the old maximum; alpha makes it relative to the new.
        alpha = tl.exp(m_i - shift)
        l_i = l_i * alpha + tl.sum(p, axis=1)
        acc = acc * alpha[:, None] + tl.dot(p, v, input_precision="ieee")
        m_i = m_new

    # One division at the end normalises. Without any key both are 0, and so is the row.
    acc = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
    tl.store(
        out_ptr + rows[:, None] * stride_om + dims[None, :] * stride_od,
        acc,
        mask=(rows[:, None] < M) & (dims[None, :] < D),
    )


@triton.jit
def flash_attn_causal_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr,
    M, N, D,
    stride_qm, stride_qd,
    stride_kn, stride_kd,
    stride_vn, stride_vd,
    stride_om, stride_od,
    scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # This program owns BLOCK_M queries. int64, as row * stride can pass 2^31.
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D).to(tl.int64)
    # Lanes past M, N or D read 0: past D that adds nothing to a dot product.
    q = tl.load(
        q_ptr + rows[:, None] * stride_qm + dims[None, :] * stride_qd,
        mask=(rows[:, None] < M) & (dims[None, :] < D),
        other=0.0,
    )

    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    # A key block that starts past this program's last query is wholly masked: not visited.
    end = tl.minimum(N, (tl.program_id(0) + 1) * BLOCK_M)
    for start in range(0, end, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N).to(tl.int64)
        inside = (cols[:, None] < N) & (dims[None, :] < D)
        k_ptrs = k_ptr + cols[:, None] * stride_kn + dims[None, :] * stride_kd
        v_ptrs = v_ptr + cols[:, None] * stride_vn + dims[None, :] * stride_vd
        k = tl.load(k_ptrs, mask=inside, other=0.0)
        # A value past the end must be 0 even where its weight is 0, as 0 * NaN is NaN.
        v = tl.load(v_ptrs, mask=inside, other=0.0)

        # "ieee": by default a GPU cuts float32 operands to TF32, 10 bits of mantissa.
        qk = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        # Row i sees keys 0..i: >=, as a query sees its own key. No weight for others: e^-inf = 0.
        visible = (rows[:, None] >= cols[None, :]) & (cols[None, :] < N)
        qk = tl.where(visible, qk, float("-inf"))

        m_new = tl.maximum(m_i, tl.max(qk, axis=1))
        # A row of nothing but -inf so far: subtract 0, as -inf - -inf is NaN.
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp(qk - shift[:, None])
        # What was summed so far is relative to the old maximum; alpha makes it relative to the new.
        alpha = tl.exp(m_i - shift)
        l_i = l_i * alpha + tl.sum(p, axis=1)
        acc = acc * alpha[:, None] + tl.dot(p, v, input_precision="ieee")
        m_i = m_new

    # One division at the end normalises. Without any key both are 0, and so is the row.
    acc = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
    tl.store(
        out_ptr + rows[:, None] * stride_om + dims[None, :] * stride_od,
        acc,
        mask=(rows[:, None] < M) & (dims[None, :] < D),
    )


def _run(kernel, q, k, v, BLOCK_M, BLOCK_N):
    if q.ndim != 2 or k.ndim != 2 or q.shape[1] != k.shape[1] or k.shape != v.shape:
        shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        raise ValueError(f"want q [M, D], k and v [N, D]; got {shapes}")
    for name, x in {"q": q, "k": k, "v": v}.items():
        if x.dtype != torch.float32:
            raise TypeError(f"{name} must be float32, got {x.dtype}; use {name}.float()")
        if x.requires_grad:
            raise ValueError(f"forward only, but {name} requires grad; use {name}.detach()")
        if x.device.type != DEVICE:
            raise ValueError(f"{name} is on {x.device}, not {DEVICE}; use {name}.to({DEVICE!r})")
    (M, D), N = q.shape, k.shape[0]
    if D == 0:
        raise ValueError("q, k and v need at least one column; got D = 0")
    if any(block < 16 or block & (block - 1) for block in (BLOCK_M, BLOCK_N)):
        raise ValueError(f"blocks are powers of two, 16 or more; got {BLOCK_M} and {BLOCK_N}")
    out = torch.empty_like(q)
    # A GPU's tl.dot takes no tile under 16, so a narrower head is padded with zeros.
    BLOCK_D = max(16, triton.next_power_of_2(D))
    kernel[(triton.cdiv(M, BLOCK_M),)](
        q, k, v, out,
        M, N, D,
        *q.stride(), *k.stride(), *v.stride(), *out.stride(),
        D**-0.5,
        BLOCK_M, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    return out


def flash_attention(q, k, v, BLOCK_M=16, BLOCK_N=16):
    """softmax(q k^T / sqrt(D)) v: q [M, D], k and v [N, D], float32 -> [M, D]. Forward only.

    BLOCK_M and BLOCK_N are powers of two, 16 or more. Without keys (N = 0) the result is 0.
    Raises TypeError for another dtype, ValueError for shapes, devices or blocks that do not fit.
    """
    return _run(flash_attn_kernel, q, k, v, BLOCK_M, BLOCK_N)


def causal_flash_attention(q, k, v, BLOCK_M=16, BLOCK_N=16):
    """Like flash_attention, but row i sees only keys 0..i, also where M != N (aligned top left)."""
    return _run(flash_attn_causal_kernel, q, k, v, BLOCK_M, BLOCK_N)


def naive_attention(q, k, v):
    """Reference: the whole M x N matrix of scores at once."""
    scale = q.shape[1] ** -0.5
    return torch.softmax(q @ k.T * scale, dim=-1) @ v


def naive_causal_attention(q, k, v):
    """Reference: the whole M x N matrix of scores, -inf above the diagonal."""
    scale = q.shape[1] ** -0.5
    scores = q @ k.T * scale
    future = torch.ones_like(scores, dtype=torch.bool).triu(diagonal=1)
    return torch.softmax(scores.masked_fill(future, float("-inf")), dim=-1) @ v


def section_21_2():
    torch.manual_seed(0)
    M = N = 20
    D = 8
    q, k, v = torch.randn(M, D), torch.randn(N, D), torch.randn(N, D)
    on_device = [x.to(DEVICE) for x in (q, k, v)]
    causal = causal_flash_attention(*on_device).cpu()
    non_causal = flash_attention(*on_device).cpu()
    want_causal = naive_causal_attention(q, k, v)
    want_full = naive_attention(q, k, v)
    print("=== Section 21.2: causal Flash Attention vs. naive causal attention ===")
    close = torch.allclose(causal, want_causal, atol=1e-4)
    print(f"causal kernel allclose to causal oracle? {close}")
    print(f"max abs diff: {(causal - want_causal).abs().max().item()}")

    print("\n=== Section 21.2: a correct (non-causal) kernel applied to the wrong task ===")
    close = torch.allclose(non_causal, want_causal, atol=1e-4)
    print(f"non-causal kernel allclose to CAUSAL oracle? {close}")
    close = torch.allclose(non_causal, want_full, atol=1e-4)
    print(f"non-causal kernel allclose to NON-causal oracle? {close}")
    print(f"max abs diff vs causal oracle: {(non_causal - want_causal).abs().max().item()}")


if __name__ == "__main__":
    section_21_2()
