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
