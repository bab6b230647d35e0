"""Puzzle 8, long softmax: two passes, with the running maximum and sum computed together.

Online softmax (Milakov and Gimelshein, arXiv 1805.02867): from m_0 = -inf, d_0 = 0,

    m_j = max(m_(j-1), x_j)
    d_j = d_(j-1) * e^(m_(j-1) - m_j) + e^(x_j - m_j)
    y_i = e^(x_i - m_V) / d_V

When the maximum rises, everything summed so far was relative to the old one: a factor corrects it.
Here m is row_max, d is row_sum_exp, and j runs over blocks of B1 columns instead of single ones.
In the output: the last line's row begins with two blocks of -inf, where the recurrence as written
computes -inf - -inf.
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
def softmax_kernel(x_ptr, z_ptr, N0, N1, T, B0: tl.constexpr, B1: tl.constexpr):
    # This program owns B0 rows. int64, as row * T can pass 2^31.
    rows = tl.program_id(0).to(tl.int64) * B0 + tl.arange(0, B0)[:, None]
    # A row past the last one reads the last one again; its result is not stored.
    x_rows = x_ptr + tl.minimum(rows, N0 - 1) * T

    row_max = tl.full((B0, 1), float("-inf"), tl.float32)
    row_sum_exp = tl.zeros((B0, 1), tl.float32)
    for start in range(0, T, B1):
        cols = start + tl.arange(0, B1)[None, :]
        # Past the end of the row: -inf, which no maximum takes and which adds e^-inf = 0 to a sum.
        x = tl.load(x_rows + cols, mask=cols < T, other=float("-inf"))
        new_max = tl.maximum(row_max, tl.max(x, axis=1, keep_dims=True))
        # A row of nothing but -inf so far: subtract 0, as -inf - -inf is NaN.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        # The old sum is relative to row_max; this factor, at most 1, makes it relative to new_max.
        row_sum_exp *= exp_approx(row_max - shift)
        row_sum_exp += tl.sum(exp_approx(x - shift), axis=1, keep_dims=True)
        row_max = new_max

    for start in range(0, T, B1):
        cols = start + tl.arange(0, B1)[None, :]
        x = tl.load(x_rows + cols, mask=cols < T, other=float("-inf"))
        z = exp_approx(x - row_max) / row_sum_exp
        tl.store(z_ptr + rows * T + cols, z, mask=(rows < N0) & (cols < T))


def softmax(x, B0=1, B1=32):
    """Softmax of each row of x [N0, T], float32, forward only; B0, B1 are powers of two.

    Raises TypeError for another dtype, ValueError for another shape or device,
    or if x requires grad.
    """
    if x.ndim != 2:
        raise ValueError(f"x must be [N0, T], got shape {tuple(x.shape)}")
    if x.dtype != torch.float32:
        raise TypeError(f"x must be float32, got {x.dtype}; convert it with x.float()")
    if x.requires_grad:
        raise ValueError("forward only, but x requires grad; use x.detach()")
    if x.device.type != DEVICE:
        raise ValueError(f"x is on {x.device}, the kernel runs on {DEVICE}; use x.to({DEVICE!r})")
    x = x.contiguous()
    z = torch.empty_like(x)
    N0, T = x.shape
    softmax_kernel[(triton.cdiv(N0, B0),)](x, z, N0, B1, T, B0, B1)
    return z


def softmax_spec(x):
    """Reference. x: Float32[4, 200] -> Float32[4, 200]"""
    x_exp = (x - x.max(dim=1, keepdim=True).values).exp()
    return x_exp / x_exp.sum(dim=1, keepdim=True)


def puzzle_8_online():
    torch.manual_seed(0)
    x = torch.rand(4, 200) - 0.5

    print("=== Puzzle 8: long softmax, online, two passes ===")
    z, want = softmax(x.to(DEVICE)).cpu(), softmax_spec(x)
    print(f"relative error below 1e-5? {torch.allclose(z, want, rtol=1e-5, atol=0)}")
    print(f"every row sums to 1? {torch.allclose(z.sum(dim=1), torch.ones(4), rtol=1e-5, atol=0)}")
    print(f"max abs diff: {(z - want).abs().max().item()}")

    print("\n=== Puzzle 8: what the puzzle's own input does not test ===")
    # No entry is near 0, so a maximum that starts at 0 or a tail that reads 0 ruins the row.
    x = x - 200
    z, want = softmax(x.to(DEVICE)).cpu(), softmax_spec(x)
    small = torch.allclose(z, want, rtol=1e-5, atol=0)
    print(f"rows near -200: relative error below 1e-5? {small}")

    x[:, :64] = float("-inf")
    z, want = softmax(x.to(DEVICE)).cpu(), softmax_spec(x)
    small = torch.allclose(z, want, rtol=1e-5, atol=0)
    print(f"64 x -inf first: relative error below 1e-5? {small}")


if __name__ == "__main__":
    puzzle_8_online()
