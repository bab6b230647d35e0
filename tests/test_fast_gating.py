"""The fast gating against float64: every rung, dtype and hard row, strided rows, counts."""

import pytest
import torch
from conftest import INF, NAN, randn

NAME = "chapter21/09_fast_moe_gating.py"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NEGATIVE_NAN = torch.tensor([-4194304], dtype=torch.int32).view(torch.float32).item()


@pytest.fixture(scope="module")
def fast(script):
    return script(NAME)


def assert_gated(fast, x, k, renormalize=True, counts=None):
    """ids exactly, of equal logits the lowest first; weights to float32's precision; counts."""
    before = counts.clone() if counts is not None else None
    weights, ids = fast.moe_topk_gating(x.to(fast.DEVICE), k, renormalize, counts)
    assert weights.dtype == torch.float32 and ids.dtype == torch.int32
    logits = x.cpu().double() + 0.0  # -0.0 ties with 0.0
    want = torch.sort(logits, dim=1, descending=True, stable=True).indices[:, :k]
    assert torch.equal(ids.cpu().long(), want)
    p = torch.softmax(logits, dim=1).gather(1, want)
    p = p / p.sum(dim=1, keepdim=True) if renormalize else p
    torch.testing.assert_close(weights.cpu().double(), p, rtol=1e-5, atol=1e-30)
    if counts is not None:
        chosen = torch.bincount(ids.flatten().cpu(), minlength=x.shape[1]).int()
        assert torch.equal((counts - before).cpu(), chosen)
    return weights, ids


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "M, E, k",
    [(1, 1, 1), (5, 3, 2), (37, 7, 7), (40, 8, 2), (33, 16, 16), (3, 17, 3), (3, 17, 10)]
    + [(3, 30, 16), (2, 64, 8)]
    + [(3, 100, 6), (3, 200, 5), (33, 160, 4), (4, 160, 5), (2, 384, 1), (2, 256, 16), (2, 1023, 2)]
    + [(2, 1024, 2)],
)
def test_any_shape_and_dtype(fast, M, E, k, dtype):
    assert_gated(fast, randn(M, E).to(dtype), k)


@pytest.mark.parametrize("few_tokens", [0, 2**31])
@pytest.mark.parametrize(
    "M, E, k", [(9, 12, 5), (9, 64, 16), (3, 128, 4), (3, 384, 6), (2, 512, 3)]
)
def test_a_token_in_several_threads(fast, M, E, k, few_tokens, monkeypatch):
    """The threads per token depend on E and on whether there are many tokens."""
    monkeypatch.setattr(fast, "FEW_TOKENS", few_tokens)
    ramp = torch.arange(E)[None] / 4
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.cat([ramp, -ramp, randn(M, E)]).to(dtype)
        assert_gated(fast, x, k)
        assert_gated(fast, x, k, renormalize=False)
        assert_gated(fast, x, k, counts=torch.zeros(E, dtype=torch.int32, device=fast.DEVICE))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "rung", ["one token per program", "sixteen tokens", "packed", "one thread", "int64"]
)
def test_every_rung(fast, rung, dtype, monkeypatch):
    x = randn(20, 96).to(dtype)
    launch = {
        "one token per program": lambda *tensors: fast.launch_probabilities(*tensors, ROWS=1),
        "sixteen tokens": lambda *tensors: fast.launch_probabilities(*tensors, ROWS=16),
        "packed": fast.launch_packed,
        "one thread": lambda *tensors: fast.launch_network(*tensors, parts=1),
        "int64": fast.launch_network,
    }[rung]
    if rung == "int64":
        monkeypatch.setattr(fast, "key_type", lambda dtype: fast.tl.int64)
    assert fast.gating_right(x, 5, launch=launch)


@pytest.mark.parametrize("E, k", [(8, 3), (75, 4)])
def test_probabilities_among_all_experts(fast, E, k):
    for dtype in DTYPES:
        assert_gated(fast, randn(5, E).to(dtype) * 3, k, renormalize=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("E", [6, 70])
def test_ties_take_the_lowest_id(fast, E, dtype):
    x = torch.randint(-1, 2, (20, E), generator=torch.Generator().manual_seed(0)).to(dtype)
    x[0], x[1], x[2, ::2] = 0, -0.0, -0.0
    x[3], x[3, E // 2], x[3, -1] = -INF, 1, -5
    assert_gated(fast, x, 4)


@pytest.mark.parametrize("padding", [0, 30, 70])
@pytest.mark.parametrize(
    "row", [[1, NAN, 2, 0], [1, NEGATIVE_NAN, 2, 0], [NAN] * 4, [-INF] * 4, [1, INF, 2, 0]]
)
def test_a_bad_row_spoils_no_other(fast, row, padding):
    for dtype in DTYPES:
        x = torch.tensor([row, [1.0, 2, 3, 4]])
        x = torch.cat([x, torch.full((2, padding), -INF)], dim=1).to(dtype)
        weights, ids = (t.cpu() for t in fast.moe_topk_gating(x.to(fast.DEVICE), 2))
        assert weights[0].isnan().all()
        assert ids[0, 0] != ids[0, 1] and 0 <= ids[0].min() and ids[0].max() < 4 + padding
        torch.testing.assert_close(weights[1], torch.tensor([0.7310586, 0.2689414]))
        assert ids[1].tolist() == [3, 2]


def test_it_chooses_on_logits_where_probabilities_underflow(fast):
    for k in (2, 3):
        weights, ids = fast.moe_topk_gating(
            torch.tensor([[200.0, -1, 0, -2]], device=fast.DEVICE), k
        )
        assert ids.tolist() == [[0, 2, 1][:k]] and weights.tolist() == [[1, 0, 0][:k]]


def test_known_weights(fast):
    x = torch.tensor([[0.1, 0.9, -1, 2]], device=fast.DEVICE)
    for renormalize, want in (True, [0.75026, 0.24974]), (False, [0.65264, 0.21725]):
        weights, ids = fast.moe_topk_gating(x, 2, renormalize)
        assert ids.tolist() == [[3, 1]]
        torch.testing.assert_close(weights.cpu(), torch.tensor([want]), rtol=0, atol=1e-5)


def test_strided_rows_and_columns(fast):
    buffer = randn(9, 200)
    alone = buffer.as_strided((1, 70), (2**31, 1))
    for x in (buffer[:, 3:67], buffer[:, 4:12], buffer.t()[:70], buffer[:1, :70].expand(3, 70)):
        assert_gated(fast, x, 3)
    assert_gated(fast, alone, 3)
    assert [t.shape for t in fast.moe_topk_gating(buffer[:0].to(fast.DEVICE), 2)] == [(0, 2)] * 2


@pytest.mark.parametrize("E, k", [(8, 2), (70, 5)])
def test_tokens_per_expert_are_added(fast, E, k):
    counts = torch.full((E,), 7, dtype=torch.int32, device=fast.DEVICE)
    assert_gated(fast, randn(150, E), k, counts=counts)


def test_row_offsets_past_2_to_the_31(fast):
    stride = 2**30
    buffer = torch.empty(2 * stride + 16, dtype=torch.float16, device=fast.DEVICE)
    x = buffer.as_strided((3, 4), (stride, 1))
    x.copy_(randn(3, 4))
    assert_gated(fast, x, 2)


def test_a_triton_that_cannot_compile_it(fast, monkeypatch, capsys):
    monkeypatch.setattr(fast, "DEVICE", "cuda")
    monkeypatch.setattr(fast.triton, "__version__", "3.4.0")
    assert fast.too_old() == "needs triton 3.5 or newer on a GPU, this is triton 3.4.0"
    with pytest.raises(SystemExit, match="77"):
        fast.section_21_3_fast()
    assert capsys.readouterr() == ("", f"skipped: {fast.too_old()}\n")
    monkeypatch.setattr(fast.triton, "__version__", "3.5.0")
    assert fast.too_old() == ""


def test_what_it_refuses(fast):
    x = randn(4, 8).to(fast.DEVICE)
    for bad in (x.int(), x.double()):
        with pytest.raises(TypeError, match="logits must be float32"):
            fast.moe_topk_gating(bad, 2)
    with pytest.raises(ValueError, match="forward only"):
        fast.moe_topk_gating(x.clone().requires_grad_(), 2)
    for bad in (x[0], x[:, :0], x[:, :1].expand(4, 1025)):
        with pytest.raises(ValueError, match="E <= 1024"):
            fast.moe_topk_gating(bad, 1)
    for k in (0, 9, 17):
        with pytest.raises(ValueError, match="between 1 and 8 for 8 experts"):
            fast.moe_topk_gating(x, k)
    counts = torch.zeros(16, dtype=torch.int32, device=fast.DEVICE)
    for bad in (counts[:7], counts[:8].float(), counts[::2]):
        with pytest.raises(ValueError, match="counts must be contiguous int32"):
            fast.moe_topk_gating(x, 2, counts=bad)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("M, E, k", [(70001, 8, 2), (40000, 100, 6), (20011, 256, 8)])
def test_many_tokens_the_same_every_time(fast, M, E, k, dtype):
    if fast.DEVICE == "cpu":
        pytest.skip("too many for the interpreter")
    x = randn(M, E).to(dtype)
    counts = torch.zeros(E, dtype=torch.int32, device="cuda")
    weights, ids = assert_gated(fast, x, k, counts=counts)
    for _ in range(20):
        again = fast.moe_topk_gating(x.cuda(), k)
        assert torch.equal(again[0], weights) and torch.equal(again[1], ids)
