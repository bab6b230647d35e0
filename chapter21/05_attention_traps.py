"""Chapter 21, attention: seven traps, each run beside the right way.

The kernel is 02_causal_flash_attention.py's, for contiguous tensors. TRAP = 0 is right; every other
number changes the lines that say so, in the trap of that number.
In the output: what gives each trap away, and which input hides it. Traps 2 and 3 are no mistakes
in the kernel, trap 6 is one that only a GPU makes, trap 7 one that only a compiler notices.
"""

import os
import subprocess
import sys

import torch

# Without a GPU, Triton's interpreter runs the kernels; it must be chosen before triton is imported.
INTERPRET = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRET else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

import triton
import triton.language as tl


@triton.jit
def attn_trap_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, tiles_ptr,
    M, N, D,
    scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    TRAP: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D).to(tl.int64)
    q_inside = (rows[:, None] < M) & (dims[None, :] < D)
    q = tl.load(q_ptr + rows[:, None] * D + dims[None, :], mask=q_inside, other=0.0)

    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    tiles = 0
    end = tl.minimum(N, (tl.program_id(0) + 1) * BLOCK_M)
    if TRAP == 2 or TRAP == 3 or TRAP == 5:
        end = N  # Trap 3: also visits the tiles that are wholly masked. 2 and 5 need them.
    for start in range(0, end, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N).to(tl.int64)
        inside = (cols[:, None] < N) & (dims[None, :] < D)
        k = tl.load(k_ptr + cols[:, None] * D + dims[None, :], mask=inside, other=0.0)
        v = tl.load(v_ptr + cols[:, None] * D + dims[None, :], mask=inside, other=0.0)
        tiles += 1

        qk = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        visible = rows[:, None] >= cols[None, :]
        if TRAP == 2:
            visible = rows[:, None] >= 0  # Trap 2: another task, each row sees every key.
        if TRAP == 4:
            visible = rows[:, None] > cols[None, :]  # WRONG: a row does not see its own key.
        if TRAP == 5:
            visible = rows[:, None] + N - M >= cols[None, :]  # WRONG here: last row at last key.
        qk = tl.where(visible & (cols[None, :] < N), qk, float("-inf"))

        m_new = tl.maximum(m_i, tl.max(qk, axis=1))
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp(qk - shift[:, None])
        alpha = tl.exp(m_i - shift)
        l_i = l_i * alpha + tl.sum(p, axis=1)
        if TRAP != 1:  # WRONG if left out: acc stays relative to the old maximum.
            acc = acc * alpha[:, None]
        acc = acc + tl.dot(p, v, input_precision="ieee")
        m_i = m_new

    acc = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
    tl.store(out_ptr + rows[:, None] * D + dims[None, :], acc, mask=q_inside)
    tl.store(tiles_ptr + tl.program_id(0), tiles)


def run_attention(q, k, v, TRAP=0):
    """Causal attention, or what TRAP makes of it -> (out [M, D], number of k, v tiles loaded)."""
    q, k, v = (x.to(DEVICE) for x in (q, k, v))
    (M, D), N = q.shape, k.shape[0]
    blocks = triton.cdiv(M, 16)
    out, tiles = torch.empty_like(q), torch.empty(blocks, dtype=torch.int32, device=DEVICE)
    attn_trap_kernel[(blocks,)](
        q, k, v, out, tiles, M, N, D, D**-0.5, 16, 16, max(16, triton.next_power_of_2(D)), TRAP
    )
    return out.cpu(), tiles.sum().item()


def draw_inputs(M, N, D=8):
    """q [M, D], k and v [N, D]: the draws of 21.1 for (17, 23), of 21.2 for (20, 20)."""
    torch.manual_seed(0)
    return torch.randn(M, D), torch.randn(N, D), torch.randn(N, D)


def masked_attention(q, k, v, visible):
    """Reference: the whole matrix of scores, -inf where visible [M, N] is False."""
    scores = (q @ k.T * q.shape[1] ** -0.5).masked_fill(~visible, float("-inf"))
    return torch.softmax(scores, dim=-1) @ v


def seen_keys(M, N, diagonal=0):
    """Which keys a row sees: True up to and including the diagonal."""
    return torch.ones(M, N, dtype=torch.bool).tril(diagonal)


def close(out, want):
    """The chapter's check."""
    return torch.allclose(out, want, atol=1e-4)


def alpha_forgets_acc():
    print("=== Trap 1: alpha rescales l_i but not acc ===")
    q, k, v = draw_inputs(20, 20)
    want = masked_attention(q, k, v, seen_keys(20, 20))
    right, wrong = run_attention(q, k, v)[0], run_attention(q, k, v, TRAP=1)[0]
    print(f"right: allclose to causal oracle? {close(right, want)}")
    print(f"wrong: allclose to causal oracle? {close(wrong, want)}")
    print(f"wrong: max abs diff: {(wrong - want).abs().max().item()}")
    # With v = ones a row is the sum of its weights.
    ones = torch.ones_like(v)
    right, wrong = (run_attention(q, k, ones, TRAP)[0][:, 0] for TRAP in (0, 1))
    for name, out in (("right", right), ("wrong", wrong)):
        print(f"v = ones, rows 16 to 19, {name}: " + " ".join(f"{x:.4f}" for x in out[16:]))
    # In a row's first key block there is nothing to rescale yet.
    first = close(wrong[:16], ones[:16, 0])
    print(f"rows 0 to 15, which meet one key block: does wrong give 1 there? {first}")


def right_kernel_wrong_task():
    print("\n=== Trap 2: a correct kernel on the wrong task ===")
    q, k, v = draw_inputs(20, 20)
    want_causal = masked_attention(q, k, v, seen_keys(20, 20))
    want_full = masked_attention(q, k, v, torch.ones(20, 20, dtype=torch.bool))
    # A wrong kernel agrees with no oracle.
    names = {0: "causal kernel", 2: "non-causal kernel", 1: "kernel of trap 1"}
    for TRAP, name in names.items():
        out = run_attention(q, k, v, TRAP)[0]
        print(f"{name}: agrees with CAUSAL oracle? {close(out, want_causal)}")
        print(f"{name}: agrees with NON-causal oracle? {close(out, want_full)}")
        if TRAP == 2:
            off = (out - want_causal).abs().max().item()
            print(f"{name}: max abs diff vs causal oracle: {off}")


def skipping_changes_no_bit():
    print("\n=== Trap 3: key blocks past the diagonal, skipped or not ===")
    print("query block at row 8, tiles of 4 x 4, keys 0..15 (x: seen, .: masked):")
    seen = seen_keys(16, 16)[8:12]
    for row in range(4):
        marks = [" ".join(".x"[int(s)] for s in seen[row, at : at + 4]) for at in (0, 4, 8, 12)]
        print(f"row {row + 8:2d}   | " + " | ".join(f"{m:^9}" for m in marks) + " |")
    kinds = []
    for tile in seen.split(4, dim=1):
        kinds.append("ALL VALID" if tile.all() else "DIAGONAL" if tile.any() else "SKIPPED")
    print("           " + "   ".join(f"{kind:^9}" for kind in kinds))

    q, k, v = draw_inputs(64, 64)
    skipped, loaded = run_attention(q, k, v)
    visited, loaded_all = run_attention(q, k, v, TRAP=3)
    print(f"M = N = 64, tiles of 16 x 16: loaded without the skip: {loaded_all}, with it: {loaded}")
    print(f"outputs equal bit for bit? {torch.equal(skipped, visited)}")
    for M in (16, 64, 256, 1024, 4096):
        blocks = M // 16
        past = blocks * (blocks - 1) // 2
        print(f"M = N = {M}: {past} of {blocks**2} tiles skipped, share {past / blocks**2:.4f}")


def diagonal_without_its_own_key():
    print("\n=== Trap 4: > for >= on the diagonal ===")
    q, k, v = draw_inputs(20, 20)
    want = masked_attention(q, k, v, seen_keys(20, 20))
    for name, TRAP in (("right", 0), ("wrong", 4)):
        out = run_attention(q, k, v, TRAP)[0]
        rows = sum(close(out[i], want[i]) for i in range(20))
        print(f"{name}: row 0 is v[0]? {close(out[0], v[0])}")
        print(f"{name}: rows that agree with the causal oracle: {rows} of 20")
    print(f"wrong: row 0 saw nothing and is 0? {not out[0].any()}")
    print(f"wrong: row 1 is v[0]? {close(out[1], v[0])}")
    # The kernel divides by 1 where l_i is 0. A plain softmax divides 0 by 0.
    plain = masked_attention(q, k, v, seen_keys(20, 20, diagonal=-1))
    print(f"the same mask in PyTorch: row 0 is NaN? {plain[0].isnan().all().item()}")


def aligned_top_left_or_bottom_right():
    print("\n=== Trap 5: M != N, aligned top left or bottom right ===")
    print("M = 3, N = 5     top left      bottom right")
    for row in range(3):
        marks = [" ".join(".x"[int(s)] for s in seen_keys(3, 5, d)[row]) for d in (0, 2)]
        print(f"row {row}            {marks[0]}     {marks[1]}")

    M, N = 17, 23
    q, k, v = draw_inputs(M, N)
    top_left = masked_attention(q, k, v, seen_keys(M, N))
    bottom_right = masked_attention(q, k, v, seen_keys(M, N, diagonal=N - M))
    for name, TRAP in (("this chapter", 0), ("TRAP = 5", 5)):
        out = run_attention(q, k, v, TRAP)[0]
        print(f"M = 17, N = 23, {name}: top left? {close(out, top_left)}")
        print(f"M = 17, N = 23, {name}: bottom right? {close(out, bottom_right)}")
    sdpa = torch.nn.functional.scaled_dot_product_attention
    out = sdpa(q[None], k[None], v[None], is_causal=True)[0]
    print(f"M = 17, N = 23, PyTorch's is_causal: top left? {close(out, top_left)}")
    print(f"max abs diff between the two: {(top_left - bottom_right).abs().max().item()}")

    q, k, v = draw_inputs(20, 20)
    same = close(run_attention(q, k, v)[0], run_attention(q, k, v, TRAP=5)[0])
    print(f"M = N = 20: do the two agree? {same}")


def keep_10_bits(x, to_nearest=False):
    """x as TF32: of float32's 23 mantissa bits the last 13 are cut off, or rounded away."""
    bits = x.float().view(torch.int32) + (1 << 12 if to_nearest else 0)
    return (bits & ~0x1FFF).view(torch.float32).double()


def float64_attention(q, k, v, operand=lambda x: x):
    """Attention in float64, where each product sees its two operands through operand()."""
    q, k, v = q.double(), k.double(), v.double()
    qk = operand(q) @ operand(k).T * q.shape[1] ** -0.5
    p = torch.exp(qk - qk.max(dim=1, keepdim=True).values)
    return operand(p) @ operand(v) / p.sum(dim=1, keepdim=True)


def operands_cut_to_tf32():
    print("\n=== Trap 6: TF32, tl.dot's default for float32 on a GPU, imitated in PyTorch ===")
    q, k, v = draw_inputs(17, 23)
    # In float64 nothing but the cut shows, and it comes out the same on every machine.
    want = float64_attention(q, k, v)
    out = masked_attention(q, k, v, torch.ones(17, 23, dtype=torch.bool)).double()
    print(f"full float32, in PyTorch: allclose? {close(out, want)}")
    out = run_attention(q, k, v, TRAP=2)[0].double()
    print(f"full float32, in the kernel ('ieee'): allclose? {close(out, want)}")
    for name, to_nearest in (("cut", False), ("rounded", True)):
        out = float64_attention(q, k, v, lambda x, r=to_nearest: keep_10_bits(x, r))
        error = (out - want).abs().max().item()
        print(f"operands {name} to 10 mantissa bits: allclose? {close(out, want)}")
        times = f"{error / 1e-4:.1f} times atol"
        print(f"operands {name} to 10 mantissa bits: max abs diff: {error:.3e}, {times}")


@triton.jit
def add_tiles_until(x_ptr, out_ptr, N: tl.constexpr, END: tl.constexpr, CONTINUE: tl.constexpr):
    total = tl.full((16,), 0.0, tl.float32)
    for start in range(0, N if CONTINUE else END, 16):
        if CONTINUE:
            if start >= END:
                continue  # WRONG: Triton's language has no continue; bound the loop instead.
        total += tl.load(x_ptr + start + tl.arange(0, 16))
    tl.store(out_ptr + tl.arange(0, 16), total)


@triton.jit
def two_dots(x_ptr, out_ptr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    rows, cols, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    q = tl.load(x_ptr + rows[:, None] * BLOCK_D + dims[None, :])
    kv = tl.load(x_ptr + cols[:, None] * BLOCK_D + dims[None, :])
    # WRONG with tiles of 4 x 4 x 8: tl.dot sums over 8 numbers here and over 4 below. A GPU wants
    # 16 or more (from Triton 3.8 on, 8 for float32).
    qk = tl.dot(q, tl.trans(kv), input_precision="ieee")
    out = tl.dot(qk, kv, input_precision="ieee")
    tl.store(out_ptr + rows[:, None] * BLOCK_D + dims[None, :], out)


def interpret_and_compile():
    """For a process that imported triton for compiling: do both with the functions above."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, CompilationError
    from triton.runtime.interpreter import InterpretedFunction

    torch.manual_seed(0)
    long, small, large = torch.randn(64), torch.randn(4, 8), torch.randn(16, 16)
    prefix = long[:48].view(3, 16).sum(dim=0)
    bound, dot = (f.fn for f in (add_tiles_until, two_dots))
    cases = {
        "continue": (bound, long, prefix, {"N": 64, "END": 48, "CONTINUE": True}),
        "bounded loop": (bound, long, prefix, {"N": 64, "END": 48, "CONTINUE": False}),
        "tl.dot on 4 x 4 x 8": (
            dot, small, small @ small.T @ small, {"BLOCK_M": 4, "BLOCK_N": 4, "BLOCK_D": 8}),
        "tl.dot on 16 x 16 x 16": (
            dot, large, large @ large.T @ large, {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_D": 16}),
    }  # fmt: skip
    compiles = {}
    for name, (function, _, _, constants) in cases.items():
        signature = {"x_ptr": "*fp32", "out_ptr": "*fp32"} | dict.fromkeys(constants, "constexpr")
        source = ASTSource(triton.JITFunction(function), signature, constants)
        try:
            triton.compile(source, target=GPUTarget("cuda", 90, 32))
            compiles[name] = True
        except CompilationError:
            compiles[name] = False
    # Only now, as the interpreter patches triton.language.
    for name, (function, x, want, constants) in cases.items():
        out = torch.empty_like(want)
        InterpretedFunction(function)[(1,)](x, out, **constants)
        print(f"{name}: right in the interpreter? {close(out, want)}")
        print(f"{name}: compiles for sm_90? {compiles[name]}")


def what_only_a_compiler_refuses():
    print("\n=== Trap 7: the interpreter accepts it, the compiler refuses it ===")
    # A process of its own, as whether kernels are compiled is settled when triton is imported. It
    # needs no GPU. This file asks for the interpreter where there is none, so triton comes first.
    code = "import runpy, sys, triton; runpy.run_path(sys.argv[1])['interpret_and_compile']()"
    done = subprocess.run(
        [sys.executable, "-c", code, __file__],
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    print(done.stdout, end="")


def attention_traps():
    alpha_forgets_acc()
    right_kernel_wrong_task()
    skipping_changes_no_bit()
    diagonal_without_its_own_key()
    aligned_top_left_or_bottom_right()
    operands_cut_to_tf32()
    what_only_a_compiler_refuses()


if __name__ == "__main__":
    attention_traps()
