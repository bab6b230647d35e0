"""What only a GPU can show: more than 2^31 elements, and runs that repeat bit for bit."""

import pytest
import torch
from conftest import ATTENTIONS, SOFTMAXES, randn

GATING = [("chapter21/03_moe_gating.py", "moe_top2_gating")]
SCALAR = [("chapter09_flashattn/01_scalar_flash_attention.py", "flashatt")]
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

ROWS = 2**31 // 64 + 5  # of 64 float32: 8 GB, and the last rows lie past 2^31 elements


def large(rows=ROWS, columns=64):
    return torch.randn(rows, columns, device="cuda")


@pytest.mark.parametrize("name, function", SOFTMAXES)
def test_softmax_of_more_than_2_to_the_31_elements(name, function, script):
    x = large(2**31 // 32768 + 5, 32768)
    z = getattr(script(name), function)(x, B1=1024)
    torch.testing.assert_close(z[-9:], torch.softmax(x[-9:], dim=1), rtol=1e-5, atol=0)


@pytest.mark.parametrize("name, function", ATTENTIONS)
def test_attention_of_more_than_2_to_the_31_elements(name, function, script):
    q, k, v = large(), large(40), large(40)
    out = getattr(script(name), function)(q, k, v)
    # No key lies past row 40, so causal or not, the last rows see all of them.
    scores = q[-9:].double() @ k.double().T / 8
    want = torch.softmax(scores, dim=1) @ v.double()
    torch.testing.assert_close(out[-9:].double(), want, rtol=1e-5, atol=1e-5)


def test_gating_of_more_than_2_to_the_31_elements(script):
    logits = large()
    w0, w1, idx0, idx1 = (x[-9:] for x in script(GATING[0][0]).moe_top2_gating(logits))
    want, ids = torch.topk(torch.softmax(logits[-9:], dim=1), 2)
    assert torch.equal(torch.stack([idx0, idx1], dim=1).long(), ids)
    torch.testing.assert_close(torch.stack([w0, w1], dim=1), want / want.sum(dim=1, keepdim=True))


@pytest.mark.parametrize("name, function", SOFTMAXES + ATTENTIONS + GATING + SCALAR)
def test_20_runs_are_equal_bit_for_bit(name, function, script):
    count = 1 if (name, function) in SOFTMAXES + GATING else 3
    tensors = [randn(500, 64, seed=i).cuda() for i in range(count)]
    if (name, function) in SCALAR:
        tensors = [x.flatten() for x in tensors]
    run = getattr(script(name), function)

    def results():
        out = run(*tensors)
        return torch.stack(out) if isinstance(out, tuple) else out

    first = results()
    assert all(torch.equal(results(), first) for _ in range(20))
