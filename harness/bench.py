"""What the fast scripts' --bench share: results on disk, timing, attention's inputs and peers."""

import datetime
import functools
import math
import os
import pathlib
import sys

import torch
import triton

from harness.environment import INTERPRET_WORDS
from harness.run import ROOT


def results_folder(out=None):
    """The folder out, or benchmarks/<gpu>, made if need be; SystemExit if there is no GPU."""
    interpret = os.environ.get("TRITON_INTERPRET", "").lower() in INTERPRET_WORDS
    if interpret or not torch.cuda.is_available():
        raise SystemExit("--bench needs a GPU and TRITON_INTERPRET unset")
    try:
        import matplotlib
        import pandas  # noqa: F401, to fail before measuring
    except ImportError:
        raise SystemExit("--bench needs pandas and matplotlib: pip install them") from None
    matplotlib.use("Agg")
    gpu = torch.cuda.get_device_name().lower().replace(" ", "-")
    folder = ROOT / "benchmarks" / gpu if out is None else pathlib.Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def save_table(cells, path):
    """Write cells, an iterable of dicts, to path with GPU, versions and date; print. A DataFrame.

    Until the last has come they are in path.part: an interrupted run keeps what it has measured,
    and leaves the table of an earlier one alone.
    """
    import pandas

    part, measured = path.with_name(path.name + ".part"), []
    stamp = {"GPU": torch.cuda.get_device_name(), "torch": torch.__version__}
    stamp |= {"triton": triton.__version__, "date": datetime.date.today().isoformat()}
    for cell in cells:
        measured.append(cell)
        table = pandas.DataFrame(measured)
        table.assign(**stamp).to_csv(part, index=False, float_format="%.5g")
    part.replace(path)
    print(table.to_string(index=False, float_format=lambda x: f"{x:.4g}"))
    return table.assign(**stamp)


def draw(path, panels, plot, width=6):
    """Let plot(axes) draw on so many panels with one y axis from 0; write the figure to path."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, panels, figsize=(width * panels, 4.5), sharey=True, squeeze=False
    )
    plot(axes[0])
    axes[0][0].set_ylim(bottom=0)  # of all panels, now that all lines are drawn
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def median_ms(run):
    """Median ms of run()."""
    return triton.testing.do_bench(run, warmup=10, rep=40, return_mode="median")


def graph_ms(run):
    """Median ms of run(), replayed from a CUDA graph, as Python may take longer to launch it."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return median_ms(graph.replay)


def attention_inputs(N, D, tokens=16384, dtype=torch.bfloat16):
    """Random q, k, v [B, H, N, D] with B * N tokens and H * D = 2048."""
    torch.manual_seed(0)
    return torch.randn(3, tokens // N, 2048 // D, N, D, device="cuda").to(dtype)


def attention_tflops(run, q, causal):
    """TFLOP/s of run(): two products of 2 * N * N * D operations a head, half of it if causal."""
    B, H, N, D = q.shape
    return 4 * B * H * N * N * D / (2 if causal else 1) / graph_ms(run) / 1e9


def attention_error(out, q, k, v, causal):
    """Relative error against float64: the first and last 256 queries of the last head."""
    q, k, v, out = (x[-1, -1].double() for x in (q, k, v, out))
    position = torch.arange(len(q), device=q.device)
    some = torch.cat([position[:256], position[-256:]])
    scores = q[some] @ k.T * q.shape[1] ** -0.5
    if causal:
        scores.masked_fill_(some[:, None] < position, -math.inf)
    want = torch.softmax(scores, dim=1) @ v
    return ((out[some] - want).norm() / want.norm()).item()


def sdpa(q, k, v, causal, backend="FLASH_ATTENTION"):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def run():
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return run


def flex(q, k, v, causal):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def seen(batch, head, query, key):
        return query >= key

    mask = create_block_mask(seen, None, None, *[q.shape[2]] * 2, "cuda") if causal else None
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(q, k, v, block_mask=mask)


def cute(q, k, v, causal):
    from flash_attn.cute import flash_attn_func

    # Its layout is [B, N, H, D].
    inputs = [x.transpose(1, 2).contiguous() for x in (q, k, v)]

    def run():
        out = flash_attn_func(*inputs, causal=causal)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return run


# Each prepares a peer: it gives a function without arguments that gives [B, H, N, D].
ATTENTION_PEERS = {
    "SDPA FlashAttention-2": sdpa,
    "SDPA cuDNN": functools.partial(sdpa, backend="CUDNN_ATTENTION"),
    "FlexAttention": flex,
    "flash-attn CuTe": cute,
}


def attention_peers(words=None):
    """The names of all peers, or of those that contain one of the words."""
    return [n for n in ATTENTION_PEERS if words is None or any(w in n.lower() for w in words)]


def attention_cell(out, ours, q, k, v, causal, peers):
    """One row of a table: TFLOP/s of ours(), whose result out is checked first, and of peers."""
    N, D = q.shape[2:]
    # All of it beside SDPA, some of it beside float64; bfloat16 rounds weights and output.
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    apart = ((out.float() - want.float()).norm() / want.float().norm()).item()
    errors = [attention_error(x, q, k, v, causal) for x in (out, want)]
    if not (apart < 1e-2 and errors[0] < 5e-3):
        raise RuntimeError(f"wrong result: N = {N}, D = {D}, causal: {causal}: {apart} {errors}")
    cell = {"D": D, "causal": causal, "N": N, "error": errors[0], "SDPA error": errors[1]}
    cell["ours"] = attention_tflops(ours, q, causal)
    for name in peers:
        torch._dynamo.reset()
        cell[name] = math.nan
        try:
            run = ATTENTION_PEERS[name](q, k, v, causal)
            error = attention_error(run(), q, k, v, causal)
            if not error < 5e-3:
                raise ValueError(f"wrong result, error {error}")
            cell[name] = attention_tflops(run, q, causal)
        except Exception as problem:
            text = f"{type(problem).__name__}: {problem}".splitlines()[0]
            print(f"{name}, N = {N}, D = {D}, causal: {causal}: {text}", file=sys.stderr)
    cell["ours / best"] = cell["ours"] / max([cell[n] for n in peers if cell[n] > 0] or [1])
    line = " ".join(f"{name} {cell[name]:.0f}" for name in ("ours", *peers))
    print(f"D {D}, causal {causal}, N {N}: {line}", file=sys.stderr, flush=True)
    return cell


def draw_attention(path, table, ours, peers):
    """A panel for each D, causal or not: TFLOP/s against N."""

    def plot(axes):
        for panel, ((D, causal), part) in zip(axes, table.groupby(["D", "causal"]), strict=True):
            panel.plot(part["N"], part["ours"], "o-", label=ours)
            for name in peers:
                panel.plot(part["N"], part[name], ".-", label=name)
            kind = "causal" if causal else "full"
            panel.set(xscale="log", xlabel="N", title=f"attention, bfloat16, D = {D}, {kind}")
        axes[0].set_ylabel(f"TFLOP/s on {table['GPU'][0]}")

    draw(path, 4, plot, width=4.5)
