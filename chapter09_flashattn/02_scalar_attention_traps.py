"""Puzzle 9, simple flash attention: three mistakes, each beside the right kernel.

    trap 1   -1e6 stands in for minus infinity         if TRAP == 1 in the kernel
    trap 2   a key past the end keeps its score of 0   if TRAP == 2
    trap 3   the weighted sum is not rescaled          if TRAP == 3

In the output: traps 2 and 3 pass the puzzle's check on the puzzle's own input, and trap 1 needs
scores below -1e6. The inputs that give each away are one line each.
"""

import os
import warnings

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
def flashatt_trap_kernel(
    q_ptr, k_ptr, v_ptr, z_ptr, N0, T, B0: tl.constexpr, B1: tl.constexpr, TRAP: tl.constexpr
):
    """01's kernel for T >= 1; TRAP = 1, 2 or 3 puts one mistake in, 0 none."""
    rows = tl.program_id(0).to(tl.int64) * B0 + tl.arange(0, B0)
    q = tl.load(q_ptr + rows, mask=rows < N0, other=0.0)

    if TRAP == 1:
        lowest = -1e6  # WRONG: a score can be lower, and then this wins the maximum.
    else:
        lowest = float("-inf")
    qk_max = tl.full((B0,), lowest, tl.float32)
    exp_sum = tl.zeros((B0,), tl.float32)
    z = tl.zeros((B0,), tl.float32)
    for start in range(0, T, B1):
        cols = start + tl.arange(0, B1)
        k = tl.load(k_ptr + cols, mask=cols < T, other=0.0)
        v = tl.load(v_ptr + cols, mask=cols < T, other=0.0)
        if TRAP == 2:
            qk = q[:, None] * k[None, :]  # WRONG: 0 past the end, so a weight of e^(0 - max).
        else:
            qk = tl.where(cols[None, :] < T, q[:, None] * k[None, :], lowest)
        new_max = tl.maximum(qk_max, tl.max(qk, axis=1))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = exp_approx(qk - shift[:, None])
        factor = exp_approx(qk_max - shift)
        exp_sum = exp_sum * factor + tl.sum(weights, axis=1)
        if TRAP == 3:
            z = z + tl.sum(weights * v[None, :], axis=1)  # WRONG: z is relative to an old maximum.
        else:
            z = z * factor + tl.sum(weights * v[None, :], axis=1)
        qk_max = new_max

    tl.store(z_ptr + rows, z / exp_sum, mask=rows < N0)


def flashatt_trap(q, k, v, trap, B0=64, B1=32):
    """Attention over scalars, CPU tensors, with mistake 1, 2 or 3, or 0 for none."""
    q, k, v = (x.to(DEVICE) for x in (q, k, v))
    z = torch.empty_like(q)
    N0, T = q.numel(), k.numel()
    with warnings.catch_warnings():
        if trap:
            # The interpreter computes with NumPy, which warns of the NaN that a trap makes.
            warnings.simplefilter("ignore", RuntimeWarning)
        flashatt_trap_kernel[(triton.cdiv(N0, B0),)](q, k, v, z, N0, T, B0, B1, trap)
    return z.cpu()


def flashatt_spec(q, k, v):
    """Reference. q: Float32[200], k: Float32[200], v: Float32[200] -> Float32[200]"""
    return torch.softmax(q[:, None] * k[None, :], dim=1) @ v


def max_error(z, want):
    """The largest error, in units of the largest |value| wanted."""
    return ((z - want).abs().max() / want.abs().max()).item()


def puzzle_9_traps():
    torch.manual_seed(0)
    puzzle = [torch.rand(200) - 0.5 for _ in range(3)]
    want = flashatt_spec(*puzzle)

    def run_both(trap):
        """On the puzzle's own input: the puzzle's check, and ours. The wrong kernel's error."""
        for name, number in ("right", 0), ("wrong", trap):
            z = flashatt_trap(*puzzle, number)
            check = torch.allclose(z, want, rtol=1e-3, atol=1e-3)
            print(f"{name} kernel: the puzzle's check, 1e-3? {check}", end="; ")
            print(f"max error below 1e-5 of max |z|? {max_error(z, want) < 1e-5}")
        return max_error(z, want)

    print("=== Trap 1: -1e6 stands in for minus infinity ===")
    # The scores are -j/2, then -2^22 - j/2, exactly: one constant less, which changes no softmax.
    for T in 40, 32:
        j = torch.arange(float(T))
        for name, q, k in ("-j/2", -0.5, j), ("-4194304 - j/2", -2048.0, 2048 + j / 4096):
            q = torch.tensor([q])
            right, wrong = (flashatt_trap(q, k, j, trap).item() for trap in (0, 1))
            print(f"scores {name}, j < {T}: {flashatt_spec(q, k, j).item():.4f} wanted", end="; ")
            print(f"right kernel {right:.4f}, wrong {wrong:.4f}")

    print("\n=== Trap 2: a key past the end keeps its score of 0 ===")
    print(f"wrong kernel: max error {run_both(2):.4f} of max |z|", end="; ")
    # v is 0 past the end, so only exp_sum is wrong, and v = 1 shows by what factor.
    ones = flashatt_trap(*puzzle[:2], torch.ones(200), 2)
    print(f"v = 1 gives {ones.min():.4f} to {ones.max():.4f}")

    print("\n=== Trap 3: the weighted sum is not rescaled when the maximum rises ===")
    print(f"wrong kernel: max error {run_both(3):.4f} of max |z|")
    # Scores rise with j: every block of 32 raises the maximum. One block of 512 holds them all.
    q, k, v = torch.ones(1), torch.arange(300.0) / 30, torch.arange(300.0)
    for B1 in 32, 512:
        right, wrong = (flashatt_trap(q, k, v, trap, B0=1, B1=B1).item() for trap in (0, 3))
        print(f"q = 1, k = j/30, v = j, j < 300, B1 = {B1}: ", end="")
        print(f"right kernel {right:.4f}, wrong {wrong:.4f}")


if __name__ == "__main__":
    puzzle_9_traps()
