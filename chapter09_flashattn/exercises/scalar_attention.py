"""Puzzle 9, yours to write: attention over scalars in one loop over the keys.

    z_i = sum_j softmax_j(q_i * k_j) * v_j        q and z [N0], k and v [T], float32

Program p owns queries p * B0 to p * B0 + B0 - 1 and walks over the T keys in blocks of B1; neither
N0 nor T need be a multiple. Keep three values per query: the running maximum, the running sum of
e^(score - maximum), and the same sum weighted with v. Divide once, at the end. No key gives 0.
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
from harness.properties import SCALAR


@triton.jit
def exp_approx(x):
    """e^x as 2^(log2(e) x): the GPU's exponential unit computes powers of two."""
    return tl.exp2(1.44269504 * x)


@triton.jit
def flashatt_kernel(q_ptr, k_ptr, v_ptr, z_ptr, N0, T, B0: tl.constexpr, B1: tl.constexpr):
    pass


def flashatt(q, k, v, B0=64, B1=32):
    """Attention over scalars: q [N0], k [T], v [T], float32 -> z [N0]; B0, B1 are powers of two."""
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    z = blank_like(q)  # what the kernel does not write can be told
    N0, T = q.numel(), k.numel()
    flashatt_kernel[(triton.cdiv(N0, B0),)](q, k, v, z, N0, T, B0, B1)
    return z


# What is checked, in this order.
PROPERTIES = [
    "every element of z is written",
    "v = ones gives 1",
    "one block of keys: the weighted mean of v",
    "two blocks of keys: both count",
    "a maximum that rises rescales both sums",
    "T not a multiple of B1: a key past the end gets no weight",
    "N0 not a multiple of B0: nothing is written past z",
    "large scores",
    "very negative scores",
    "a first block of keys whose score is -inf",
    "no key at all gives 0",
]
EXERCISE = Exercise(
    file=__file__,
    kernel=flashatt_kernel,
    launcher=flashatt,
    device=DEVICE,
    table=SCALAR,
    properties=PROPERTIES,
    solution="chapter09_flashattn/01_scalar_flash_attention.py",
    traps="chapter09_flashattn/02_scalar_attention_traps.py",
)

if __name__ == "__main__":
    sys.exit(main(EXERCISE))
