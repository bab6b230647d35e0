"""Section 21.2, yours to write: causal flash attention. Row i sees keys 0 to i only.

    out = softmax(q k^T * scale, keys past the diagonal left out) v

q and out are [M, D], k and v [N, D], scale = 1 / sqrt(D). M and N may differ: row 0 sees key 0.
Program p owns queries p * BLOCK_M to p * BLOCK_M + BLOCK_M - 1 and walks over the keys in blocks of
BLOCK_N; M, N and D need be no multiple of anything. Element [i, d] of q lies at
q_ptr + i * stride_qm + d * stride_qd, and so on. Keep per query the running maximum m_i, the
running sum l_i and the unnormalised output acc; divide once, at the end. No key gives 0.
In tl.dot write input_precision="ieee": a GPU cuts float32 to TF32 otherwise.
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
from harness.exercise import Exercise, blank_like, main
from harness.properties import CAUSAL_ATTENTION


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
    pass


def causal_flash_attention(q, k, v, BLOCK_M=16, BLOCK_N=16):
    """Attention in which row i sees only keys 0..i: q [M, D], k and v [N, D] -> [M, D]."""
    (M, D), N = q.shape, k.shape[0]
    out = blank_like(q)  # what the kernel does not write can be told
    # A GPU's tl.dot takes no tile under 16, so a narrower head is padded: BLOCK_D >= D.
    BLOCK_D = max(16, triton.next_power_of_2(D))
    flash_attn_causal_kernel[(triton.cdiv(M, BLOCK_M),)](
        q, k, v, out,
        M, N, D,
        *q.stride(), *k.stride(), *v.stride(), *out.stride(),
        D**-0.5,
        BLOCK_M, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    return out


# What is checked, in this order.
PROPERTIES = [
    "every element of out is written",
    "keys past the diagonal are ignored",
    "row 0 sees itself",
    "v = ones gives ones",
    "one block: the weighted mean of v",
    "D narrower than the tile",
    "N not a multiple of the block: a key past the end gets no weight",
    "N not a multiple of the block: NaN behind k and v is not read",
    "M not a multiple of the block: nothing is written past out",
    "two blocks of keys: both count",
    "a maximum that rises rescales l_i and acc",
    "M and N differ: aligned top left",
    "strides: q, k and v are not contiguous",
    "large scores",
    "very negative scores",
    "a first block of keys whose score is -inf",
    "no key at all gives 0",
]
EXERCISE = Exercise(
    file=__file__,
    kernel=flash_attn_causal_kernel,
    launcher=causal_flash_attention,
    device=DEVICE,
    table=CAUSAL_ATTENTION,
    properties=PROPERTIES,
    solution="chapter21/02_causal_flash_attention.py",
    traps="chapter21/05_attention_traps.py",
)

if __name__ == "__main__":
    sys.exit(main(EXERCISE))
