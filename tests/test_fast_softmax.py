"""The fast softmax against float64: every rung, dtype and hard row, strided and in place."""

import pytest
import torch
from conftest import HARD_ROWS, INF, NAN, randn

NAME = "chapter08_softmax/04_fast_softmax.py"
RTOL = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.fixture(scope="module")
def fast(script):
    return script(NAME)


def assert_softmax(z, x):
    """z is the softmax of x, NaN rows where torch has them; a GPU may flush tiny values to 0."""
    assert z.shape == x.shape and z.dtype == x.dtype
    atol = 1e-7 if x.dtype == torch.float16 else 1e-37
    want = torch.softmax(x.cpu().double(), dim=1)
    torch.testing.assert_close(
        z.cpu().double(), want, rtol=RTOL[x.dtype], atol=atol, equal_nan=True
    )


@pytest.mark.parametrize("dtype", RTOL)
@pytest.mark.parametrize(
    "N0, T",
    [(1, 1), (37, 1), (9, 2), (5, 17), (300, 63), (4, 200), (3, 1000), (7, 1001), (2, 5003)]
    + [(2, 16384), (2, 16385), (3, 50257)],
)
def test_any_shape_and_dtype(fast, N0, T, dtype):
    x = (randn(N0, T) * 5).to(dtype).to(fast.DEVICE)
    z = torch.full_like(x, NAN)
    assert fast.fast_softmax(x, out=z) is z
    assert_softmax(z, x)


@pytest.mark.parametrize("padding", [0, 300, 20000])
@pytest.mark.parametrize("rows", HARD_ROWS)
def test_hard_rows(fast, rows, padding):
    """As they are, and at the end of 300 or 20000 columns of -inf: one rung after the other."""
    x = torch.tensor(rows)
    x = torch.cat([torch.full((len(rows), padding), -INF), x], dim=1).to(fast.DEVICE)
    assert_softmax(fast.fast_softmax(x), x)


@pytest.mark.parametrize("T", [70, 5003, 20000])
@pytest.mark.parametrize("dtype", RTOL)
def test_strided_rows_and_in_place(fast, T, dtype):
    buffer = randn(4, T + 37).to(dtype).to(fast.DEVICE)
    for start in (0, 3):
        x = buffer[:, start : start + T]
        assert_softmax(fast.fast_softmax(x), x)
        copy = buffer.clone()
        inside = copy[:, start : start + T]
        assert_softmax(fast.fast_softmax(inside, out=inside), x)
        outside = torch.ones(T + 37, dtype=torch.bool)
        outside[start : start + T] = False
        assert torch.equal(copy.cpu()[:, outside], buffer.cpu()[:, outside])


def test_strided_columns_broadcast_and_empty(fast):
    for x in (
        (torch.arange(12.0).reshape(3, 4) / 3).t(),
        torch.arange(8.0).reshape(2, 4)[:, ::2],
        torch.randn(1, 7).expand(3, 7),
        torch.randn(1, 20000).expand(3, 20000),
        torch.empty(0, 5),
        torch.empty(5, 0),
    ):
        x = x.to(fast.DEVICE)
        assert_softmax(fast.fast_softmax(x), x)


def test_row_offsets_past_2_to_the_31(fast):
    stride = 2**30
    buffer = torch.empty(2 * stride + 16, dtype=torch.float16, device=fast.DEVICE)
    x = buffer.as_strided((3, 4), (stride, 1))
    x.copy_(randn(3, 4))
    assert_softmax(fast.fast_softmax(x), x)


def test_what_it_refuses(fast):
    x = torch.randn(2, 8, device=fast.DEVICE)
    for bad in (x.int(), x.double()):
        with pytest.raises(TypeError, match="float32"):
            fast.fast_softmax(bad)
    with pytest.raises(ValueError, match="forward only"):
        fast.fast_softmax(x.clone().requires_grad_())
    for bad in (x[0], x[:1].expand(1, 8)[:, :1].expand(1, 2**20 + 1)):
        with pytest.raises(ValueError, match="N0, T"):
            fast.fast_softmax(bad)
    outs = (x[:1], x.half(), x.t().contiguous().t(), x[:1].expand(2, 8))
    for out in outs:
        with pytest.raises(ValueError, match="out"):
            fast.fast_softmax(x, out=out)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", RTOL)
@pytest.mark.parametrize("N0, T", [(1, 2**20), (700, 20001), (65, 131072), (9, 2**20 - 5)])
def test_a_row_split_over_programs(fast, N0, T, dtype):
    if fast.DEVICE == "cpu":
        pytest.skip("the interpreter runs programs one by one")
    assert fast.choose_rung(T, dtype.itemsize) is fast.launch_split_row
    x = (randn(N0, T) * 5).to(dtype).cuda()
    z = torch.full_like(x, NAN)
    fast.fast_softmax(x, out=z)
    assert_softmax(z, x)
    first = z.clone()
    for _ in range(5):
        assert torch.equal(fast.fast_softmax(x), first)
