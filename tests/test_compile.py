"""Every kernel that a script launches compiles for every GPU we name and fits its shared memory."""

import json
import re
import subprocess
import sys

import pytest

from harness.environment import at_least, version
from harness.run import ROOT, find_scripts

# Bytes of shared memory that one block may use.
SHARED_LIMIT = {
    "sm_75": 65536,
    "sm_80": 166912,
    "sm_86": 101376,
    "sm_89": 101376,
    "sm_90": 232448,
    "sm_100": 232448,
    "sm_120": 101376,
    "gfx942": 65536,
}
# For one kind of GPU only.
ONLY = {"chapter21/08_hopper_flash_attention.py": {"sm_90"}}
COMPILE = ROOT / "tests" / "compile_kernels.py"
# A launch of sizes 1 turns every size and stride into a constant.
SIZE_ONE = """
import importlib.util, torch
def load(name):
    spec = importlib.util.spec_from_file_location("s", {root!r} + "/" + name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
one, row = torch.randn(1, 1), torch.randn(1, 2)
load("chapter08_softmax/01_brute_force_softmax.py").softmax_brute_force(one)
load("chapter08_softmax/02_online_softmax.py").softmax(one)
load("chapter09_flashattn/01_scalar_flash_attention.py").flashatt(one[0], one[0], one[0])
complete = load("chapter21/04_standalone_complete.py")
complete.flash_attention(one, one, one)
complete.causal_flash_attention(one, one, one)
complete.moe_top2_gating(row)
"""
BAD = """
import torch, triton, triton.language as tl
@triton.jit
def {name}(x_ptr, N, BLOCK: tl.constexpr):
    {body}
{name}[(1,)](torch.zeros(16), 3, BLOCK=16)
"""


def compile_script(path):
    done = subprocess.run(
        [sys.executable, COMPILE, path], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(rows, targets=frozenset(SHARED_LIMIT)):
    """Assert that every row compiled and fits; that there is one at least for every target."""
    too_old = set() if at_least(version("triton"), (3, 5)) else {"gfx942"}
    for row in rows:
        if row["target"] not in too_old:
            where = f"{row['kernel']} for {row['target']}"
            assert row["error"] == "", f"{where}: {row['error']}"
            limit = SHARED_LIMIT[row["target"]]
            assert row["shared"] <= limit, f"{where}: shared memory {row['shared']} > {limit}"
            # A few bytes, used once a tile, cost nothing; a kilobyte in the loop 40% of the speed.
            assert row.get("stack", 0) <= 32, f"{where}: {row['stack']} bytes spilled"
    assert {row["target"] for row in rows} == targets


@pytest.mark.parametrize("name", find_scripts())
def test_kernels_compile(name):
    if name in ONLY and not at_least(version("triton"), (3, 6)):
        pytest.skip("its Gluon needs triton 3.6")
    rows = compile_script(ROOT / name)
    kernels = {row["kernel"] for row in rows}
    text = (ROOT / name).read_text("utf-8")
    named = set(re.findall(r"@(?:triton|gluon)\.jit.*\ndef (\w*kernel\w*)", text))
    if not at_least(version("triton"), (3, 5)):  # softmax's last rung is in Gluon
        named -= {"clear_kernel", "split_row_shared_kernel"}
    assert kernels == named
    check(rows, ONLY.get(name, set(SHARED_LIMIT)))


def test_kernels_compile_where_every_size_is_one(tmp_path):
    path = tmp_path / "size_one.py"
    path.write_text(SIZE_ONE.format(root=str(ROOT)), "utf-8")
    rows = compile_script(path)
    assert len({row["kernel"] for row in rows}) == 6
    check(rows)


@pytest.mark.parametrize(
    "name, body, complaint",
    [
        ("continues", "for i in range(N):\n        if i == 1: continue", "Continue"),
        (
            "small_dot",
            "t = tl.zeros((4, 4), tl.float32); tl.store(x_ptr, tl.sum(tl.dot(t, t)))",
            "small_dot for sm_75",
        ),
    ],
)
def test_what_only_a_compiler_refuses_is_noticed(name, body, complaint, tmp_path):
    path = tmp_path / f"{name}.py"
    path.write_text(BAD.format(name=name, body=body), "utf-8")
    with pytest.raises(AssertionError, match=complaint):
        check(compile_script(path))


def test_too_much_shared_memory_and_spilling_are_noticed():
    row = {"kernel": "large", "target": "sm_86", "shared": 101377, "error": ""}
    with pytest.raises(AssertionError, match="101377 > 101376"):
        check([row])
    with pytest.raises(AssertionError, match="1292 bytes spilled"):
        check([row | {"shared": 0, "stack": 1292}])
