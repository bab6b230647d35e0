"""Puzzle 8, yours to write: softmax of a long row in two passes, maximum and sum in one loop.

From m_0 = -inf, d_0 = 0, with j over blocks of columns:

    m_j = max(m_(j-1), x_j)
    d_j = d_(j-1) * e^(m_(j-1) - m_j) + e^(x_j - m_j)

and in a second loop z = e^(x - m) / d.

x and z are [N0, T], float32, row i at x_ptr + i * T. Program p owns rows p * B0 to p * B0 + B0 - 1
and walks over their T columns in blocks of B1; neither N0 nor T need be a multiple. N1 is unused.
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
from harness.properties import SOFTMAX


@triton.jit
def exp_approx(x):
    """e^x as 2^(log2(e) x): the GPU's exponential unit computes powers of two."""
    return tl.exp2(1.44269504 * x)


@triton.jit
def softmax_kernel(x_ptr, z_ptr, N0, N1, T, B0: tl.constexpr, B1: tl.constexpr):
    pass


def softmax(x, B0=1, B1=32):
    """Softmax of each row of x [N0, T], float32; B0, B1 are powers of two."""
    x = x.contiguous()
    z = blank_like(x)  # what the kernel does not write can be told
    N0, T = x.shape
    softmax_kernel[(triton.cdiv(N0, B0),)](x, z, N0, B1, T, B0, B1)
    return z


# What is checked, in this order.
PROPERTIES = [
    "every element of z is written",
    "every row sums to 1",
    "relative error below 1e-5",
    "two blocks: both count in the sum",
    "a maximum that rises rescales the sum",
    "T not a multiple of B1: the tail adds nothing",
    "T not a multiple of B1: nothing is written past z",
    "several rows per program",
    "N0 not a multiple of B0: no row past the last is written",
    "large values",
    "very negative values",
    "a first block of nothing but -inf",
]
EXERCISE = Exercise(
    file=__file__,
    kernel=softmax_kernel,
    launcher=softmax,
    device=DEVICE,
    table=SOFTMAX,
    properties=PROPERTIES,
    solution="chapter08_softmax/02_online_softmax.py",
    traps="chapter08_softmax/03_softmax_traps.py",
)

if __name__ == "__main__":
    sys.exit(main(EXERCISE))
