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
        torch.randn(2, 1003)[:1, :1001],
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


@pytest.fixture
def programs_wait(fast):
    """For tests of rungs 5 and 6, whose programs wait for one another."""
    if fast.DEVICE == "cpu":
        pytest.skip("the interpreter runs programs one by one")


@pytest.fixture(params=["launch_split_row", "launch_split_row_shared"])
def split_rung(fast, programs_wait, request):
    x = torch.empty(1, 20000, device=fast.DEVICE)
    if request.param == "launch_split_row_shared" and not fast.shared_fits(x, x):
        pytest.skip("rung 6 needs Hopper or newer")
    return getattr(fast, request.param)


@pytest.mark.parametrize("dtype", RTOL)
@pytest.mark.parametrize("N0, T", [(1, 2**20), (700, 20001), (65, 131072), (9, 2**20 - 5)])
def test_a_row_split_over_programs(fast, split_rung, N0, T, dtype):
    x = (randn(N0, T) * 5).to(dtype).cuda()
    first = torch.full_like(x, NAN)
    split_rung(x, first)
    assert_softmax(first, x)
    for _ in range(5):
        z = torch.full_like(x, NAN)
        split_rung(x, z)
        assert torch.equal(z, first)
    newest = fast.launch_split_row_shared if fast.shared_fits(x, z) else fast.launch_split_row
    assert fast.choose_rung(x, z) is newest
    if split_rung is newest:
        assert torch.equal(fast.fast_softmax(x), first)


@pytest.mark.parametrize("dtype", RTOL)
@pytest.mark.parametrize("T", [16385, 16400, 26625, 32769, 50257, 100003, 131073])
def test_pieces_that_end_anywhere_and_rows_that_need_care(fast, split_rung, T, dtype):
    x = (randn(9, T) * 5).to(dtype)
    x[1, : T - 1] = -INF
    x[2, 1:] = -INF
    x[3, T // 2] = NAN
    x[4] = -INF
    x[5, -1] = INF
    x[6] = torch.finfo(dtype).max
    x[7, 0] = x[7, -1] = 100
    x = x.cuda()
    z = torch.full_like(x, NAN)
    split_rung(x, z)
    assert_softmax(z, x)
    split_rung(x, x)
    torch.testing.assert_close(x, z, rtol=0, atol=0, equal_nan=True)


def test_a_split_row_touches_nothing_beside_it(fast, split_rung):
    buffer = torch.full((7, 20200), 3.0, device="cuda", dtype=torch.bfloat16)
    x = buffer[:, 96:20097]
    x.copy_(randn(7, 20001))
    want = x.clone()
    split_rung(x, x)
    assert_softmax(x, want)
    assert (buffer[:, :96] == 3).all() and (buffer[:, 20097:] == 3).all()


def test_split_rows_in_a_graph_and_in_two_streams(fast, programs_wait):
    x = randn(500, 20001).cuda()
    fast.fast_softmax(x)  # compile it before the graph is recorded
    graph, out = torch.cuda.CUDAGraph(), torch.empty_like(x)
    with torch.cuda.graph(graph):
        fast.fast_softmax(x, out=out)
    x.copy_(randn(500, 20001))
    z = fast.fast_softmax(x)
    assert_softmax(z, x)
    for _ in range(3):
        out.fill_(NAN)
        graph.replay()
        assert torch.equal(out, z)
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(20):
        outs = []
        for stream in streams:
            with torch.cuda.stream(stream):
                outs.append(fast.fast_softmax(x))
        torch.cuda.synchronize()
        assert all(torch.equal(out, z) for out in outs)


def test_rows_unaligned_in_different_ways_take_a_rung_that_can(fast, programs_wait):
    buffer = randn(5, 20010).to(torch.bfloat16).cuda()
    one = buffer[:1, :20001]
    for x in (one, buffer[:, 1:20001], buffer[:, 8:20009], buffer[:1, 3:].expand(5, -1)):
        assert_softmax(fast.fast_softmax(x), x)
