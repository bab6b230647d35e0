"""Section 21.3, yours to write: the gate of a mixture of experts, top-2 of E for each token.

Softmax over a token's E logits; the two largest probabilities, each divided by their sum, are w0
and w1 (w0 >= w1, float32), their experts idx0 and idx1 (int32), the lower index first among equals.

logits is [M, E], float32, E >= 2; row i begins at logits_ptr + i * stride_m. One program per token;
BLOCK_E is the power of two at or above E. The four outputs are [M].
Write the body of the kernel, then run this file: it says what is wrong first.
"""

import os
import sys
from pathlib import Path

import torch

# Without a GPU, Triton's interpreter runs the kernels; it must be chosen before triton is imported.
INTERPRET = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRET else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from harness.exercise import Exercise, blank, main
from harness.properties import GATING


@triton.jit
def moe_top2_gating_kernel(
    logits_ptr, weight0_ptr, weight1_ptr, idx0_ptr, idx1_ptr,
    M, E,
    stride_m,
    BLOCK_E: tl.constexpr,
):  # fmt: skip
    pass


def moe_top2_gating(logits):
    """Top-2 gating of logits [M, E], float32, E >= 2 -> (w0, w1, idx0, idx1), [M] each."""
    M, E = logits.shape
    # What the kernel does not write can be told.
    w0, w1 = (blank((M,), torch.float32, DEVICE) for _ in range(2))
    idx0, idx1 = (blank((M,), torch.int32, DEVICE) for _ in range(2))
    moe_top2_gating_kernel[(M,)](
        logits, w0, w1, idx0, idx1, M, E, logits.stride(0), BLOCK_E=triton.next_power_of_2(E)
    )
    return w0, w1, idx0, idx1


# What is checked, in this order.
PROPERTIES = [
    "every element of w0, w1, idx0, idx1 is written",
    "idx0 is the expert with the largest logit",
    "two distinct experts",
    "idx1 is the expert with the second largest logit",
    "the two weights sum to 1",
    "each weight is its expert's share",
    "of equal logits, the lowest index first",
    "E not a power of two: ids below E",
    "E not a power of two: the right ids",
    "large and very negative logits",
    "a probability that underflows to 0: still two distinct experts",
    "strides: rows that are part of wider ones",
]
EXERCISE = Exercise(
    file=__file__,
    kernel=moe_top2_gating_kernel,
    launcher=moe_top2_gating,
    device=DEVICE,
    table=GATING,
    properties=PROPERTIES,
    solution="chapter21/03_moe_gating.py",
    traps="chapter21/06_gating_traps.py",
)

if __name__ == "__main__":
    sys.exit(main(EXERCISE))
