"""--bench without a GPU: what it refuses, and its arithmetic, with a stand-in for the clock."""

import contextlib
import math
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from harness.run import ROOT

FAST = [
    "chapter08_softmax/04_fast_softmax.py",
    "chapter09_flashattn/03_fast_scalar_attention.py",
    "chapter21/07_fast_flash_attention.py",
    "chapter21/08_hopper_flash_attention.py",
    "chapter21/09_fast_moe_gating.py",
]


@pytest.fixture(scope="module")
def bench(script):
    """harness.bench, which imports triton: so after a script has chosen the backend."""
    script(FAST[0])
    from harness import bench

    return bench


@pytest.fixture
def one_ms(bench, monkeypatch):
    """Whatever is measured takes 1 ms; graphs run when they are captured."""
    monkeypatch.setattr(bench.triton.testing, "do_bench", lambda run, **options: (run(), 1.0)[1])
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


@pytest.mark.parametrize("name", FAST)
def test_bench_without_a_gpu_is_one_line(name, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    command = [sys.executable, ROOT / name, "--bench", "--out", tmp_path / "results"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("--bench needs a") and done.stderr.count("\n") == 1
    assert not (tmp_path / "results").exists()


def qkv(N=300):
    torch.manual_seed(0)
    return torch.randn(3, 2, 2, N, 16)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_error_is_relative(bench, causal):
    q, k, v = qkv()
    right = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    assert bench.attention_error(right, q, k, v, causal) < 1e-6
    assert bench.attention_error(right * 1.01, q, k, v, causal) == pytest.approx(0.01, rel=1e-3)
    assert bench.attention_error(right, q, k, v, not causal) > 0.1


def test_a_row_of_the_attention_table(bench, one_ms, capsys):
    q, k, v = qkv()
    right = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    peers = bench.attention_peers(["cute", "flashattention"])
    assert peers == ["SDPA FlashAttention-2", "flash-attn CuTe"]
    cell = bench.attention_cell(right, lambda: None, q, k, v, False, peers[1:])
    # 4 B H N N D operations in 1 ms; a peer that is not installed leaves a gap and says why.
    assert cell["ours"] == pytest.approx(4 * 2 * 2 * 300 * 300 * 16 / 1e9)
    assert math.isnan(cell["flash-attn CuTe"]) and "flash_attn" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="wrong result: N = 300"):
        bench.attention_cell(right * 1.1, lambda: None, q, k, v, False, [])


def test_a_row_of_the_gating_table(one_ms, script, capsys):
    gate = script(FAST[-1])

    def right(x, k):
        top = torch.topk(x, k)
        return torch.softmax(top.values, dim=1), top.indices

    def wrong(x, k):
        return torch.full((len(x), k), 1 / k), torch.topk(x, k).indices

    gate.BENCH_PEER_CELLS |= {"right": [(8, 2)], "wrong": [(8, 2)], "elsewhere": []}
    peers = {"right": right, "wrong": wrong, "elsewhere": right}
    cell = gate.bench_cell(64, 8, 2, torch.float32, peers)
    assert cell["us"] == cell["copy us"] == pytest.approx(10)  # a hundred runs in 1 ms
    assert cell["right / ours"] == cell["of copy"] == 1
    assert math.isnan(cell["wrong / ours"]) and "wrong result" in capsys.readouterr().err
    assert "elsewhere / ours" not in cell


def test_tables_and_plots_on_disk(bench, tmp_path, monkeypatch, capsys):
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("matplotlib").use("Agg")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A GPU")
    cells = [
        {"D": D, "causal": causal, "N": N, "ours": 100.0, "SDPA cuDNN": 90.0}
        for D in (64, 128)
        for causal in (False, True)
        for N in (512, 1024)
    ]
    table = bench.save_table(iter(cells), tmp_path / "attention.csv")
    written = pandas.read_csv(tmp_path / "attention.csv")
    assert len(written) == 8 and {"GPU", "torch", "triton", "date"} < set(written.columns)
    assert "SDPA cuDNN" in capsys.readouterr().out
    bench.draw_attention(tmp_path / "attention.png", table, "ours", ["SDPA cuDNN"])
    assert (tmp_path / "attention.png").read_bytes().startswith(b"\x89PNG")


def test_an_interrupted_table_keeps_its_cells_and_the_table_before(bench, tmp_path, monkeypatch):
    pandas = pytest.importorskip("pandas")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A GPU")
    path = tmp_path / "softmax.csv"
    bench.save_table([{"columns": 1}], path)

    def interrupted():
        yield {"columns": 2}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench.save_table(interrupted(), path)
    assert list(pandas.read_csv(path)["columns"]) == [1]
    assert list(pandas.read_csv(tmp_path / "softmax.csv.part")["columns"]) == [2]
