"""What must hold of every kernel for any input, tried on inputs that hypothesis makes up.

The profile is bounded and derandomised: every run tries the same examples.
"""

import torch
from conftest import randn
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.properties import attention_reference

settings.register_profile("bounded", max_examples=25, derandomize=True, deadline=None)
settings.load_profile("bounded")

sizes = st.integers(1, 40)
seeds = st.integers(0, 2**16)
scales = st.sampled_from([0.1, 1.0, 10.0, 100.0])
tiles = st.sampled_from([16, 32, 64])


def close(got, want, tolerance=1e-5):
    torch.testing.assert_close(got.double(), want.double(), rtol=tolerance, atol=tolerance)


@given(st.integers(1, 9), st.integers(1, 100), seeds, scales, st.sampled_from([1, 2, 4]), tiles)
def test_softmax(softmax, N0, T, seed, scale, B0, B1):
    x = randn(N0, T, seed=seed) * scale
    z = softmax(x, B0=B0, B1=B1)
    close(z, torch.softmax(x.double(), dim=1))
    assert z.min() >= 0 and z.max() <= 1 + 1e-6
    close(z.sum(dim=1), torch.ones(N0))
    # Rounded to a multiple of 2^-13, x can be shifted by 1024 exactly.
    x = (x + 1024) - 1024
    close(softmax(x + 1024, B0=B0, B1=B1), softmax(x, B0=B0, B1=B1))
    order = torch.randperm(T, generator=torch.Generator().manual_seed(seed))
    close(softmax(x[:, order], B0=B0, B1=B1), softmax(x, B0=B0, B1=B1)[:, order])


@given(sizes, st.integers(1, 150), seeds, scales, tiles, tiles)
def test_scalar_attention(flashatt, N0, T, seed, scale, B0, B1):
    q, k, v = randn(N0, seed=seed) * scale, randn(T, seed=seed + 1), randn(T, seed=seed + 2)
    z = flashatt(q, k, v, B0=B0, B1=B1)
    close(z, torch.softmax(q.double()[:, None] * k.double(), dim=1) @ v.double(), 1e-4)
    assert z.min() >= v.min() - 1e-5 and z.max() <= v.max() + 1e-5


@given(sizes, sizes, st.integers(1, 20), seeds, scales, tiles, tiles)
def test_attention(attention, M, N, D, seed, scale, BLOCK_M, BLOCK_N):
    q, k, v = randn(M, D, seed=seed) * scale, randn(N, D, seed=seed + 1), randn(N, D, seed=seed + 2)
    out = attention(q, k, v, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N)
    # Scores of several hundred lose 1e-5 of their value to float32 before the exponential.
    close(out, attention_reference(q, k, v, attention.causal), 1e-3 if scale > 10 else 1e-4)
    assert (out <= v.max(dim=0).values + 1e-5).all() and (out >= v.min(dim=0).values - 1e-5).all()


@given(st.integers(2, 40), st.integers(1, 20), seeds)
def test_causal_attention_does_not_see_later_keys(causal, M, D, seed):
    q, k, v = (randn(M, D, seed=seed + i) for i in range(3))
    row = seed % M
    before = causal(q, k, v)
    k[row + 1 :], v[row + 1 :] = 1e4, -1e4
    assert torch.equal(causal(q, k, v)[: row + 1], before[: row + 1])


@given(sizes, st.integers(2, 40), seeds, scales, st.booleans())
def test_gating(gating, M, E, seed, scale, ties):
    logits = randn(M, E, seed=seed) * scale
    logits = logits.round() if ties else logits
    w0, w1, idx0, idx1 = gating(logits)
    ids = torch.stack([idx0, idx1], dim=1).long()
    assert (idx0 != idx1).all() and ids.min() >= 0 and ids.max() < E
    assert (w0 >= w1).all() and (w1 >= 0).all()
    close(w0 + w1, torch.ones(M))
    # The ids may differ from torch.topk's where probabilities tie; what they weigh may not.
    probs = torch.softmax(logits.double(), dim=1)
    want = torch.topk(probs, 2).values
    close(probs.gather(1, ids), want)
    close(torch.stack([w0, w1], dim=1), want / want.sum(dim=1, keepdim=True))
