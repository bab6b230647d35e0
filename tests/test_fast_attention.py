"""The fast attention against float64: every rung, dtype and head width, strided, hard and empty."""

import pytest
import torch
from conftest import HEADS_TOLERANCE, INF, NAN, assert_heads, randn, randn_heads

NAME = "chapter21/07_fast_flash_attention.py"


@pytest.fixture(scope="module")
def fast(script):
    return script(NAME)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", HEADS_TOLERANCE)
@pytest.mark.parametrize(
    "B, Hq, Hkv, M, N, D",
    [
        (1, 1, 1, 1, 1, 1),  # every size and stride a constant
        (1, 1, 1, 1, 8, 16),  # one new token
        (2, 1, 1, 17, 37, 24),
        (1, 2, 2, 65, 63, 64),
        (1, 1, 1, 64, 64, 80),
        (1, 1, 1, 129, 40, 96),
        (1, 1, 1, 33, 90, 128),
        (1, 1, 1, 20, 40, 200),
        (1, 1, 1, 33, 20, 256),
        (2, 6, 2, 20, 50, 16),  # three query heads share keys
        (1, 4, 1, 37, 37, 32),
    ],
)
def test_any_shape_and_dtype(fast, B, Hq, Hkv, M, N, D, dtype, causal):
    q, k, v = randn_heads(fast.DEVICE, B, Hq, Hkv, M, N, D, dtype)
    out = torch.full_like(q, NAN)
    assert fast.fast_flash_attention(q, k, v, causal=causal, out=out) is out
    assert_heads(out, q, k, v, causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("M, N", [(2, 5), (5, 2), (1, 8), (20, 3), (150, 70), (70, 150)])
@pytest.mark.parametrize("tiles", [(32, 64, 4, 1), (64, 16, 4, 2)])
@pytest.mark.parametrize("launch", ["simple", "blocks", "descriptors"])
def test_every_rung_in_other_tiles(fast, launch, tiles, M, N, causal):
    if launch == "descriptors" and fast.TensorDescriptor is None:
        pytest.skip("needs triton 3.4")
    q, k, v = randn_heads(fast.DEVICE, 1, 2, 1, M, N, 16, torch.bfloat16)
    dot = fast.choose(q, k, v, q, fast.architecture())[2]
    out = torch.full_like(q, NAN)
    getattr(fast, f"launch_{launch}")(q, k, v, out, causal, 0.3, tiles, dot)
    assert_heads(out, q, k, v, causal, 0.3)


@pytest.mark.parametrize("causal", [False, True])
def test_few_heads_at_a_time(fast, causal, monkeypatch):
    """Every block of every head is computed, in whatever order."""
    q, k, v = randn_heads(fast.DEVICE, 2, 5, 5, 70, 30, 16)
    for together in 1, 3, 4, 10:
        monkeypatch.setattr(fast, "heads_together", lambda q, k, together=together: together)
        out = fast.fast_flash_attention(q, k, v, causal, out=torch.full_like(q, NAN))
        assert_heads(out, q, k, v, causal)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("D", [32, 80])
def test_strided_tensors(fast, D, dtype):
    interleaved = randn(1, 40, 3, 2, D).to(dtype).to(fast.DEVICE).permute(2, 0, 3, 1, 4)
    wide = randn(3, 1, 2, 40, D + 8).to(dtype).to(fast.DEVICE)
    for q, k, v in (
        interleaved,
        wide[..., 8:],
        wide[..., 1 : D + 1],  # not at 16 bytes
        randn(3, 1, 2, D, 40).to(dtype).to(fast.DEVICE).mT,  # columns apart
        randn(3, 1, 2, 40, 2 * D).to(dtype).to(fast.DEVICE)[..., ::2],
        randn(3, 1, 1, 40, D).to(dtype).to(fast.DEVICE).expand(3, 1, 2, 40, D),
        randn(3, 1, 2, 1, D).to(dtype).to(fast.DEVICE).expand(3, 1, 2, 40, D),
        randn(3, 1, 2, 40, 1).to(dtype).to(fast.DEVICE).expand(3, 1, 2, 40, D),
    ):
        assert_heads(fast.fast_flash_attention(q, k, v, causal=True), q, k, v, True)


@pytest.mark.parametrize("launch", ["dispatch", "simple", "descriptors"])
def test_hard_scores(fast, launch):
    def attention(q, k, v, scale=None):
        q, k, v = (x.to(fast.DEVICE) for x in (q, k, v))
        if launch == "dispatch":
            return fast.fast_flash_attention(q, k, v, scale=scale).cpu()
        if launch == "descriptors" and fast.TensorDescriptor is None:
            pytest.skip("needs triton 3.4")
        out = torch.full_like(q, NAN)
        call = getattr(fast, f"launch_{launch}")
        dot = fast.DTYPES[torch.float32]
        call(q, k, v, out, False, scale or q.shape[3] ** -0.5, (16, 16, 4, 1), dot)
        return out.cpu()

    def heads(x, D=16):
        return x.expand(1, 1, len(x), D).contiguous()

    # Scores below -4194304, exact in float32.
    q = torch.zeros(1, 1, 3, 16)
    q[..., 0] = -2048
    k, v = heads((2048 + torch.arange(40.0) / 64)[:, None]), heads(torch.arange(1.0, 41)[:, None])
    assert_heads(attention(q, k, v, scale=1.0), q, k, v, scale=1.0)
    # Each block of keys outweighs those before it.
    j = torch.arange(300.0)[:, None]
    out = attention(torch.ones(1, 1, 1, 16), heads(j / 30), heads(j))
    assert out[0, 0, 0, 0].item() == pytest.approx(291.9889, rel=1e-5)
    # The first blocks' scores are all -inf.
    q = torch.zeros(1, 1, 40, 16)
    q[..., 0] = 1
    k = torch.zeros(1, 1, 80, 16)
    k[..., 0] = torch.tensor([-INF] * 76 + [1, 2, 3, 4.0])
    v = randn(1, 1, 80, 16)
    assert_heads(attention(q, k, v), q, k, v)
    # All of them are -inf: nothing to see. +inf: NaN, as in torch.
    assert not attention(q, k[:, :, :70].contiguous(), v[:, :, :70].contiguous()).any()
    k[0, 0, 3, 0] = INF
    assert attention(q, k, v).isnan().all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter's fma rounds twice")
@pytest.mark.parametrize("dtype", HEADS_TOLERANCE)
def test_close_scores_near_minus_2_million(fast, dtype):
    q, k, v = randn_heads(fast.DEVICE, 1, 1, 1, 3, 128, 64, dtype)
    q.zero_(), k.zero_()
    q[..., 0], q[..., 1] = 2048, 1
    k[..., 0], k[..., 1] = -1024, -(torch.arange(128) % 16).to(dtype)
    assert_heads(fast.fast_flash_attention(q, k, v, scale=1.0), q, k, v, scale=1.0)


def test_a_nan_stays_in_its_row(fast):
    for row in 0, 2:
        q, k, v = randn_heads(fast.DEVICE, 1, 2, 1, 5, 37, 16)
        q[0, 1, row, 3] = NAN
        out = fast.fast_flash_attention(q, k, v)
        assert out[0, 1, row].isnan().all() and out.isnan().sum() == 16
        assert_heads(out, q, k, v)


@pytest.mark.parametrize("dtype", HEADS_TOLERANCE)
@pytest.mark.parametrize("causal", [False, True])
def test_reads_nothing_past_the_end(fast, dtype, causal):
    for M, N, D in (5, 5, 16), (40, 70, 80):
        buffers = torch.full((3, 1, 2, 100, 96), NAN, dtype=dtype, device=fast.DEVICE)
        q, k, v = (
            x[:, :, :length, :D].copy_(randn(1, 2, length, D, seed=i))
            for i, (x, length) in enumerate(zip(buffers, (M, N, N), strict=True))
        )
        assert_heads(fast.fast_flash_attention(q, k, v, causal), q, k, v, causal)


def test_nothing_to_see_or_to_write(fast):
    def shape(*sizes):
        return torch.randn(sizes, device=fast.DEVICE)

    for causal in False, True:
        out = torch.full((1, 2, 3, 16), NAN, device=fast.DEVICE)
        none = shape(1, 2, 0, 16)
        assert not fast.fast_flash_attention(shape(1, 2, 3, 16), none, none, causal, out=out).any()
        k = shape(1, 2, 5, 16)
        assert fast.fast_flash_attention(none, k, k, causal).shape == (1, 2, 0, 16)
        k = shape(0, 2, 5, 16)
        assert fast.fast_flash_attention(shape(0, 4, 3, 16), k, k, causal).shape == (0, 4, 3, 16)


def test_offsets_past_2_to_the_31(fast):
    stride = 2**30
    buffer = torch.empty(2 * stride + 64, dtype=torch.float16, device=fast.DEVICE)
    for strides in (64, 64, stride, 1), (64, stride, 8, 1), (stride, 64, 8, 1):
        sizes = [3 if step == stride else 1 for step in strides[:3]]
        x = buffer.as_strided((*sizes, 4), strides)
        x.copy_(randn(*sizes, 4))
        assert_heads(fast.fast_flash_attention(x, x, x), x, x, x)


def test_the_dispatch(fast):
    """By architecture and tensor; the launches themselves are compiled by test_compile.py."""
    q = torch.empty(1, 2, 40, 64, dtype=torch.bfloat16)
    blocks, descriptors = fast.launch_blocks, fast.launch_descriptors
    assert fast.choose(q, q, q, q, 90)[0] is descriptors
    for arch in None, 0, 75, 80, 86, 89, 120, 121:
        assert fast.choose(q, q, q, q, arch)[0] is blocks
    apart = q.mT.contiguous().mT
    for k in (apart, q[..., :1].expand(q.shape), q[:, :1].expand(q.shape), q[:, :, :0]):
        assert fast.choose(q, k, k, q, 90)[0] is blocks
    off = torch.empty(1, 2, 40, 65, dtype=torch.bfloat16)
    assert fast.choose(q, off[..., :64], off[..., 1:], q, 90)[0] is blocks
    assert fast.choose(*[q.float()] * 4, 90)[0] is blocks


def test_what_it_refuses(fast):
    q, k, v = randn_heads(fast.DEVICE, 1, 2, 2, 5, 6, 16)
    call = fast.fast_flash_attention
    for bad in (
        (q[0], k, v),
        (q, k, v[:, :, :5]),
        (q, k[..., :8], v[..., :8]),
        (q, k.expand(2, 2, 6, 16), v.expand(2, 2, 6, 16)),
        (q[:, :1], k, v),
        (q[..., :0], k[..., :0], v[..., :0]),
        (q, k[:, :0], v[:, :0]),
        [x[..., :1].expand(1, 2, len(x[0, 0]), 257) for x in (q, k, v)],
    ):
        with pytest.raises(ValueError, match=r"want .*; got q \(.*\), k \(.*\), v \(.*\)$"):
            call(*bad)
    with pytest.raises(TypeError, match="v is torch.float16"):
        call(q, k, v.half())
    with pytest.raises(TypeError, match="q is torch.float64"):
        call(q.double(), k.double(), v.double())
    with pytest.raises(ValueError, match="forward only, but k requires grad"):
        call(q, k.clone().requires_grad_(), v)
    with pytest.raises(ValueError, match="v is on meta"):
        call(q, k, v.to("meta"))
    for scale in 0.0, -1.0, INF, NAN:
        with pytest.raises(ValueError, match="scale must be from 1e-30 to 1e30"):
            call(q, k, v, scale=scale)
    for out in q[:, :1], q.half(), q.mT.contiguous().mT:
        with pytest.raises(ValueError, match="out must be"):
            call(q, k, v, out=out)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="takes too long in the interpreter")
@pytest.mark.parametrize("dtype", HEADS_TOLERANCE)
def test_on_a_gpu_more_heads_than_a_grid_is_high(fast, dtype):
    q, k, v = randn_heads(fast.DEVICE, 2, 35000, 17500, 2, 3, 16, dtype)
    assert_heads(fast.fast_flash_attention(q, k, v, causal=True), q, k, v, True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="takes too long in the interpreter")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", HEADS_TOLERANCE)
@pytest.mark.parametrize("D", [64, 80, 128, 256])
def test_on_a_gpu_long_rows_repeat_bit_for_bit(fast, D, dtype, causal):
    q, k, v = randn_heads(fast.DEVICE, 1, 4, 2, 1000, 1111, D, dtype)
    first = fast.fast_flash_attention(q, k, v, causal)
    assert_heads(first, q, k, v, causal)
    for _ in range(10):
        assert torch.equal(fast.fast_flash_attention(q, k, v, causal), first)
