"""The fast scalar attention against float64: every rung, shape and hard score, bit for bit."""

import pytest
import torch
from conftest import INF, NAN, randn

NAME = "chapter09_flashattn/03_fast_scalar_attention.py"


@pytest.fixture(scope="module")
def fast(script):
    return script(NAME)


def run(fast, q, k, v, launch=None):
    """z on the CPU, from fast_flashatt or from one rung; what is not written is NaN."""
    q, k, v = (x.to(fast.DEVICE) for x in (q, k, v))
    z = torch.full(q.shape, NAN, device=fast.DEVICE)
    if launch is None:
        assert fast.fast_flashatt(q, k, v, out=z) is z
    else:
        launch(q, k, v, z)
    return z.cpu()


def assert_attention(z, q, k, v):
    """The softmax of q_i * k_j times v, to 1e-5 of the largest |z|; NaN where torch has NaN."""
    want = torch.softmax(q.double()[:, None] * k.double(), dim=1) @ v.double()
    assert z.dtype == torch.float32
    largest = want.nan_to_num(0, 0, 0).abs().max().item()
    torch.testing.assert_close(z.double(), want, rtol=0, atol=1e-5 * largest, equal_nan=True)


@pytest.mark.parametrize(
    "N0, T",
    [(1, 1), (1, 5), (5, 1), (64, 32), (65, 33), (3, 255), (3, 256), (7, 257), (200, 200)]
    + [(63, 1023), (2, 5003), (1, 40000)],
)
def test_any_shape(fast, N0, T):
    tensors = randn(N0) * 3, randn(T, seed=1) * 3, randn(T, seed=2)
    assert_attention(run(fast, *tensors), *tensors)


@pytest.mark.parametrize("rung", range(4))
def test_every_rung(fast, rung):
    tensors = randn(70) * 3, randn(600, seed=1) * 3, randn(600, seed=2)
    launch = list(fast.RUNGS.values())[rung]
    assert_attention(run(fast, *tensors, launch), *tensors)


@pytest.mark.parametrize("splits", [1, 2, 5])
def test_any_number_of_pieces(fast, splits):
    tensors = randn(70) * 3, randn(1500, seed=1) * 3, randn(1500, seed=2)
    z = run(fast, *tensors, lambda *x: fast.launch_partial_sums(*x, splits))
    assert_attention(z, *tensors)


RISING = torch.arange(300.0)
HARD = {
    "every score below -4194304": ([-2048.0], 2048 + RISING / 64, RISING + 1),
    "every score above 4194304": ([2048.0], 2048 + RISING / 64, RISING + 1),
    "both, close together": ([-2048.0, 2048], 2048 + RISING / 4096, RISING + 1),
    "rising": ([1.0, -1], RISING / 30, RISING),
    "falling": ([1.0, -1], RISING.flip(0) / 30, RISING),
    "a NaN query": ([1.0, NAN, 2, -1], RISING / 30, RISING),
    "infinite queries": ([1.0, INF, -INF, -1], RISING / 30 - 1, RISING),
    "zeros": ([0.0, -0.0, 1], RISING / 30, RISING),
    "keys of one value": ([1.0, -1, 0, 1e30], torch.full((300,), 5.0), RISING),
    "keys up to the largest float32": (
        [0.0, 1e-38, -1e-38],
        3.4e38 * torch.linspace(-1, 1, 300),
        RISING,
    ),
    "queries up to 1e38": ([1e38, -1e38], RISING / 300, RISING + 1),
    "-inf keys first": ([1.0, 2, -1, 0], torch.tensor([-INF] * 298 + [1, 2]), RISING),
    "inf keys last": ([1.0, 2, -1, 0], torch.tensor([1.0, 2] + [INF] * 298), RISING),
    "inf and -inf keys": ([1.0, -1, 0], torch.tensor([INF, -INF] + [1.0] * 298), RISING),
    "one -inf key": ([1.0, -1, 0], torch.tensor([-INF] + [1.0] * 299), RISING),
    "a NaN key": ([1.0, -1, 0], torch.tensor([NAN] + [1.0] * 299), RISING),
    "a NaN key last": ([1.0, -1, 0], torch.tensor([1.0] * 299 + [NAN]), RISING),
    "a NaN value": ([1.0, -1, 0], RISING / 30, torch.cat([torch.tensor([NAN]), RISING[1:]])),
}


@pytest.mark.parametrize("name", HARD)
@pytest.mark.parametrize("rung", ["known_max", "partial_sums"])
def test_hard_scores(fast, name, rung):
    q, k, v = HARD[name]
    q = torch.tensor(q)
    assert_attention(run(fast, q, k, v, getattr(fast, f"launch_{rung}")), q, k, v)


@pytest.mark.parametrize("launch", ["launch_puzzle", "launch_known_max", "launch_partial_sums"])
def test_where_every_score_is_minus_infinity_z_is_zero(fast, launch):
    """As in the lesson. torch gives NaN."""
    for q, k in (1.0, -INF), (-1.0, INF):
        tensors = torch.tensor([q, q]), torch.full((300,), k), RISING + 1
        assert run(fast, *tensors, getattr(fast, launch)).tolist() == [0, 0]


def test_strided_and_empty(fast):
    q, k, v = randn(300, 3).unbind(dim=1)
    tensors = q.contiguous(), k.contiguous(), v.contiguous()
    assert torch.equal(run(fast, q, k, v), run(fast, *tensors))
    none = torch.empty(0)
    assert run(fast, torch.ones(5), none, none).tolist() == [0.0] * 5
    assert run(fast, none, k, v).shape == (0,)
    assert run(fast, none, none, none).shape == (0,)
    q = torch.ones(1, device=fast.DEVICE).expand(3)
    assert_attention(fast.fast_flashatt(q, k.to(q.device), v.to(q.device)).cpu(), q.cpu(), k, v)


def test_reads_nothing_past_the_end(fast):
    q, k, v = (torch.full((3, 700), NAN)).unbind()
    q[:70], k[:300], v[:300] = randn(70), randn(300, seed=1), randn(300, seed=2)
    tensors = q[:70], k[:300], v[:300]
    assert_attention(run(fast, *tensors), *tensors)


def test_what_it_refuses(fast):
    x = torch.ones(5, device=fast.DEVICE)
    for bad in (x.int(), x.double(), x.bfloat16()):
        for tensors in (bad, x, x), (x, bad, x), (x, x, bad):
            with pytest.raises(TypeError, match="must be float32"):
                fast.fast_flashatt(*tensors)
    for tensors in (x[None], x, x), (x, x[None], x[None]), (x, x, x[1:]):
        with pytest.raises(ValueError, match=r"want q \[N0\], k \[T\], v \[T\]"):
            fast.fast_flashatt(*tensors)
    with pytest.raises(ValueError, match="k requires grad"):
        fast.fast_flashatt(x, x.clone().requires_grad_(), x)
    with pytest.raises(ValueError, match="v is on meta"):
        fast.fast_flashatt(x, x, x.to("meta"))
    for out in (x[1:], x.double(), x[:1].expand(5)):
        with pytest.raises(ValueError, match="out must be"):
            fast.fast_flashatt(x, x, x, out=out)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("N0, T", [(1, 2**20), (8192, 8192), (300000, 300)])
def test_large_and_the_same_every_time(fast, N0, T):
    if fast.DEVICE == "cpu":
        pytest.skip("slow in the interpreter")
    tensors = randn(N0) * 3, randn(T, seed=1) * 3, randn(T, seed=2)
    z = run(fast, *tensors)
    some = slice(None, None, max(1, N0 // 200))
    assert_attention(z[some], tensors[0][some], *tensors[1:])
    assert all(torch.equal(run(fast, *tensors), z) for _ in range(5))
