"""Section 21.3: the gate of a mixture of experts, top-2 of E experts for each token.

Softmax over a token's E logits, the two largest probabilities, each divided by their sum. One
program per token; E fits one block.
In the output: the ids and weights agree with torch.topk; without the last division the weights of a
token sum to anything from 0.36 to 0.72, another factor for every token.
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
def moe_top2_gating_kernel(
    logits_ptr, weight0_ptr, weight1_ptr, idx0_ptr, idx1_ptr,
    M, E,
    stride_m,
    BLOCK_E: tl.constexpr,
):  # fmt: skip
    # One program per token. int64, as row * stride can pass 2^31.
    row = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, BLOCK_E)
    # The row fits one block, so no running maximum is needed. Lanes past E read -inf: e^-inf = 0.
    logits = tl.load(logits_ptr + row * stride_m + experts, mask=experts < E, other=float("-inf"))
    exps = tl.exp(logits - tl.max(logits, axis=0))
    probs = exps / tl.sum(exps, axis=0)

    # A row with a NaN ranks as zeros: the ids stay distinct and below E, and 0 / 0 below keeps its
    # weights NaN. Lanes past E cannot win.
    ranked = tl.where(probs == probs, probs, 0.0)
    ranked = tl.where(experts < E, ranked, float("-inf"))
    weight0 = tl.max(ranked, axis=0)
    idx0 = tl.argmax(ranked, axis=0)  # of equal probabilities, the lowest expert
    # Take the winner out with -inf: a probability can be 0, and 0 would leave it in the race.
    ranked = tl.where(experts == idx0, float("-inf"), ranked)
    weight1 = tl.max(ranked, axis=0)
    idx1 = tl.argmax(ranked, axis=0)

    # Renormalise: the two weights mix two experts' outputs, so they must sum to 1.
    total = weight0 + weight1
    inside = row < M
    tl.store(weight0_ptr + row, weight0 / total, mask=inside)
    tl.store(weight1_ptr + row, weight1 / total, mask=inside)
    tl.store(idx0_ptr + row, idx0, mask=inside)
    tl.store(idx1_ptr + row, idx1, mask=inside)


def moe_top2_gating(logits):
    """Top-2 gating of logits [M, E], float32, E >= 2 -> (w0, w1, idx0, idx1), [M] each.

    w0 >= w1 are the two largest probabilities, renormalised to sum to 1, float32; idx0, idx1 are
    their experts, int32, the lower index first among equals. Forward only. Raises TypeError for
    another dtype, ValueError for another shape or device.
    """
    if logits.ndim != 2 or logits.shape[1] < 2:
        raise ValueError(f"logits must be [M, E] with E >= 2 experts, got {tuple(logits.shape)}")
    if logits.dtype != torch.float32:
        raise TypeError(f"logits must be float32, got {logits.dtype}; use logits.float()")
    if logits.requires_grad:
        raise ValueError("forward only, but logits require grad; use logits.detach()")
    if logits.device.type != DEVICE:
        raise ValueError(f"logits are on {logits.device}, not {DEVICE}; use .to({DEVICE!r})")
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    M, E = logits.shape
    w0, w1 = (torch.empty(M, dtype=torch.float32, device=DEVICE) for _ in range(2))
    idx0, idx1 = (torch.empty(M, dtype=torch.int32, device=DEVICE) for _ in range(2))
    moe_top2_gating_kernel[(M,)](
        logits, w0, w1, idx0, idx1, M, E, logits.stride(0), BLOCK_E=triton.next_power_of_2(E)
    )
    return w0, w1, idx0, idx1


def topk_gating(logits):
    """Reference: softmax, torch.topk, renormalise; also the sums before renormalising."""
    raw, idx = torch.topk(torch.softmax(logits, dim=-1), 2)
    raw_sum = raw.sum(dim=-1)
    return raw / raw_sum[:, None], idx, raw_sum


def section_21_3():
    torch.manual_seed(0)
    logits = torch.randn(6, 8)
    w0, w1, idx0, idx1 = (x.cpu() for x in moe_top2_gating(logits.to(DEVICE)))
    want, want_idx, raw_sum = topk_gating(logits)
    same = torch.equal(torch.stack([idx0, idx1], dim=1).long(), want_idx)
    close = torch.allclose(torch.stack([w0, w1], dim=1), want, atol=1e-5)
    print("=== Section 21.3: top-2 MoE gating vs. torch.topk ===")
    for name, got, oracle in ("top1", idx0, want_idx[:, 0]), ("top2", idx1, want_idx[:, 1]):
        print(f"kernel {name} idx: {got.tolist()}  oracle {name} idx: {oracle.tolist()}")
    print(f"indices match torch.topk? {same}")
    print(f"weights allclose to oracle? {close}")
    print(f"w0+w1 == 1 for all rows? {torch.allclose(w0 + w1, torch.ones(6))}")

    print("\n=== Section 21.3: forgetting to renormalize ===")
    print(f"raw (non-renormalized) top-2 weight sums per row: {raw_sum}")
    mean = raw_sum.mean().item()
    print(f"mean raw sum (should be 1.0 if renormalized; isn't, here): {mean}")


if __name__ == "__main__":
    section_21_3()
