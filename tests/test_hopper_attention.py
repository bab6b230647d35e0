"""Attention for Hopper against float64: what it refuses, anywhere; what it computes, on Hopper."""

from types import SimpleNamespace

import pytest
import torch
from conftest import INF, NAN, assert_heads, randn, randn_heads

NAME = "chapter21/08_hopper_flash_attention.py"
DTYPES = [torch.float16, torch.bfloat16]


@pytest.fixture(scope="module")
def module(script):
    return script(NAME)


@pytest.fixture(scope="module")
def hopper(module):
    """The module, on a GPU that its kernel runs on."""
    if module.not_here():
        pytest.skip(module.not_here())
    return module


def launch(hopper, q, k, v, causal, config):
    """The kernel into a tensor full of NaN: every element must be written."""
    out = torch.full_like(q, NAN)
    hopper.launch_hopper(q, k, v, out, causal, q.shape[3] ** -0.5, **config)
    return out


def test_what_it_refuses(module):
    call = module.hopper_flash_attention
    q, k, v = randn_heads("cpu", 1, 2, 2, 5, 6, 64, torch.bfloat16)
    for bad in (
        (q[0], k, v),
        (q, k, v[:, :, :5]),
        (q, k[..., :8], v[..., :8]),
        (q, k.expand(2, 2, 6, 64), v.expand(2, 2, 6, 64)),
        (q[:, :1], k, v),
        (q[..., :32], k[..., :32], v[..., :32]),
        (q[..., :0], k[..., :0], v[..., :0]),
        (q, k[:, :0], v[:, :0]),
    ):
        with pytest.raises(ValueError, match=r"want .*; got q \(.*\), k \(.*\), v \(.*\)$"):
            call(*bad)
    with pytest.raises(TypeError, match="v is torch.float16"):
        call(q, k, v.half())
    with pytest.raises(TypeError, match="q is torch.float32"):
        call(q.float(), k.float(), v.float())
    with pytest.raises(ValueError, match="forward only, but k requires grad"):
        call(q, k.clone().requires_grad_(), v)
    with pytest.raises(ValueError, match="q is on cpu, v meta"):
        call(q, k, v.to("meta"))
    for scale in 0.0, -1.0, INF, NAN:
        with pytest.raises(ValueError, match="scale must be from 1e-30 to 1e30"):
            call(q, k, v, scale=scale)
    with pytest.raises(ValueError, match="q is on cpu, want a GPU of compute capability 9.0"):
        call(q, k, v)


def test_what_is_copied(module):
    """Only what the copy engine cannot address."""
    x = torch.zeros(3, 2, 4, 40, 128, dtype=torch.bfloat16)
    wide = torch.zeros(2, 4, 40, 129, dtype=torch.bfloat16)
    for fits in x[0], x[0].transpose(1, 2), x[0][..., :64], x[0][:, :, 3:], x[0, :1, :1].mT.mT:
        assert module.copyable(fits) is fits
    for not_fits in (
        x[0].mT,  # columns apart
        x[0][..., ::2],
        x[0, :, :1].expand(2, 4, 40, 128),  # heads that are one
        wide[..., :128],  # rows not at 16 bytes
        x[0][..., 1:65],
    ):
        copy = module.copyable(not_fits)
        assert copy.is_contiguous() and copy.data_ptr() != not_fits.data_ptr()
        assert torch.equal(copy, not_fits)


def test_the_command_line(module):
    assert module.shape_to_measure("128,1,4096") == (128, True, 4096)
    for wrong in "128,1", "80,0,4096", "64,0,100":
        with pytest.raises(ValueError):
            module.shape_to_measure(wrong)
    assert module.peers_to_measure("cudnn,CuTe") == ["cudnn", "cute"]
    assert module.peers_to_measure("") == []


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("num_m", [1, 2, 3, 8, 9])
@pytest.mark.parametrize("heads, programs", [(1, 1), (1, 7), (5, 4), (40, 132), (41, 3)])
def test_every_tile_is_taken_once(module, heads, programs, num_m, causal, monkeypatch):
    """The kernel's arithmetic in Python; work is spread to within two tiles, or pairs if causal."""
    # launch_hopper starts no more programs than this, as none may be without a tile.
    programs = min(programs, heads * -(-num_m // 2) if causal else heads * num_m)
    monkeypatch.setattr(module, "share", module.share.fn)
    tiling = num_m, heads, heads, 128 * num_m
    taken, blocks = [], []
    for pid in range(programs):
        language = SimpleNamespace(
            program_id=lambda axis, pid=pid: pid,
            num_programs=lambda axis: programs,
            where=lambda condition, a, b: a if condition else b,
            minimum=min, maximum=max, cdiv=module.triton.cdiv,
        )  # fmt: skip
        monkeypatch.setattr(module, "gl", language)
        paired, tiles = module.count_tiles.fn(tiling, causal)
        mine = [module.find_tile.fn(t, paired, tiling, 128, 128, causal) for t in range(tiles)]
        taken += [tile[:2] for tile in mine]
        blocks.append(sum(tile[2] for tile in mine))
    assert sorted(taken) == [(h, 128 * m) for h in range(heads) for m in range(num_m)]
    assert min(blocks) > 0 and max(blocks) - min(blocks) <= 2 * (num_m + 1)


SIZES = [1, 63, 64, 65, 127, 200, 513]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("M", SIZES)
def test_every_pair_of_awkward_lengths(hopper, M, D, causal):
    for N in SIZES:
        for dtype in DTYPES:
            q, k, v = randn_heads("cuda", 2, 3, 3, M, N, D, dtype)
            config = hopper.choose_config(D, causal, N)
            assert_heads(launch(hopper, q, k, v, causal, config), q, k, v, causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rung", range(4))
def test_every_rung_with_more_tiles_than_programs(hopper, rung, causal):
    config = list(hopper.RUNGS.values())[rung]
    for M, N in (300, 700), (700, 300), (1024, 1024):
        q, k, v = randn_heads("cuda", 5, 20, 20, M, N, 128, torch.bfloat16)
        assert_heads(launch(hopper, q, k, v, causal, config), q, k, v, causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("D", [64, 128])
def test_grouped_heads_in_many_tiles(hopper, D, causal):
    for B, Hq, Hkv, M, N in (2, 6, 2, 130, 200), (7, 40, 8, 300, 400), (1, 5, 1, 3000, 3000):
        q, k, v = randn_heads("cuda", B, Hq, Hkv, M, N, D, torch.bfloat16)
        out = hopper.hopper_flash_attention(q, k, v, causal, 0.2)
        assert_heads(out, q, k, v, causal, 0.2)


@pytest.mark.parametrize("D", [64, 128])
def test_strided_tensors(hopper, D):
    interleaved = randn(2, 140, 3, 4, D).bfloat16().cuda().permute(2, 0, 3, 1, 4)
    wide = randn(3, 2, 4, 140, D + 8).bfloat16().cuda()
    for q, k, v in (
        interleaved,
        wide[..., 8:],
        wide[..., 1 : D + 1],  # not at 16 bytes
        randn(3, 2, 4, D, 140).bfloat16().cuda().mT,  # columns apart
        randn(3, 2, 4, 140, 2 * D).bfloat16().cuda()[..., ::2],
        randn(3, 2, 1, 140, D).bfloat16().cuda().expand(3, 2, 4, 140, D),
    ):
        for causal in False, True:
            out = hopper.hopper_flash_attention(q, k, v, causal)
            assert_heads(out, q, k, v, causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("D", [64, 128])
def test_reads_and_writes_nothing_past_the_ends(hopper, D, causal):
    buffers = torch.full((3, 2, 3, 300, D), NAN, dtype=torch.bfloat16, device="cuda")
    guarded = torch.full((2, 3, 300, D), 7.0, dtype=torch.bfloat16, device="cuda")
    M, N = 130, 77
    q, k, v = (
        x[:, :, :length].copy_(randn(2, 3, length, D, seed=i))
        for i, (x, length) in enumerate(zip(buffers, (M, N, N), strict=True))
    )
    out = guarded[:, :, :M]
    hopper.launch_hopper(q, k, v, out, causal, D**-0.5, **hopper.choose_config(D, causal, N))
    assert_heads(out.contiguous(), q, k, v, causal)
    assert (guarded[:, :, M:] == 7).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("D", [64, 128])
def test_a_nan_stays_in_its_row(hopper, D, causal):
    q, k, v = randn_heads("cuda", 1, 2, 1, 200, 300, D, torch.bfloat16)
    q[0, 1, 70, 3] = q[0, 0, 199, 0] = NAN
    out = hopper.hopper_flash_attention(q, k, v, causal)
    assert out[0, 1, 70].isnan().all() and out[0, 0, 199].isnan().all()
    assert out.isnan().sum() == 2 * D
    assert_heads(out, q, k, v, causal)


@pytest.mark.parametrize("D", [64, 128])
def test_hard_scores(hopper, D):
    call = hopper.hopper_flash_attention
    q, k, v = randn_heads("cuda", 1, 2, 2, 200, 300, D, torch.bfloat16)
    assert_heads(call(10 * q, 10 * k, v), 10 * q, 10 * k, v)
    # The scores of the block that comes first are -inf, then all: nothing to see gives zeros.
    q, k = torch.zeros_like(q), torch.zeros_like(k)
    q[..., 0] = 1
    k[:, :, 150:, 0] = -INF
    assert_heads(call(q, k, v), q, k, v)
    k[..., 0] = -INF
    assert not call(q, k, v).any()
    k[:, :, 3, 0] = INF
    assert call(q, k, v).isnan().all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("D", [64, 128])
def test_nothing_to_see_or_to_write(hopper, D, causal):
    call = hopper.hopper_flash_attention
    q, k, v = randn_heads("cuda", 1, 2, 1, 3, 5, D, torch.bfloat16)
    assert not call(q, k[:, :, :0], v[:, :, :0], causal).any()
    assert call(q[:, :, :0], k, v, causal).shape == (1, 2, 0, D)
    assert call(q[:0], k[:0], v[:0], causal).shape == (0, 2, 3, D)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("D", [64, 128])
def test_more_heads_than_a_grid_is_high(hopper, D, causal):
    q, k, v = randn_heads("cuda", 2, 35000, 17500, 2, 3, D, torch.bfloat16)
    assert_heads(hopper.hopper_flash_attention(q, k, v, causal), q, k, v, causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("D", [64, 128])
def test_more_than_2_to_the_31_elements(hopper, D, causal):
    heads = 2**31 // (D * 2048) + 3
    q = torch.randn(1, heads, 2048, D, device="cuda", dtype=torch.bfloat16)
    out = hopper.hopper_flash_attention(q, q, q, causal)
    for some in slice(0, 2), slice(heads - 2, heads):
        x = q[:, some]
        assert_heads(out[:, some].contiguous(), x, x, x, causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D", [64, 128])
def test_long_rows_repeat_bit_for_bit(hopper, D, dtype, causal):
    q, k, v = randn_heads("cuda", 3, 16, 8, 1500, 2111, D, dtype)
    first = hopper.hopper_flash_attention(q, k, v, causal)
    assert_heads(first, q, k, v, causal)
    for _ in range(50):
        assert torch.equal(hopper.hopper_flash_attention(q, k, v, causal), first)
