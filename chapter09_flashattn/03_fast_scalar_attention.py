"""Puzzle 9, fast: a ladder of kernels towards the limit of the exponential unit.

A score costs one exponential, and q, k and v are tiny: nothing but arithmetic counts. An H200
starts 128 operations per clock and multiprocessor, but only 16 exponentials; one score in
the time of one exponential leaves room for 8 instructions. 10^12 exponentials per second at
N0 = T = 65536, and their share of what an H200's exponential units alone could do (--bench prints
other sizes):

    1  the puzzle's kernel            0.35  0.08  sums and maxima across lanes for every block
    2  the row maximum beforehand     0.58  0.14  no maximum to find, nothing to rescale
    3  sums that stay in lanes        3.11  0.74  added up across lanes once: 5 instructions a score
    4  the keys split over programs   3.32  0.79  no multiprocessor is idle, also where N0 is small

Rung 2 rests on the scores being products: the largest q * k_j is at the largest key if q >= 0, at
the smallest if q < 0, so that the weights are e^(q * (k_j - extreme)) at once. It is the keys'
difference that is taken, not that of the scores: scores near -4194304 lose nothing by it. Rungs 3
and 4 count 5 slots of the 8 (pick a difference, multiply, exponential, two sums), and half a slot
for loads. To compute some exponentials by a polynomial, on the multiply-add units, gains nothing:
with one in eight, three of four tile shapes were 2 to 7 % slower, the fourth no faster than rung 4.

    python 03_fast_scalar_attention.py                     checks, on small sizes
    python 03_fast_scalar_attention.py --bench [--out DIR] a table beside other libraries
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

B0 = 32  # queries of a program
B1 = 32  # keys side by side: one per lane of a warp, so that each warp has its own queries
BLOCKS = 8  # blocks of B1 keys per turn of the loop
WARPS = 4
PROGRAMS = 48  # wanted per multiprocessor: many, so that when the last ones run few are idle
SMALLEST_PIECE = 1024  # keys that are worth a program


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


@triton.jit
def load_extremes(extremes_ptr):
    """The smallest and the largest key; NaN if a key is NaN."""
    low, high = tl.load(extremes_ptr), tl.load(extremes_ptr + 1)
    # The best score of some rows is -inf: they subtract 0, as -inf - -inf is NaN.
    low = tl.where(low == float("inf"), 0.0, low)
    high = tl.where(high == float("-inf"), 0.0, high)
    return low, high


@triton.jit
def load_queries(q_ptr, rows, N0, low, high):
    """2 log2(e) q, and for each query all bits 1 if it is negative, else 0."""
    q = tl.load(q_ptr + rows, mask=rows < N0, other=0.0)
    # 0 times an infinite key is NaN, and so is that whole row.
    zero = tl.where(0.5 * high - 0.5 * low == float("inf"), float("nan"), 0.0)
    q = tl.where(q == 0.0, zero, q)
    # 2.885390043 / 2 is log2(e): powers of two need no factor for each score.
    return 2.885390043 * q, q.to(tl.int32, bitcast=True) >> 31


@triton.jit
def exponents(q, negative, k, low, high):
    """log2 of the weights [B0, B1]: q times the distance of a key from the best one."""
    # Halves, as a distance itself can be above the largest float32; q has been doubled.
    from_high = 0.5 * k - 0.5 * high
    from_low = 0.5 * k - 0.5 * low
    # Choose by bits, in one instruction: a comparison for each query would need one more.
    from_high = from_high.to(tl.int32, bitcast=True)
    from_low = from_low.to(tl.int32, bitcast=True)
    either = (from_high ^ from_low)[None, :]
    distance = from_high[None, :] ^ (either & negative[:, None])
    return q[:, None] * distance.to(tl.float32, bitcast=True)


@triton.jit
def known_max_kernel(
    q_ptr, k_ptr, v_ptr, extremes_ptr, z_ptr, N0, T, B0: tl.constexpr, B1: tl.constexpr
):
    """Rung 2: the maximum is known, so both sums only grow; still a sum over lanes per block."""
    rows = tl.program_id(0).to(tl.int64) * B0 + tl.arange(0, B0)
    low, high = load_extremes(extremes_ptr)
    q, negative = load_queries(q_ptr, rows, N0, low, high)
    exp_sum = tl.zeros((B0,), tl.float32)
    z = tl.zeros((B0,), tl.float32)
    for start in range(0, T, B1):
        cols = start + tl.arange(0, B1)
        k = tl.load(k_ptr + cols, mask=cols < T, other=0.0)
        v = tl.load(v_ptr + cols, mask=cols < T, other=0.0)
        x = exponents(q, negative, k, low, high)
        weights = tl.exp2(tl.where(cols[None, :] < T, x, float("-inf")))
        exp_sum += tl.sum(weights, axis=1)
        z += tl.sum(weights * v[None, :], axis=1)
    # The best key has the weight 1. Rows without one, whose scores are all -inf, give 0.
    z = tl.where(exp_sum < 0.5, 0.0, z / tl.where(exp_sum < 0.5, 1.0, exp_sum))
    tl.store(z_ptr + rows, z, mask=rows < N0)


@triton.jit
def partial_sums_kernel(
    q_ptr, k_ptr, v_ptr, extremes_ptr, partial_ptr, N0, T, SIZE, SPLITS,
    B0: tl.constexpr, B1: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Rungs 3 and 4: both sums of B0 queries over SIZE keys."""
    rows = tl.program_id(0).to(tl.int64) * B0 + tl.arange(0, B0)
    low, high = load_extremes(extremes_ptr)
    q, negative = load_queries(q_ptr, rows, N0, low, high)
    exp_sum = tl.zeros((B0, B1), tl.float32)
    z = tl.zeros((B0, B1), tl.float32)
    first = tl.program_id(1) * SIZE
    last = tl.minimum(first + SIZE, T)
    whole = first + (last - first) // (B1 * BLOCKS) * (B1 * BLOCKS)
    # No key of these is past the end, and so they need no mask.
    for start in range(first, whole, B1 * BLOCKS):
        for block in tl.static_range(BLOCKS):
            cols = start + block * B1 + tl.arange(0, B1)
            k, v = tl.load(k_ptr + cols), tl.load(v_ptr + cols)
            x = exponents(q, negative, k, low, high)
            weights = tl.exp2(x)
            exp_sum += weights
            z += weights * v[None, :]
    for start in range(whole, last, B1):
        cols = start + tl.arange(0, B1)
        k = tl.load(k_ptr + cols, mask=cols < last, other=0.0)
        v = tl.load(v_ptr + cols, mask=cols < last, other=0.0)
        x = exponents(q, negative, k, low, high)
        weights = tl.exp2(tl.where(cols[None, :] < last, x, float("-inf")))
        exp_sum += weights
        z += weights * v[None, :]
    # All pieces' sums of weights come first, then all weighted sums.
    piece = tl.program_id(1).to(tl.int64)
    tl.store(partial_ptr + piece * N0 + rows, tl.sum(exp_sum, axis=1), mask=rows < N0)
    tl.store(partial_ptr + (SPLITS + piece) * N0 + rows, tl.sum(z, axis=1), mask=rows < N0)


@triton.jit
def merge_kernel(partial_ptr, z_ptr, N0, SPLITS, B0: tl.constexpr):
    """Add up the sums over all pieces: all are relative to the same maximum. Then divide."""
    rows = tl.program_id(0).to(tl.int64) * B0 + tl.arange(0, B0)
    exp_sum = tl.zeros((B0,), tl.float32)
    z = tl.zeros((B0,), tl.float32)
    at = partial_ptr + rows
    for _ in range(SPLITS):
        exp_sum += tl.load(at, mask=rows < N0, other=0.0)
        at += N0
    for _ in range(SPLITS):
        z += tl.load(at, mask=rows < N0, other=0.0)
        at += N0
    # The best key has the weight 1. Rows without one, whose scores are all -inf, give 0.
    z = tl.where(exp_sum < 0.5, 0.0, z / tl.where(exp_sum < 0.5, 1.0, exp_sum))
    tl.store(z_ptr + rows, z, mask=rows < N0)


def launch_puzzle(q, k, v, z):
    flashatt_kernel[(triton.cdiv(q.numel(), 64),)](q, k, v, z, q.numel(), k.numel(), 64, 32)


def launch_known_max(q, k, v, z):
    grid = (triton.cdiv(q.numel(), B0),)
    extremes = torch.stack(torch.aminmax(k))
    known_max_kernel[grid](q, k, v, extremes, z, q.numel(), k.numel(), B0, B1, num_warps=WARPS)


def choose_splits(N0, T):
    """Into how many pieces the keys go: programs for every multiprocessor, with enough to do."""
    multiprocessors = 1
    if DEVICE == "cuda":
        multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    wanted = triton.cdiv(PROGRAMS * multiprocessors, triton.cdiv(N0, B0))
    return max(1, min(wanted, T // SMALLEST_PIECE))


def launch_partial_sums(q, k, v, z, splits=None):
    N0, T = q.numel(), k.numel()
    splits = splits or choose_splits(N0, T)
    turn = B1 * BLOCKS
    size = triton.cdiv(triton.cdiv(T, splits), turn) * turn
    splits = triton.cdiv(T, size)
    extremes = torch.stack(torch.aminmax(k))
    partials = torch.empty(2 * splits * N0, device=q.device)
    partial_sums_kernel[(triton.cdiv(N0, B0), splits)](
        q, k, v, extremes, partials, N0, T, size, splits,
        B0, B1, BLOCKS, num_warps=WARPS,
    )  # fmt: skip
    merge_kernel[(triton.cdiv(N0, 256),)](partials, z, N0, splits, 256)


RUNGS = {
    "the puzzle's kernel": launch_puzzle,
    "the row maximum beforehand": launch_known_max,
    "sums that stay in lanes": lambda *x: launch_partial_sums(*x, splits=1),
    "the keys split over programs": launch_partial_sums,
}


def fast_flashatt(q, k, v, out=None):
    """Attention over scalars: q [N0], k [T], v [T], float32 -> z [N0]. Forward only.

    |q| up to 1e38. Without keys, or where infinite keys make all scores -inf, z is 0; else an
    infinite or NaN query gives NaN. out: a contiguous tensor like q. Raises TypeError for another
    dtype, ValueError for another shape or device, or if a tensor requires grad.
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
    if out is None:
        out = torch.empty(q.shape, device=q.device)
    like_q = (out.shape, out.dtype, out.device) == (q.shape, q.dtype, q.device)
    if not like_q or not out.is_contiguous():
        raise ValueError(
            f"out must be contiguous and like q: {tuple(q.shape)}, {q.dtype}, {q.device}; "
            f"got {tuple(out.shape)}, {out.dtype}, {out.device}, strides {out.stride()}"
        )
    if q.numel() == 0 or k.numel() == 0:
        return out.zero_()
    with torch.cuda.device_of(q):
        launch_partial_sums(q.contiguous(), k.contiguous(), v.contiguous(), out)
    return out


def exact_attention(q, k, v):
    """Reference, in float64."""
    q, k, v = q.double(), k.double(), v.double()
    return torch.softmax(q[:, None] * k[None, :], dim=1) @ v


def fast_attention_error(q, k, v, launch=None):
    """The largest error of a rung, or of fast_flashatt, in units of the largest |z|."""
    inputs = [x.to(DEVICE) for x in (q, k, v)]
    z = torch.full(q.shape, float("nan"), device=DEVICE)
    if launch is None:
        fast_flashatt(*inputs, out=z)
    else:
        launch(*inputs, z)
    want = exact_attention(q, k, v)
    return ((z.cpu() - want).abs().max() / want.abs().max()).item()


def puzzle_9_fast():
    torch.manual_seed(0)

    def right(*tensors, **options):
        return fast_attention_error(*tensors, **options) < 1e-5

    print("=== Puzzle 9, fast: every rung against float64, below 1e-5 of max |z| ===")
    q, k, v = torch.randn(100) * 3, torch.randn(700) * 3, torch.randn(700)
    for number, (name, launch) in enumerate(RUNGS.items(), 1):
        print(f"{number} {name}: right? {right(q, k, v, launch=launch)}")
    print(f"v = ones gives 1? {right(q, k, torch.ones(700))}")
    k, v = torch.randn(2500) * 3, torch.randn(2500)
    print(f"keys in {choose_splits(100, 2500)} pieces: right? {right(q, k, v)}")

    print("\n=== Puzzle 9, fast: what the puzzle's own input does not test ===")
    j = torch.arange(300.0)
    print(f"scores that rise: right? {right(torch.ones(1), j / 30, j)}")
    # The scores' spacing there is 1/2; the keys' is 2^-13, and only their differences count.
    q = torch.tensor([-2048.0, 2048.0])
    print(f"scores near -+4194304: right? {right(q, 2048 + j / 4096, j + 1)}")
    q = torch.tensor([0.0, 1e-38, -1e-38])
    print(f"keys up to 3e38: right? {right(q, 3e38 * torch.linspace(-1, 1, 300), j)}")
    print(f"scores up to 1e38: right? {right(torch.tensor([1e38, -1e38]), j / 299, j + 1)}")
    q = torch.tensor([1.0, float("nan"), 2.0]).to(DEVICE)
    z = fast_flashatt(q, j.to(DEVICE) / 30, j.to(DEVICE)).cpu()
    want = exact_attention(q.cpu(), j / 30, j).float()
    same = torch.allclose(z, want, rtol=1e-5, atol=0, equal_nan=True)
    print(f"a NaN query spoils its own row only? {same}")
    none = fast_flashatt(torch.ones(5, device=DEVICE), *torch.empty(2, 0, device=DEVICE))
    print(f"no keys: zeros? {none.tolist() == [0.0] * 5}")


BENCH_SIZES = (4096, 16384, 65536, 131072)


def bench_exponential_limit():
    """Exponentials per second of all multiprocessors: 16 per clock each."""
    gpu = torch.cuda.get_device_properties(0)
    khz = getattr(gpu, "clock_rate", 0) or 1_980_000  # an H200's
    units = gpu.multi_processor_count
    print(f"{units} multiprocessors x 16 x {khz / 1e6:.3f} GHz", file=sys.stderr)
    return units * 16 * khz * 1e3


def bench_scalar_sdpa(q, k, v):
    """scaled_dot_product_attention on bfloat16, D = 8, of which 7 columns are 0."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    padded = []
    for x in (q, k, v):
        wide = torch.zeros(1, 1, x.numel(), 8, device=x.device, dtype=torch.bfloat16)
        wide[0, 0, :, 0] = x
        padded.append(wide)

    def run():
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            z = torch.nn.functional.scaled_dot_product_attention(*padded, scale=1.0)
        return z[0, 0, :, 0]

    return run


def bench_scalar_cell(N, limit):
    """One row of the table: ours, its rate, and what the peers take and how wrong they are."""
    from harness.bench import median_ms

    q, k, v = (torch.randn(N, device=DEVICE) for _ in range(3))
    some = slice(0, None, N // 256)
    want = exact_attention(q[some], k, v)

    def error(z):
        return ((z[some].double() - want).abs().max() / want.abs().max()).item()

    z = torch.full_like(q, float("nan"))
    fast_flashatt(q, k, v, out=z)
    cell = {"queries = keys": N, "error": error(z)}
    if not (cell["error"] < 1e-5 and z.isfinite().all()):
        raise RuntimeError(f"wrong result: {N}, error {cell['error']}")
    cell["ms"] = median_ms(lambda: fast_flashatt(q, k, v, out=z))
    cell["T exp/s"] = N * N / cell["ms"] / 1e9
    cell["of limit"] = cell["T exp/s"] * 1e12 / limit
    peers = {
        "puzzle": lambda: launch_puzzle(q, k, v, z),
        "SDPA bf16": bench_scalar_sdpa(q, k, v),
    }
    if N <= 16384:
        peers["torch"] = lambda: torch.softmax(q[:, None] * k, dim=1) @ v
    for name, run in peers.items():
        z.fill_(float("nan"))
        try:
            got = run()
            cell[f"{name} error"] = error(z if got is None else got)
            if not cell[f"{name} error"] < (0.1 if "bf16" in name else 1e-4):
                raise ValueError("wrong result")
            cell[f"{name} / ours"] = median_ms(run) / cell["ms"]
        except Exception as problem:
            print(f"{name} refuses {N}: {type(problem).__name__}: {problem}", file=sys.stderr)
            cell[f"{name} / ours"] = float("nan")
    return cell


def bench_scalar_ladder(limit, N=65536):
    """Exponentials per second of every rung, for the docstring's table."""
    from harness.bench import median_ms

    q, k, v = (torch.randn(N, device=DEVICE) for _ in range(3))
    z = torch.empty_like(q)
    for number, (name, launch) in enumerate(RUNGS.items(), 1):
        ms = median_ms(lambda f=launch: f(q, k, v, z))
        rate = N * N / ms * 1e3
        print(f"{number} {name}: {rate / 1e12:.2f} T exp/s, {rate / limit:.2f} of the limit")


def bench_scalar_attention(out):
    """Print the table; write scalar_attention.csv and .png into out, or benchmarks/<gpu>."""
    from harness.bench import draw, results_folder, save_table

    folder = results_folder(out)
    limit = bench_exponential_limit()
    print(f"the exponential units' limit: {limit / 1e12:.2f} T exp/s")
    bench_scalar_ladder(limit)
    cells = (bench_scalar_cell(N, limit) for N in BENCH_SIZES)
    table = save_table(cells, folder / "scalar_attention.csv")

    def plot(axes):
        N, panel = table["queries = keys"], axes[0]
        panel.axhline(limit / 1e12, color="k", linestyle="--", label="exponential units")
        panel.plot(N, table["T exp/s"], "o-", label="fast_flashatt")
        for name in "SDPA bf16", "puzzle", "torch":
            panel.plot(N, table["T exp/s"] / table[f"{name} / ours"], ".-", label=name)
        panel.set(xscale="log", xlabel="queries = keys", ylabel="10^12 exponentials/s")
        panel.set_title(f"scalar attention, {table['GPU'][0]}")

    draw(folder / "scalar_attention.png", 1, plot, width=7)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Fast scalar attention: checks, or a table.")
    parser.add_argument(
        "--bench", action="store_true", help="measure, on a GPU; needs pandas, matplotlib"
    )
    parser.add_argument("--out", help="folder for the .csv and .png (default: benchmarks/<gpu>)")
    options = parser.parse_args()
    if options.bench:
        # Only --bench needs this repository beside the script.
        sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
        bench_scalar_attention(options.out)
    else:
        puzzle_9_fast()
