"""Section 21.3, traps: how the gate of a mixture of experts goes wrong, beside the right one.

The kernel is 03's for any number K of experts per token. TRAP = 1 to 4 gets the line marked with
that number wrong, 0 none.
In the output: most wrong gates pass a check that looks sound. Their weights sum to 1, or equal the
right weights, or the input is one on which the wrong line does no harm. Traps 1 to 4 print such a
blind check or blind input, too: it says True of the wrong gate.
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
def topk_gating_traps_kernel(
    logits_ptr, weights_ptr, idx_ptr,
    E,
    stride_m,
    K: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
    TRAP: tl.constexpr,
):  # fmt: skip
    # One program per token. int64, as row * stride can pass 2^31.
    row = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, BLOCK_E)
    logits_ptrs = logits_ptr + row * stride_m + experts
    if TRAP == 4:
        # WRONG: lanes past E get the logit 0, which can be larger than every real one.
        logits = tl.load(logits_ptrs, mask=experts < E, other=0.0)
    else:
        logits = tl.load(logits_ptrs, mask=experts < E, other=float("-inf"))
    exps = tl.exp(logits - tl.max(logits, axis=0))
    probs = exps / tl.sum(exps, axis=0)

    # A row with a NaN ranks as zeros, as in 03.
    ranked = tl.where(probs == probs, probs, 0.0)
    if TRAP != 4:  # WRONG in trap 4: lanes past E stay in the race.
        ranked = tl.where(experts < E, ranked, float("-inf"))

    slots = tl.arange(0, BLOCK_K)
    weights = tl.zeros((BLOCK_K,), tl.float32)
    idx = tl.zeros((BLOCK_K,), tl.int32)
    for i in range(K):
        winner = tl.argmax(ranked, axis=0)  # of equal probabilities, the lowest expert
        weights = tl.where(slots == i, tl.max(ranked, axis=0), weights)
        idx = tl.where(slots == i, winner, idx)
        if TRAP == 3:
            # WRONG: the others' probabilities can be 0, and then the winner wins again.
            ranked = tl.where(experts == winner, 0.0, ranked)
        elif TRAP != 1:  # WRONG in trap 1: the winner is not taken out at all.
            ranked = tl.where(experts == winner, float("-inf"), ranked)

    if TRAP != 2:  # WRONG in trap 2: the raw probabilities are the weights.
        weights = weights / tl.sum(weights, axis=0)
    tl.store(weights_ptr + row * K + slots, weights, mask=slots < K)
    tl.store(idx_ptr + row * K + slots, idx, mask=slots < K)


def gate_with_trap(logits, TRAP=0, K=2):
    """Top-K gating of logits [M, E], float32, on the CPU -> (weights, idx), [M, K], on the CPU.

    Raises TypeError for another dtype, ValueError for another shape, K or trap.
    """
    if logits.ndim != 2 or not 1 <= K <= logits.shape[1]:
        raise ValueError(f"want logits [M, E] and K from 1 to E, got {tuple(logits.shape)} and {K}")
    if logits.dtype != torch.float32:
        raise TypeError(f"logits must be float32, got {logits.dtype}; use logits.float()")
    if TRAP not in range(5):
        raise ValueError(f"TRAP is 0 (none) to 4, got {TRAP}")
    M, E = logits.shape
    logits = logits.to(DEVICE).contiguous()
    weights = torch.empty(M, K, dtype=torch.float32, device=DEVICE)
    idx = torch.empty(M, K, dtype=torch.int32, device=DEVICE)
    topk_gating_traps_kernel[(M,)](
        logits, weights, idx,
        E,
        logits.stride(0),
        K, triton.next_power_of_2(E), triton.next_power_of_2(K),
        TRAP,
    )  # fmt: skip
    return weights.cpu(), idx.cpu().long()


def right_choice(idx, logits):
    """Are idx [M, K] different experts with the K largest probabilities, ties in any order?"""
    if idx.min() < 0 or idx.max() >= logits.shape[1]:
        return False
    probs = torch.softmax(logits, dim=-1)
    largest = torch.topk(probs, idx.shape[1]).values
    different = all(len(set(row)) == len(row) for row in idx.tolist())
    return different and torch.allclose(probs.gather(1, idx), largest, atol=1e-6)


def sums_to_1(weights):
    return torch.allclose(weights.sum(dim=1), torch.ones(len(weights)))


def mix(weights, idx, outputs):
    """The layer's output [M, D]; outputs [M, E, D] is what every expert makes of every token."""
    chosen = outputs[torch.arange(len(idx))[:, None], idx]
    return (weights[:, :, None] * chosen).sum(dim=1)


def six_tokens():
    """The logits of section 21.3, six tokens x and eight small experts, tanh(x @ w[e])."""
    torch.manual_seed(0)
    return torch.randn(6, 8), torch.randn(6, 4), torch.randn(8, 4, 4)


def trap_1_winner_stays():
    logits, _, _ = six_tokens()
    print("=== Trap 1: a second tl.max without masking the winner (self-check 4) ===")
    halves = torch.full((6, 2), 0.5)
    for name, trap in ("masked", 0), ("not masked", 1):
        weights, idx = gate_with_trap(logits, trap)
        print(f"{name}: top1 idx {idx[:, 0].tolist()}, top2 idx {idx[:, 1].tolist()}")
        print(f"{name}: the two largest of each token? {right_choice(idx, logits)}")
        print(f"{name}: every weight 0.5? {torch.allclose(weights, halves)}")
        print(f"{name}: blind check, w0+w1 == 1 for all rows? {sums_to_1(weights)}")


def trap_2_raw_weights():
    logits, x, w = six_tokens()
    outputs = torch.tanh(torch.einsum("md,edf->mef", x, w))
    # Renormalised, the weights are a softmax over the chosen logits alone: the reference.
    top, top_idx = torch.topk(logits, 2)
    want = mix(torch.softmax(top, dim=1), top_idx, outputs)
    print("\n=== Trap 2: raw probabilities as mixture weights (self-check 5) ===")
    print("factor on each token's output, eight small experts, relative to the reference:")
    for name, trap in ("renormalised", 0), ("raw", 2):
        weights, idx = gate_with_trap(logits, trap)
        got = mix(weights, idx, outputs)
        factor = got.norm(dim=1) / want.norm(dim=1)
        print(f"{name}: {' '.join(f'{f:.4f}' for f in factor.tolist())}")
        print(f"{name}: output is the reference? {torch.allclose(got, want, atol=1e-5)}")
        one_factor = torch.allclose(got / factor.mean(), want, atol=1e-5)
        print(f"{name}: the reference, but for one factor for all? {one_factor}")
        print(f"{name}: blind check, the two largest of each token? {right_choice(idx, logits)}")


def trap_3_winner_to_0():
    # e^-200 is 0 in float32: the probabilities are 1, 0, 0, 0.
    logits = torch.tensor([[200.0, 0.0, -1.0, -2.0]])
    want, _ = gate_with_trap(logits, K=3)
    six, _, _ = six_tokens()
    print("\n=== Trap 3: the winner 'removed' by writing 0 instead of -inf ===")
    for name, trap in ("-inf", 0), ("0", 3):
        weights, idx = gate_with_trap(logits, trap, K=3)
        print(f"{name}: ids of [200, 0, -1, -2], k = 3: {idx[0].tolist()}")
        print(f"{name}: the three largest, each once? {right_choice(idx, logits)}")
        print(f"{name}: blind check, weights right? {torch.allclose(weights, want)}")
        _, idx = gate_with_trap(six, trap)
        right = right_choice(idx, six)
        print(f"{name}: blind input, the six tokens: the two largest of each? {right}")


def trap_4_padding_wins():
    logits = torch.tensor([[-3.0, -2.0, -1.0, -4.0, -5.0]])
    eight, _, _ = six_tokens()
    print("\n=== Trap 4: E = 5 experts in a block of 8, padding read as 0 and not masked ===")
    for name, trap in ("-inf, masked", 0), ("0, not masked", 4):
        weights, idx = gate_with_trap(logits, trap)
        w0, w1 = weights[0].tolist()
        print(f"{name}: ids of [-3, -2, -1, -4, -5]: {idx[0].tolist()}, weights {w0:.4f} {w1:.4f}")
        print(f"{name}: ids below E? {bool((idx < 5).all())}")
        print(f"{name}: blind check, w0+w1 == 1? {sums_to_1(weights)}")
        _, idx = gate_with_trap(eight, trap)
        print(f"{name}: blind input, E = 8: the two largest of each? {right_choice(idx, eight)}")


def trap_5_ties():
    print("\n=== Trap 5: among equal probabilities every choice is right ===")
    logits = torch.zeros(1, 4)
    weights, idx = gate_with_trap(logits)
    top, top_idx = torch.topk(torch.softmax(logits, dim=1), 2)
    print(f"four equal logits, the kernel takes the lowest: {idx[0].tolist()}")
    print(f"ids equal to torch.topk's? {torch.equal(idx, top_idx)}")
    close = torch.allclose(weights, top / top.sum())
    print(f"weights equal to torch.topk's, renormalised? {close}")
    print("what to compare: ids all different, their probabilities the largest ones")
    print(f"kernel right? {right_choice(idx, logits)}")
    print(f"torch.topk right? {right_choice(top_idx, logits)}")

    logits = torch.tensor([[3.0, 2.0, 3.0, 2.0, 1.0, 1.0]])
    _, idx = gate_with_trap(logits, K=3)
    print(f"[3, 2, 3, 2, 1, 1], k = 3: {idx[0].tolist()} right? {right_choice(idx, logits)}")
    for ids in [2, 0, 3], [0, 2, 4], [0, 0, 1]:
        print(f"and {ids}? {right_choice(torch.tensor([ids]), logits)}")


def trap_6_gate_is_not_a_layer():
    logits, x, w = six_tokens()
    weights, idx = gate_with_trap(logits)
    chosen = idx.flatten()
    counts = torch.bincount(chosen, minlength=8)
    print("\n=== Trap 6: where the kernel ends, and what a whole layer still needs ===")
    print(f"tokens per expert: {counts.tolist()}, together {counts.sum().item()} = 6 tokens x 2")

    # Dispatch: each expert's tokens side by side; a stable sort keeps their order.
    order = chosen.argsort(stable=True)
    tokens = order // 2
    print(f"dispatch: tokens regrouped by expert: {tokens.tolist()}")
    print(f"dispatch: each expert's first row: {(counts.cumsum(0) - counts).tolist()}")

    # One GEMM per expert, of as many rows as it has tokens.
    groups = x[tokens].split(counts.tolist())
    outputs = torch.cat([torch.tanh(group @ w_e) for group, w_e in zip(groups, w, strict=True)])
    busy = (counts > 0).sum().item()
    tiles = ((counts + 15) // 16).sum().item()
    print(f"expert GEMMs: {busy} of 8 experts have work, {tiles * 16} rows in tiles of 16 for 12")

    # Combine: back in the tokens' order, weighted; a token's two rows add up.
    rows = outputs * weights.flatten()[order, None]
    got = torch.zeros(6, 4).index_add(0, tokens, rows)
    want = mix(weights, idx, torch.tanh(torch.einsum("md,edf->mef", x, w)))
    print(f"combine: equal to every expert on every token? {torch.allclose(got, want, atol=1e-5)}")

    dropped = (counts - 2).clamp(min=0).sum().item()
    gpus = counts.view(2, 4).sum(dim=1).tolist()
    most, mean = counts.max().item(), counts.float().mean().item()
    print(f"balance: the busiest expert has {most} rows, the mean is {mean}")
    print(f"balance: with room for 2 rows per expert, {dropped} of 12 are dropped")
    print(f"balance: four experts on each of two GPUs: {gpus[0]} and {gpus[1]} rows")


def gating_traps():
    trap_1_winner_stays()
    trap_2_raw_weights()
    trap_3_winner_to_0()
    trap_4_padding_wins()
    trap_5_ties()
    trap_6_gate_is_not_a_layer()


if __name__ == "__main__":
    gating_traps()
