"""The lessons' kernels against float64, on shapes and values that the book's inputs do not try."""

import itertools
import re

import pytest
import torch
from conftest import ATTENTIONS, HARD_ROWS, INF, NAN, SOFTMAXES, launcher, randn

from harness.properties import attention_reference


def assert_softmax(z, x):
    """z is the softmax of x: shape and dtype, values to 1e-5 relative, NaN rows where torch has."""
    want = torch.softmax(x.double(), dim=1)
    assert z.shape == x.shape and z.dtype == torch.float32
    # atol: a GPU may flush values under 2^-126 to 0.
    torch.testing.assert_close(z.double(), want, rtol=1e-5, atol=1e-37, equal_nan=True)


# --- Softmax -------------------------------------------------------------------------------------


@pytest.mark.parametrize("N0, T", [(1, 1), (4, 200), (3, 32), (5, 31), (2, 33), (7, 300)])
@pytest.mark.parametrize("B0, B1", [(1, 32), (2, 64), (4, 16), (1, 512)])
def test_softmax_of_any_shape_and_blocks(softmax, N0, T, B0, B1):
    x = randn(N0, T) * 5
    assert_softmax(softmax(x, B0=B0, B1=B1), x)


@pytest.mark.parametrize("rows", HARD_ROWS)
@pytest.mark.parametrize("B0", [1, 4])
def test_softmax_of_hard_rows(softmax, rows, B0):
    x = torch.tensor(rows)
    assert_softmax(softmax(x, B0=B0, B1=16), x)


def test_softmax_of_strided_and_empty(softmax):
    for x in (
        (torch.arange(12.0).reshape(3, 4) / 3).t(),
        torch.arange(8.0).reshape(2, 4)[:, ::2],
        torch.randn(1, 7).expand(3, 7),
        torch.empty(0, 5),
        torch.empty(5, 0),
    ):
        assert_softmax(softmax(x), x)


def test_softmax_of_a_row_stride_past_int32(softmax):
    stride = 2**30
    x = torch.empty(2 * stride + 16, dtype=torch.float32).as_strided((3, 4), (stride, 1))
    x.copy_(randn(3, 4))
    assert_softmax(softmax(x), x)


# --- Scalar attention ----------------------------------------------------------------------------


def scalar_reference(q, k, v):
    return torch.softmax(q.double()[:, None] * k.double()[None, :], dim=1) @ v.double()


@pytest.mark.parametrize("N0, T", [(1, 1), (200, 200), (64, 32), (65, 33), (3, 300), (0, 5)])
@pytest.mark.parametrize("B0, B1", [(64, 32), (16, 16), (32, 512)])
def test_scalar_attention_of_any_shape_and_blocks(flashatt, N0, T, B0, B1):
    q, k, v = randn(N0) * 3, randn(T, seed=1) * 3, randn(T, seed=2)
    z = flashatt(q, k, v, B0=B0, B1=B1)
    torch.testing.assert_close(z.double(), scalar_reference(q, k, v), rtol=0, atol=1e-5)


def test_scalar_attention_of_hard_scores(flashatt):
    rising, one = torch.arange(300.0), torch.ones(1)
    for q, k, v in (
        (one * -2048, 2048 + rising[:40] / 64, rising[:40] + 1),  # every score below -4194304
        (one, rising / 30, rising),
        (torch.tensor([1.0, NAN, 2]), rising / 30, rising),
        (one, torch.tensor([-INF] * 200 + [1, 2]), torch.arange(202.0)),
    ):
        torch.testing.assert_close(
            flashatt(q, k, v).double(), scalar_reference(q, k, v), rtol=1e-5, atol=0, equal_nan=True
        )


def test_scalar_attention_of_strided_tensors(flashatt):
    q, k, v = randn(21, 3).unbind(dim=1)
    expected = flashatt(q.contiguous(), k.contiguous(), v.contiguous())
    assert torch.equal(flashatt(q, k, v), expected)


def test_scalar_attention_without_keys_is_zero(flashatt):
    assert flashatt(torch.ones(5), torch.empty(0), torch.empty(0)).tolist() == [0.0] * 5


# --- Attention -----------------------------------------------------------------------------------


def assert_attention(out, q, k, v, causal):
    want = attention_reference(q, k, v, causal)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize(
    "M, N, D",
    [
        (1, 1, 1),
        (1, 8, 8),
        (2, 5, 8),
        (5, 2, 8),
        (20, 3, 8),
        (37, 8, 8),
        (17, 23, 8),
        (16, 16, 16),
        (15, 37, 63),
        (37, 15, 80),
        (65, 64, 1),
        (16, 63, 80),
        (63, 65, 63),
        (127, 129, 8),
        (200, 200, 1),
    ],
)
@pytest.mark.parametrize("BLOCK_M, BLOCK_N", [(16, 16), (32, 16), (64, 64)])
def test_attention_of_any_shape_and_blocks(attention, M, N, D, BLOCK_M, BLOCK_N):
    q, k, v = randn(M, D), randn(N, D, seed=1), randn(N, D, seed=2)
    out = attention(q, k, v, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N)
    assert out.shape == (M, D)
    assert_attention(out, q, k, v, attention.causal)


def test_attention_over_one_key_is_its_value(attention):
    v = randn(1, 8, seed=2)
    assert torch.equal(attention(randn(5, 8), randn(1, 8, seed=1), v), v.expand(5, 8))


def test_attention_of_strided_tensors(attention):
    q, k, v = randn(21, 24).chunk(3, dim=1)
    assert torch.equal(attention(q, k, v), attention(*(x.contiguous() for x in (q, k, v))))
    q, k, v = (randn(8, 21, seed=seed).t() for seed in range(3))
    assert_attention(attention(q, k, v), q, k, v, attention.causal)


def test_attention_reads_nothing_past_the_end(attention):
    buffers = [torch.full((64, 16), NAN) for _ in range(2)]
    q, k, v = randn(5, 8), buffers[0][:5, :8], buffers[1][:5, :8]
    k.copy_(randn(5, 8, seed=1)), v.copy_(randn(5, 8, seed=2))
    assert_attention(attention(q, k, v), q, k, v, attention.causal)


def test_attention_of_a_row_stride_past_int32(attention):
    stride = 2**30
    x = torch.empty(2 * stride + 16, dtype=torch.float32).as_strided((3, 4), (stride, 1))
    x.copy_(randn(3, 4))
    assert_attention(attention(x, x, x), x, x, x, attention.causal)


def test_attention_rescales_what_it_summed(script):
    attention = launcher(script, *ATTENTIONS[0])
    j = torch.arange(300.0)[:, None]
    k, v = (j / 30).expand(300, 16), j.expand(300, 16)
    out = attention(torch.ones(1, 16), k, v)
    assert out[0, 0].item() == pytest.approx(291.9889, rel=1e-6)


def test_attention_of_hard_scores(attention):
    q = torch.full((3, 1), -2048.0)  # scores below -4194304, exact in float32
    k, v = (2048 + torch.arange(40.0) / 64)[:, None], torch.arange(1.0, 41)[:, None]
    assert_attention(attention(q, k, v), q, k, v, attention.causal)
    # Keys whose score is -inf fill the first blocks.
    q = torch.ones(40, 1)
    k = torch.tensor([-INF] * 36 + [1, 2, 3, 4.0])[:, None]
    out, want = attention(q, k, v), attention_reference(q, k, v, attention.causal)
    seen = ~want.isnan()
    torch.testing.assert_close(out.double()[seen], want[seen], rtol=1e-5, atol=0)


def test_attention_keeps_a_nan_in_its_row(attention):
    q, k, v = randn(5, 8), randn(7, 8, seed=1), randn(7, 8, seed=2)
    q[2, 3] = NAN
    assert_attention(attention(q, k, v), q, k, v, attention.causal)


def test_attention_of_nothing(attention):
    assert attention(torch.empty(0, 8), randn(5, 8), randn(5, 8)).shape == (0, 8)
    assert attention(randn(3, 8), torch.empty(0, 8), torch.empty(0, 8)).tolist() == [[0.0] * 8] * 3


# --- Gating --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "M, E", [(0, 8), (1, 2), (6, 8), (37, 3), (5, 5), (5, 6), (5, 7), (9, 9), (4, 64), (3, 1000)]
)
def test_gating_of_any_shape(gating, M, E):
    logits = randn(M, E)
    w0, w1, idx0, idx1 = gating(logits)
    want, ids = torch.topk(torch.softmax(logits.double(), dim=1), 2)
    want = want / want.sum(dim=1, keepdim=True)
    assert idx0.dtype == idx1.dtype == torch.int32
    assert torch.equal(torch.stack([idx0, idx1], dim=1).long(), ids)
    torch.testing.assert_close(torch.stack([w0, w1], dim=1).double(), want, rtol=1e-5, atol=0)


def test_gating_of_equal_logits_takes_the_lowest_expert(gating):
    for row, ids in ([0, 0, 0, 0], (0, 1)), ([3, 2, 3, 2, 1, 1], (0, 2)):
        w0, w1, idx0, idx1 = gating(torch.tensor([row]).float())
        assert (idx0.item(), idx1.item()) == ids
        assert (w0.item(), w1.item()) == pytest.approx((0.5, 0.5))


def test_gating_of_negative_logits_and_underflow(gating):
    w0, w1, idx0, idx1 = gating(torch.tensor([[-3.0, -2, -1, -4, -5]]))
    assert (idx0.item(), idx1.item()) == (2, 1)
    # Of the probabilities .6364 and .2341.
    assert (w0.item(), w1.item()) == pytest.approx((0.73106, 0.26894), abs=1e-5)
    w0, w1, idx0, idx1 = gating(torch.tensor([[200.0, -1, 0, -2]]))
    # Both 2nd candidates underflow to probability 0 and tie: the lesson takes the lower id.
    assert (idx0.item(), idx1.item(), w0.item(), w1.item()) == (0, 1, 1, 0)
    # Far from 0 on either side e^x is 0 or inf, and padding that read 0 would be the maximum.
    for far in 200.0, -200.0:
        w0, w1, idx0, idx1 = gating(torch.tensor([[0.9, -1, 2]]) + far)
        assert (idx0.item(), idx1.item()) == (2, 0)
        assert w0.item() == pytest.approx(0.75026, abs=1e-5)
    w0, w1, _, _ = gating(torch.tensor([[0.1, 0.9, -1, 2]]))
    assert (w0.item(), w1.item()) == pytest.approx((0.75026, 0.24974), abs=1e-5)


@pytest.mark.parametrize("row", [[1, NAN, 2, 0], [NAN] * 4, [-INF] * 4, [1, INF, 2, 0]])
def test_gating_keeps_a_bad_row_to_itself(gating, row):
    good = [0.0, 1, 2, 3]
    w0, w1, idx0, idx1 = gating(torch.tensor([good, row, good]))
    assert w0[1].isnan() and w1[1].isnan()
    assert idx0[1] != idx1[1] and 0 <= min(idx0[1], idx1[1]) and max(idx0[1], idx1[1]) < 4
    for i in 0, 2:
        assert (idx0[i].item(), idx1[i].item()) == (3, 2)
        assert w0[i] + w1[i] == pytest.approx(1)


def test_gating_of_strided_rows(gating):
    for logits in randn(8, 6).t(), randn(6, 20)[:, 4:12], randn(6, 16)[:, ::2]:
        expected = gating(logits.contiguous())
        assert all(torch.equal(a, b) for a, b in zip(gating(logits), expected, strict=True))


def test_gating_of_a_row_stride_past_int32(gating):
    stride = 2**30
    x = torch.empty(2 * stride + 16, dtype=torch.float32).as_strided((3, 4), (stride, 1))
    x.copy_(randn(3, 4))
    assert torch.equal(torch.stack(gating(x)[:2]), torch.stack(gating(x.contiguous())[:2]))


# --- Bad arguments -------------------------------------------------------------------------------

ONE, TWO, SQUARE = torch.ones(5), torch.ones(6), torch.ones(5, 8)
GRAD = torch.ones(5, 8, requires_grad=True)
BAD = [
    ("softmax", (ONE,), ValueError, r"x must be \[N0, T\], got shape \(5,\)"),
    ("softmax", (SQUARE.long(),), TypeError, "x must be float32, got torch.int64"),
    ("softmax", (SQUARE.bfloat16(),), TypeError, "float32, got torch.bfloat16"),
    ("softmax", (SQUARE.to("meta"),), ValueError, "x is on meta"),
    ("softmax", (GRAD,), ValueError, "forward only, but x requires grad"),
    ("flashatt", (ONE, ONE, TWO), ValueError, r"k \(5,\), v \(6,\)"),
    ("flashatt", (ONE, ONE, ONE.half()), TypeError, "v must be float32"),
    ("flashatt", (ONE, ONE.to("meta"), ONE), ValueError, "k is on meta"),
    ("flashatt", (ONE, ONE, GRAD[:, 0]), ValueError, "forward only, but v requires grad"),
    ("attention", (SQUARE, SQUARE, torch.ones(6, 8)), ValueError, r"k \(5, 8\), v \(6, 8\)"),
    ("attention", (SQUARE, torch.ones(5, 16), SQUARE), ValueError, r"q \(5, 8\), k \(5, 16\)"),
    ("attention", (SQUARE, SQUARE, SQUARE.double()), TypeError, "v must be float32"),
    ("attention", (SQUARE, SQUARE.to("meta"), SQUARE), ValueError, "k is on meta"),
    ("attention", (torch.ones(5, 0),) * 3, ValueError, "D = 0"),
    ("attention", (SQUARE, GRAD, SQUARE), ValueError, "forward only, but k requires grad"),
    ("gating", (torch.tensor([[0.3]]),), ValueError, r"E >= 2 experts, got \(1, 1\)"),
    ("gating", (ONE,), ValueError, r"got \(5,\)"),
    ("gating", (SQUARE.half(),), TypeError, "float32"),
    ("gating", (SQUARE.to("meta"),), ValueError, "on meta"),
    ("gating", (GRAD,), ValueError, "forward only, but logits require grad"),
]
FUNCTIONS = {
    "softmax": SOFTMAXES,
    "flashatt": [("chapter09_flashattn/01_scalar_flash_attention.py", "flashatt")],
    "attention": ATTENTIONS,
    "gating": [("chapter21/03_moe_gating.py", "moe_top2_gating")],
}


@pytest.mark.parametrize("kind, tensors, error, text", BAD)
def test_a_bad_argument_is_named(script, kind, tensors, error, text):
    for name, function in FUNCTIONS[kind]:
        module = script(name)
        moved = [t if t.device.type == "meta" else t.to(module.DEVICE) for t in tensors]
        with pytest.raises(error, match=text) as raised:
            getattr(module, function)(*moved)
        assert re.fullmatch("[^\n]+", str(raised.value))


@pytest.mark.parametrize("blocks", list(itertools.product([4, 24], [16])) + [(16, 8)])
def test_a_block_that_no_gpu_takes_is_refused(attention, blocks):
    x = torch.ones(5, 8)
    with pytest.raises(ValueError, match="powers of two, 16 or more"):
        attention(x, x, x, BLOCK_M=blocks[0], BLOCK_N=blocks[1])
