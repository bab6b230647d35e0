"""Puzzle 8, long softmax: four mistakes, each beside the right kernel and with what gives it away.

    trap 1   the running maximum starts at 0           if TRAP == 1 in the kernel
    trap 2   the tail is read as 0 instead of -inf     if TRAP == 2
    trap 3   -inf - -inf, after a block of -inf        if TRAP == 3
    trap 4   a third pass where two will do, or one    counted in bytes

In the output: on the puzzle's own input trap 1 is invisible and trap 2 passes the puzzle's check.
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
def softmax_trap_kernel(
    x_ptr, z_ptr, N0, N1, T, B0: tl.constexpr, B1: tl.constexpr, TRAP: tl.constexpr
):
    """02_online_softmax.py's kernel; TRAP = 1, 2 or 3 puts one mistake in, 0 none."""
    rows = tl.program_id(0).to(tl.int64) * B0 + tl.arange(0, B0)[:, None]
    x_rows = x_ptr + tl.minimum(rows, N0 - 1) * T

    if TRAP == 1:
        row_max = tl.zeros((B0, 1), tl.float32)  # WRONG: a row may lie wholly below 0.
    else:
        row_max = tl.full((B0, 1), float("-inf"), tl.float32)
    row_sum_exp = tl.zeros((B0, 1), tl.float32)
    for start in range(0, T, B1):
        cols = start + tl.arange(0, B1)[None, :]
        if TRAP == 2:
            # WRONG: each lane past the end adds e^(0 - max) to the sum. Without `other=` the
            # interpreter reads this 0, and a GPU whatever the register held.
            x = tl.load(x_rows + cols, mask=cols < T, other=0.0)
        else:
            x = tl.load(x_rows + cols, mask=cols < T, other=float("-inf"))
        new_max = tl.maximum(row_max, tl.max(x, axis=1, keep_dims=True))
        if TRAP == 3:
            shift = new_max  # WRONG: while both maxima are -inf, row_max - shift is NaN.
        else:
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        row_sum_exp *= exp_approx(row_max - shift)
        row_sum_exp += tl.sum(exp_approx(x - shift), axis=1, keep_dims=True)
        row_max = new_max

    for start in range(0, T, B1):
        cols = start + tl.arange(0, B1)[None, :]
        x = tl.load(x_rows + cols, mask=cols < T, other=float("-inf"))
        z = exp_approx(x - row_max) / row_sum_exp
        tl.store(z_ptr + rows * T + cols, z, mask=(rows < N0) & (cols < T))


def softmax_trap(x, trap, B0=4, B1=32):
    """Softmax of the rows of x [N0, T], a CPU tensor, with mistake 1, 2 or 3, or 0 for none."""
    x = x.to(DEVICE)
    z = torch.empty_like(x)
    N0, T = x.shape
    with warnings.catch_warnings():
        if trap:
            # The interpreter computes with NumPy, which warns of the NaN that a trap makes.
            warnings.simplefilter("ignore", RuntimeWarning)
        softmax_trap_kernel[(triton.cdiv(N0, B0),)](x, z, N0, B1, T, B0, B1, trap)
    return z.cpu()


@triton.jit
def load_and_count(x_row, cols, T, read):
    inside = cols < T
    x = tl.load(x_row + cols, mask=inside, other=float("-inf"))
    return x, read + tl.sum(inside.to(tl.int32), axis=0)


@triton.jit
def store_and_count(z_row, cols, T, z, written):
    inside = cols < T
    tl.store(z_row + cols, z, mask=inside)
    return written + tl.sum(inside.to(tl.int32), axis=0)


@triton.jit
def softmax_counting_kernel(
    x_ptr, z_ptr, read_ptr, written_ptr, T, LOOPS: tl.constexpr, B1: tl.constexpr
):
    """Softmax of one row per program in LOOPS loops; counts the floats that it reads and writes."""
    row = tl.program_id(0).to(tl.int64)
    x_row, z_row = x_ptr + row * T, z_ptr + row * T
    cols = tl.arange(0, B1)
    read, written = 0, 0
    if LOOPS == 1:
        # The row fits one block, B1 >= T: it is read once and stays on the chip until written.
        x, read = load_and_count(x_row, cols, T, read)
        exps = exp_approx(x - tl.max(x, axis=0))
        written = store_and_count(z_row, cols, T, exps / tl.sum(exps, axis=0), written)
    else:
        row_max = float("-inf")
        row_sum_exp = 0.0
        if LOOPS == 3:
            for start in range(0, T, B1):
                x, read = load_and_count(x_row, start + cols, T, read)
                row_max = tl.maximum(row_max, tl.max(x, axis=0))
        for start in range(0, T, B1):
            x, read = load_and_count(x_row, start + cols, T, read)
            # After a first loop that found the maximum, the factor is 1.
            new_max = tl.maximum(row_max, tl.max(x, axis=0))
            row_sum_exp *= exp_approx(row_max - new_max)
            row_sum_exp += tl.sum(exp_approx(x - new_max), axis=0)
            row_max = new_max
        for start in range(0, T, B1):
            x, read = load_and_count(x_row, start + cols, T, read)
            z = exp_approx(x - row_max) / row_sum_exp
            written = store_and_count(z_row, start + cols, T, z, written)
    tl.store(read_ptr + row, read)
    tl.store(written_ptr + row, written)


def softmax_counting(x, loops, B1):
    """Softmax of x [1, T], a CPU tensor -> the result, and the floats read and written."""
    x = x.to(DEVICE)
    z = torch.empty_like(x)
    read, written = (torch.zeros(1, dtype=torch.int32, device=DEVICE) for _ in range(2))
    softmax_counting_kernel[(1,)](x, z, read, written, x.shape[1], loops, B1)
    return z.cpu(), read.item(), written.item()


def softmax_spec(x):
    """Reference. x: Float32[4, 200] -> Float32[4, 200]"""
    x_exp = (x - x.max(dim=1, keepdim=True).values).exp()
    return x_exp / x_exp.sum(dim=1, keepdim=True)


def near(z, x):
    return torch.allclose(z, softmax_spec(x), rtol=1e-5, atol=0)


def puzzle_8_traps():
    torch.manual_seed(0)
    x, normal = torch.rand(4, 200) - 0.5, torch.randn(4, 200)

    print("=== Trap 1: the running maximum starts at 0 ===")
    # Any entry above 0 lifts the maximum off its start. Where all are near -200, every e^(x - 0) is
    # 0 in float32, and so is their sum: 0 / 0.
    for name, rows in ("rand - 0.5", x), ("randn", normal), ("rand - 200.5", x - 200):
        right, wrong = softmax_trap(rows, 0), softmax_trap(rows, 1)
        print(f"{name}: right kernel within 1e-5? {near(right, rows)}", end="; ")
        print(f"wrong? {near(wrong, rows)}, NaN: {wrong.isnan().sum().item()} of 800")

    print("\n=== Trap 2: the tail is read as 0 instead of -inf ===")
    want = softmax_spec(x)
    for name, z in ("right", softmax_trap(x, 0)), ("wrong", softmax_trap(x, 2)):
        sums, off = z.sum(dim=1), 100 * (1 - z / want).abs()
        print(f"{name} kernel: row sums {sums.min():.4f} to {sums.max():.4f}", end="; ")
        print(f"values off by {off.min():.1f} to {off.max():.1f} %")
        # The puzzle's check allows an error of 1e-3, a fifth of a typical value of 1/200.
        puzzle = torch.allclose(z, want, rtol=1e-3, atol=1e-3)
        print(f"  the puzzle's check, 1e-3? {puzzle}; relative error within 1e-5? {near(z, x)}")

    print("\n=== Trap 3: -inf - -inf after a block of nothing but -inf ===")
    # One number among the first 32 columns is enough for the maximum to leave -inf in time.
    for name, columns in ("0..30", slice(31)), ("0..31", slice(32)), ("168..199", slice(168, 200)):
        rows = x.clone()
        rows[:, columns] = float("-inf")
        right, wrong = softmax_trap(rows, 0), softmax_trap(rows, 3)
        print(f"-inf in columns {name}: right kernel within 1e-5? {near(right, rows)}", end="; ")
        print(f"wrong? {near(wrong, rows)}, NaN: {wrong.isnan().sum().item()} of 800")

    print("\n=== Trap 4: the third pass, in bytes per row of float32 ===")
    # What a kernel asks for. A cache answers the second read of a short row; rows of 512 KiB, one
    # for every multiprocessor of a large GPU, do not even fit the cache that they share.
    same = right = True
    for T, B1 in (200, 32), (131072, 8192):
        x = torch.rand(1, T) - 0.5
        for loops in 3, 2, 1:
            # Every loop reads the row once; the last one writes it.
            read, written = 4 * loops * T, 4 * T
            print(f"T = {T:6}, loops: {loops}, read: {read:7}, written: {written:6}", end=", ")
            print(f"both: {read + written:7}, times the least: {(read + written) / (8 * T):.1f}")
            if loops > 1 or T == 200:
                z, *floats = softmax_counting(x, loops, B1 if loops > 1 else 256)
                same &= [4 * n for n in floats] == [read, written]
                right &= near(z, x)
    print(f"counted in the kernels, the same? {same}; results within 1e-5? {right}")
    # An NVIDIA multiprocessor has 256 KiB of registers. So this one loop was not run: it takes
    # several multiprocessors that hold a part of the row each.
    print(f"a row of 131072 fits one multiprocessor's registers? {4 * 131072 <= 256 * 1024}")


if __name__ == "__main__":
    puzzle_8_traps()
