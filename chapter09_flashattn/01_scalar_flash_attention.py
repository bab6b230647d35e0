"""Puzzle 9, simple flash attention: scalar queries, keys and values, one loop over the keys.

    z_i = sum_j softmax_j(q_i * k_j) * v_j        q [N0], k [T], v [T]

The N0 x T scores are never held: a block of B1 of them is used and dropped (FlashAttention, Dao et
al., arXiv 2205.14135). Three running values per query: qk_max, exp_sum and the weighted sum z. When
qk_max rises, both sums are rescaled by the same factor e^(m_old - m_new).
In the output: z crosses zero, so its error is judged against max |z|; v = ones must give the sum
of the weights, 1; and rising scores make every block raise the maximum.
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
def exp_approx(x):
    """e^x as 2^(log2(e) x): the GPU's exponential unit computes powers of two."""
    return tl.exp2(1.44269504 * x)


@triton.jit
def flashatt_kernel(q_ptr, k_ptr, v_ptr, z_ptr, N0, T, B0: tl.constexpr, B1: tl.constexpr):
    # This program owns B0 queries. One past the last reads 0; its result is not stored.
    rows = tl.program_id(0).to(tl.int64) * B0 + tl.arange(0, B0)
    q = tl.load(q_ptr + rows, mask=rows < N0, other=0.0)

    qk_max = tl.full((B0,), float("-inf"), tl.float32)
    exp_sum = tl.zeros((B0,), tl.float32)
    z = tl.zeros((B0,), tl.float32)
    for start in range(0, T, B1):
        cols = start + tl.arange(0, B1)
        k = tl.load(k_ptr + cols, mask=cols < T, other=0.0)
        v = tl.load(v_ptr + cols, mask=cols < T, other=0.0)
        # A key past the end must get no weight: its score is -inf, not the 0 that q * 0 would give.
        qk = tl.where(cols[None, :] < T, q[:, None] * k[None, :], float("-inf"))
        new_max = tl.maximum(qk_max, tl.max(qk, axis=1))
        # Nothing but -inf so far: subtract 0, as -inf - -inf is NaN.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = exp_approx(qk - shift[:, None])
        # Both sums are relative to the old maximum; the same factor makes them relative to the new.
        factor = exp_approx(qk_max - shift)
        exp_sum = exp_sum * factor + tl.sum(weights, axis=1)
        z = z * factor + tl.sum(weights * v[None, :], axis=1)
        qk_max = new_max

    # One division at the end normalises. Without any key both sums are 0, and so is the result.
    z = z / tl.where(exp_sum == 0.0, 1.0, exp_sum)
    tl.store(z_ptr + rows, z, mask=rows < N0)


def flashatt(q, k, v, B0=64, B1=32):
    """Attention over scalars: q [N0], k [T], v [T], float32 -> z [N0]. Forward only.

    B0, B1 are powers of two. Raises TypeError for another dtype, ValueError for another shape or
    device.
    """
    if q.ndim != 1 or k.ndim != 1 or k.shape != v.shape:
        shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        raise ValueError(f"want q [N0], k [T], v [T]; got {shapes}")
    for name, x in {"q": q, "k": k, "v": v}.items():
        if x.dtype != torch.float32:
            raise TypeError(f"{name} must be float32, got {x.dtype}; use {name}.float()")
        if x.requires_grad:
            raise ValueError(f"forward only, but {name} requires grad; use {name}.detach()")
        if x.device.type != DEVICE:
            raise ValueError(f"{name} is on {x.device}, not {DEVICE}; use {name}.to({DEVICE!r})")
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    z = torch.empty_like(q)
    N0, T = q.numel(), k.numel()
    flashatt_kernel[(triton.cdiv(N0, B0),)](q, k, v, z, N0, T, B0, B1)
    return z


def flashatt_spec(q, k, v):
    """Reference. q: Float32[200], k: Float32[200], v: Float32[200] -> Float32[200]"""
    return torch.softmax(q[:, None] * k[None, :], dim=1) @ v


def max_error(z, want):
    """The largest error, in units of the largest |value| wanted."""
    return ((z - want).abs().max() / want.abs().max()).item()


def puzzle_9():
    torch.manual_seed(0)
    q, k, v = (torch.rand(200) - 0.5 for _ in range(3))

    def run(q, k, v):
        return flashatt(q.to(DEVICE), k.to(DEVICE), v.to(DEVICE)).cpu()

    print("=== Puzzle 9: simple flash attention, scalar q, k, v ===")
    z, want = run(q, k, v), flashatt_spec(q, k, v)
    print(f"max error below 1e-5 of max |z|? {max_error(z, want) < 1e-5}")
    ones = torch.ones(200)
    print(f"v = ones gives 1? {torch.allclose(run(q, k, ones), ones, rtol=1e-5, atol=0)}")
    print(f"max abs diff: {(z - want).abs().max().item()}")

    print("\n=== Puzzle 9: what the puzzle's own input does not test ===")
    # Scores rise with j, so every block raises the maximum and both sums must be rescaled.
    q, k, v = torch.ones(1), torch.arange(300.0) / 30, torch.arange(300.0)
    z, want = run(q, k, v), flashatt_spec(q, k, v)
    print(f"scores that rise: max error below 1e-5 of max |z|? {max_error(z, want) < 1e-5}")

    # Scores below -4 million: any finite stand-in for minus infinity loses to them.
    q, k, v = torch.full((1,), -2048.0), 2048 + torch.arange(40.0) / 64, torch.arange(40.0)
    z, want = run(q, k, v + 1), flashatt_spec(q, k, v + 1)
    print(f"scores below -4194304: max error below 1e-5 of max |z|? {max_error(z, want) < 1e-5}")


if __name__ == "__main__":
    puzzle_9()
