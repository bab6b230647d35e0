"""What several test files need."""

import importlib.util
import math

import pytest
import torch

from harness.run import ROOT

SOFTMAXES = [
    ("chapter08_softmax/01_brute_force_softmax.py", "softmax_brute_force"),
    ("chapter08_softmax/02_online_softmax.py", "softmax"),
]
ATTENTIONS = [
    ("chapter21/01_flash_attention_core.py", "flash_attention"),
    ("chapter21/02_causal_flash_attention.py", "causal_flash_attention"),
]
INF, NAN = math.inf, math.nan
# Rows of which some softmax has been wrong, two-dimensional.
HARD_ROWS = [
    [[-2e6, -2e6 - 1, -2e6 - 2]],
    [[-200.0, -201, -202, -203]],
    [[-5.0] * 200] * 2,
    [[-1.0, -2, -3]],
    [[-INF] * 200 + [1, 2]],
    [[-INF] * 4, [1, 2, 3, 4]],
    [[1, INF, 2], [1, 2, 3]],
    [[1, NAN, 2], [1, 2, 3]],
    [[0.0, -100, -104]],
    [[3e38, -3e38, 0]],
    [[0.0] * 31 + [88] * 2],
    [[100.0] + [0] * 40],  # e^100 is past float32: the maximum of an early block counts too
]
# Errors of a fast attention, of the largest value: 16 bits round the weights and the result.
HEADS_TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def load_script(name):
    """Import a script by its path in the repository; its kernels then run where it chose."""
    spec = importlib.util.spec_from_file_location(name.replace("/", "_"), ROOT / name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def script():
    """load_script, each script once."""
    loaded = {}
    return lambda name: (
        loaded[name] if name in loaded else loaded.setdefault(name, load_script(name))
    )


def launcher(script, name, function):
    """A launcher that takes CPU tensors, whatever device the script chose, and gives them back."""
    module = script(name)

    def call(*tensors, **options):
        out = getattr(module, function)(*(t.to(module.DEVICE) for t in tensors), **options)
        return tuple(t.cpu() for t in out) if isinstance(out, tuple) else out.cpu()

    return call


@pytest.fixture(scope="session", params=SOFTMAXES, ids=[function for _, function in SOFTMAXES])
def softmax(request, script):
    return launcher(script, *request.param)


@pytest.fixture(scope="session")
def causal(script):
    return launcher(script, *ATTENTIONS[1])


@pytest.fixture(scope="session")
def flashatt(script):
    return launcher(script, "chapter09_flashattn/01_scalar_flash_attention.py", "flashatt")


@pytest.fixture(scope="session", params=ATTENTIONS, ids=[function for _, function in ATTENTIONS])
def attention(request, script):
    call = launcher(script, *request.param)
    call.causal = request.param[1].startswith("causal")
    return call


@pytest.fixture(scope="session")
def gating(script):
    return launcher(script, "chapter21/03_moe_gating.py", "moe_top2_gating")


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def randn_heads(device, B, Hq, Hkv, M, N, D, dtype=torch.float32):
    """q [B, Hq, M, D], k and v [B, Hkv, N, D]."""
    shapes = (B, Hq, M, D), (B, Hkv, N, D), (B, Hkv, N, D)
    return [randn(*s, seed=i).to(dtype).to(device) for i, s in enumerate(shapes)]


def assert_heads(out, q, k, v, causal=False, scale=None):
    """out is the attention of q [B, Hq, M, D] and k, v [B, Hkv, N, D], NaN where that is."""
    assert out.shape == q.shape and out.dtype == q.dtype and out.is_contiguous()
    tolerance = HEADS_TOLERANCE[q.dtype]
    q, k, v = (x.to(out.device).double() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("bhmd,bhnd->bhmn", q, k) * (scale or q.shape[3] ** -0.5)
    if causal:
        M, N = scores.shape[2:]
        hidden = torch.arange(M)[:, None] < torch.arange(N)
        scores.masked_fill_(hidden.to(q.device), -INF)
    want = torch.softmax(scores, dim=3) @ v
    atol = tolerance * want.nan_to_num().abs().max().item()
    torch.testing.assert_close(out.double(), want, rtol=0, atol=atol, equal_nan=True)
