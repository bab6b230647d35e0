"""Proof that the checks can fail: one small edit each, and what notices it.

An edit is made in one function of one script. It is caught if the edited script's output no longer
matches its expected file or, where the book's fixed inputs cannot show it, if the test of
test_kernels.py that the table names fails.

Left out, as no result can change: masks of stores, and the clamp of a row past the last one, whose
absence writes or reads outside of the tensors (compute-sanitizer's business); `other=` of a key or
of a scalar value whose score is masked; the upper bound N of the causal loop and the lanes past E
in `ranked`, which another mask or the order of ties excludes too. `probs == probs` is left out as
what tl.argmax makes of NaN differs between versions.
"""

import shutil
import subprocess
import sys
from typing import NamedTuple

import pytest

from harness.compare import compare
from harness.environment import choose_backend
from harness.run import ROOT, run_scripts, start_server
from run_all import read_expected


class Bug(NamedTuple):
    """An edit: `right`, which stands once in the function, becomes `wrong`."""

    right: str
    wrong: str
    caught_by: str = "output"


THREE_PASSES = "chapter08_softmax/01_brute_force_softmax.py"
ONLINE = "chapter08_softmax/02_online_softmax.py"
FAST = "chapter08_softmax/04_fast_softmax.py"
FAST_SCALAR = "chapter09_flashattn/03_fast_scalar_attention.py"
FAST_ATTENTION = "chapter21/07_fast_flash_attention.py"
FAST_GATING = "chapter21/09_fast_moe_gating.py"
SCALAR = "chapter09_flashattn/01_scalar_flash_attention.py"
CORE = "chapter21/01_flash_attention_core.py"
CAUSAL = "chapter21/02_causal_flash_attention.py"
GATING = "chapter21/03_moe_gating.py"
COMPLETE = "chapter21/04_standalone_complete.py"

INF = 'float("-inf")'
BUGS = {
    THREE_PASSES: {
        "exp_approx": [
            Bug("1.44269504", "1.44"),
        ],
        "softmax_kernel_brute_force": [
            Bug(f"(B0, 1), {INF}", "(B0, 1), 0.0"),
            Bug(f"other={INF})\n        row_max", "other=0.0)\n        row_max"),
            Bug(f"other={INF})\n        row_sum", "other=0.0)\n        row_sum"),
            Bug("row_max = tl.maximum(row_max, tl.max(x, axis=1, keep_dims=True))",
                "row_max = tl.max(x, axis=1, keep_dims=True)", "test_softmax_of_hard_rows"),
            Bug("row_sum_exp += tl", "row_sum_exp = tl"),
            Bug("z = exp_approx(x - row_max)", "z = exp_approx(x)"),
            Bug(" / row_sum_exp", " / tl.maximum(row_sum_exp, T)"),
            Bug("tl.minimum(rows, N0 - 1) * T", "tl.minimum(rows, N0 - 1) * N1"),
            Bug("tl.minimum(rows, N0 - 1)", "tl.minimum(rows, 0)"),
        ],
        "softmax_brute_force": [
            Bug("x = x.contiguous()", "pass", "test_softmax_of_strided_and_empty"),
            Bug("triton.cdiv(N0, B0)", "N0 // B0", "test_softmax_of_any_shape_and_blocks"),
        ],
    },
    ONLINE: {
        "softmax_kernel": [
            Bug(f"(B0, 1), {INF}", "(B0, 1), 0.0"),
            Bug(f"other={INF})\n        new_max", "other=0.0)\n        new_max"),
            Bug(f"tl.where(new_max == {INF}, 0.0, new_max)", "new_max"),
            Bug("row_sum_exp *= exp_approx(row_max - shift)", "pass"),
            Bug("exp_approx(row_max - shift)", "exp_approx(shift - row_max)"),
            Bug("exp_approx(x - shift)", "exp_approx(x - row_max)"),
            Bug("row_max = new_max", "pass"),
            Bug("tl.maximum(row_max, tl", "tl.minimum(row_max, tl"),
        ],
    },
    FAST: {
        "two_pass_kernel": [
            Bug("row_sum_exp *= exp_approx(row_max - shift)", "pass"),
            Bug(f"tl.where(new_max == {INF}, 0.0, new_max)", "new_max"),
        ],
        "load_rows": [
            Bug(f"other={INF}", "other=0.0"),
        ],
        "rows_kernel": [
            Bug("sums += exps[i]", "pass"),
            Bug("row_sum_exp += sum_of_rows(edges)", "pass"),
            Bug("x_at, z_at = rows * x_stride", "x_at, z_at = rows * T"),
        ],
    },
    FAST_SCALAR: {
        "load_queries": [
            Bug("2.885390043 * q", "2.885 * q"),
        ],
        "exponents": [
            Bug("0.5 * k - 0.5 * high", "0.5 * (k - high)"),
            Bug("from_low = 0.5 * k - 0.5 * low", "from_low = 0.5 * k - 0.5 * high"),
        ],
        "known_max_kernel": [
            Bug(f"tl.where(cols[None, :] < T, x, {INF})", "x"),
        ],
        "partial_sums_kernel": [
            Bug(f"tl.where(cols[None, :] < last, x, {INF})", "x"),
            Bug("first = tl.program_id(1) * SIZE", "first = 0"),
            Bug("            exp_sum += weights\n            z", "            z"),
        ],
        "merge_kernel": [
            Bug("exp_sum += tl.load", "exp_sum = tl.load"),
        ],
        "fast_flashatt": [
            Bug("return out.zero_()", "return out.fill_(1)"),
        ],
    },
    FAST_ATTENTION: {
        "simple_attention_kernel": [
            Bug("acc = acc * alpha[:, None] + tl", "acc = acc + tl"),
        ],
        "block_and_head": [
            Bug("first + place % heads", "first"),
        ],
        "key_range": [
            Bug("first_row + 1", "first_row + BLOCK_M"),
            Bug("first_row + BLOCK_M", "first_row + 1"),
        ],
        "attend": [
            Bug("acc * alpha[:, None]", "acc"),
            Bug("rows[:, None] >= cols[None, :]", "rows[:, None] > cols[None, :]"),
            Bug("cols[None, :] < N", "cols[None, :] <= N"),
        ],
        "blocks_kernel": [
            Bug("range(full if MASKED else 0", "range(0"),
            Bug("head // GROUP * k_strides[1]", "head // HEADS * k_strides[1]"),
            Bug("batch * v_strides[0]", "batch * v_strides[1]"),
            Bug("inside = inside & (cols[:, None] < N)", "pass"),
        ],
        "descriptors_kernel": [
            Bug("range(full if MASKED else 0", "range(0"),
            Bug("v_desc.load([batch, head // GROUP, start", "v_desc.load([batch, head, 0"),
        ],
        "launch_blocks": [
            Bug("scale * LOG2_E", "scale"),
        ],
    },
    FAST_GATING: {
        "probabilities_kernel": [
            Bug("p = tl.where(experts == best, -1.0, p)", "pass"),
            Bug("tops[j] / raw_sum", "tops[j]"),
        ],
        "packed_kernel": [
            Bug("keys = tl.where(experts < E, keys, lowest(KEY))", "pass"),
            Bug("total += weight", "total = weight"),
        ],
        "pack": [
            Bug("0x7FFC00 - index", "0x7FFC00 + index - 1023"),
        ],
        "exchange": [
            Bug("tl.where(swap, a, b)", "tl.where(swap, b, a)"),
            Bug("tl.minimum(a, b)", "a"),
        ],
        "merge": [
            Bug("exchange(odd[i], even[i + 1])", "exchange(odd[i], even[i])"),
        ],
        "best_of": [
            Bug("t[len(t) // 2 :], k)", "t[len(t) // 2 :], 1)"),
        ],
        "swap_halves": [
            Bug("(x.shape[0] // PARTS, 2, PARTS // 2)", "(x.shape[0] // 2, 2, 1)"),
        ],
        "merge_parts": [
            Bug("merge(t, others, len(t))", "merge(t, t, len(t))"),
        ],
        "best_groups": [
            Bug("start + i, KEY", "start, KEY"),
            Bug("(x.shape[0], GROUPS, V)), 2", "(x.shape[0], V, GROUPS)), 1"),
        ],
        "network_kernel": [
            Bug("keys = tl.where(at < E, keys, lowest(KEY))", "pass"),
            Bug("best_of(unstack(keys), k - turn * PARTS)", "best_of(unstack(keys), 1)"),
            Bug("groups[turn * PARTS + i]", "groups[turn * PARTS]"),
            Bug("tl.where(picked, chosen, BINS - 1)", "chosen"),
            Bug("there & (part == 0)[:, None]", "there"),
            Bug("tl.broadcast_to(tl.sum(total, axis=1, keep_dims=True), (ROWS, PARTS))", "total"),
        ],
    },
    SCALAR: {
        "flashatt_kernel": [
            Bug(f"(B0,), {INF}", "(B0,), 0.0"),
            Bug(f"(B0,), {INF}", "(B0,), -1e6"),
            Bug("z = z * factor", "z = z"),
            Bug("exp_sum = exp_sum * factor", "exp_sum = exp_sum"),
            Bug("exp_approx(qk_max - shift)", "exp_approx(shift - qk_max)"),
            Bug(f"k[None, :], {INF}", "k[None, :], 0.0"),
            Bug("qk_max = new_max", "pass"),
            Bug("weights * v[None, :]", "weights"),
            Bug(f"tl.where(new_max == {INF}, 0.0, new_max)", "new_max",
                "test_scalar_attention_of_hard_scores"),
            Bug("tl.where(exp_sum == 0.0, 1.0, exp_sum)", "exp_sum",
                "test_scalar_attention_without_keys_is_zero"),
        ],
        "flashatt": [
            Bug("q.contiguous(), k.contiguous(), v.contiguous()", "q, k, v",
                "test_scalar_attention_of_strided_tensors"),
        ],
    },
    CORE: {
        "flash_attn_kernel": [
            Bug("acc = acc * alpha[:, None]", "acc = acc"),
            Bug("l_i = l_i * alpha", "l_i = l_i"),
            Bug(f"qk = tl.where(cols[None, :] < N, qk, {INF})", "pass"),
            Bug('"ieee") * scale', '"ieee")'),
            Bug("p = tl.exp(", "p = tl.exp2("),
            Bug("acc = acc / ", "acc = acc + 0 * "),
            Bug("m_i = m_new", "pass"),
            Bug("cols[:, None] * stride_vn", "cols[:, None] * stride_vd"),
            Bug(f"(BLOCK_M,), {INF}", "(BLOCK_M,), 0.0", "test_attention_of_hard_scores"),
            Bug(f"tl.where(m_new == {INF}, 0.0, m_new)", "m_new", "test_attention_of_hard_scores"),
            Bug("v = tl.load(v_ptrs, mask=inside, other=0.0)",
                "v = tl.load(v_ptrs, mask=dims[None, :] < D, other=0.0)",
                "test_attention_reads_nothing_past_the_end"),
            Bug("tl.where(l_i == 0.0, 1.0, l_i)", "l_i", "test_attention_of_nothing"),
            Bug("dims[None, :] * stride_kd", "dims[None, :]", "test_attention_of_strided_tensors"),
            Bug("rows[:, None] * stride_qm", "rows[:, None] * D",
                "test_attention_of_strided_tensors"),
            Bug("start + tl.arange(0, BLOCK_N).to(tl.int64)", "start + tl.arange(0, BLOCK_N)",
                "test_attention_of_a_row_stride_past_int32"),
        ],
        "_run": [
            Bug("D**-0.5", "max(D, 16)**-0.5"),
            Bug("max(16, triton.next_power_of_2(D))", "64",
                "test_attention_of_any_shape_and_blocks"),
        ],
    },
    CAUSAL: {
        "flash_attn_causal_kernel": [
            Bug("rows[:, None] >= cols[None, :]", "rows[:, None] > cols[None, :]"),
            Bug("rows[:, None] >= cols[None, :]", "rows[:, None] <= cols[None, :]"),
            Bug("(rows[:, None] >= cols[None, :]) & ", ""),
            Bug("(tl.program_id(0) + 1)", "tl.program_id(0)"),
            Bug("acc = acc * alpha[:, None]", "acc = acc"),
            Bug(" & (cols[None, :] < N)", "", "test_attention_of_any_shape_and_blocks"),
        ],
        "causal_flash_attention": [
            Bug("flash_attn_causal_kernel", "flash_attn_kernel"),
        ],
        "flash_attention": [
            Bug("flash_attn_kernel", "flash_attn_causal_kernel"),
        ],
    },
    GATING: {
        "moe_top2_gating_kernel": [
            Bug(f"ranked = tl.where(experts == idx0, {INF}, ranked)", "pass"),
            Bug("weight0 / total", "weight0"),
            Bug("total = weight0 + weight1", "total = weight0"),
            Bug("idx0_ptr + row, idx0", "idx0_ptr + row, idx1"),
            Bug("idx1 = tl.argmax", "idx1 = tl.argmin"),
            Bug("weight1 = tl.max(ranked, axis=0)", "weight1 = weight0"),
            Bug(f"(experts == idx0, {INF}", "(experts == idx0, 0.0",
                "test_gating_of_negative_logits_and_underflow"),
            Bug(f"other={INF}", "other=0.0", "test_gating_of_negative_logits_and_underflow"),
            Bug("logits - tl.max(logits, axis=0)", "logits",
                "test_gating_of_negative_logits_and_underflow"),
            Bug("row * stride_m", "row * E", "test_gating_of_strided_rows"),
        ],
        "moe_top2_gating": [
            Bug("logits = logits.contiguous()", "pass", "test_gating_of_strided_rows"),
        ],
    },
    COMPLETE: {
        "flash_attn_kernel": [
            Bug("acc = acc * alpha[:, None]", "acc = acc"),
        ],
        "flash_attn_causal_kernel": [
            Bug("rows[:, None] >= cols[None, :]", "rows[:, None] > cols[None, :]"),
        ],
        "causal_flash_attention": [
            Bug("flash_attn_causal_kernel", "flash_attn_kernel"),
        ],
        "moe_top2_gating_kernel": [
            Bug("weight1 / total", "weight1"),
            Bug("idx1 = tl.argmax", "idx1 = tl.argmin"),
        ],
        "topk_gating": [
            Bug("raw.sum(dim=-1)", "raw.sum(dim=-1) * 1.001"),
        ],
    },
}  # fmt: skip


def edit(name, function, bug):
    """The script's text with the bug in it."""
    text = (ROOT / name).read_text("utf-8")
    before, start, rest = text.partition(f"\ndef {function}(")
    body, gap, after = rest.partition("\n\n\n")
    assert body.count(bug.right) == 1, f"{bug.right!r} is not once in {function} of {name}"
    return before + start + body.replace(bug.right, bug.wrong) + gap + after


CASES = [
    (name, function, bug)
    for name, functions in BUGS.items()
    for function, bugs in functions.items()
    for bug in bugs
]
BY_OUTPUT = [case for case in CASES if case[2].caught_by == "output"]
BY_TEST = [case for case in CASES if case[2].caught_by != "output"]


def label(case):
    """A test id: the script, and the edit."""
    name, function, bug = case
    return f"{name[7:9]}/{name.split('/')[1][:2]} {function}: {bug.right} -> {bug.wrong}".replace(
        "\n", " "
    )


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """What each edited script of BY_OUTPUT prints, from one run of all."""
    folder = tmp_path_factory.mktemp("bugs")
    names = {f"{number:03}.py": case for number, case in enumerate(BY_OUTPUT)}
    for file, case in names.items():
        (folder / file).write_text(edit(*case), "utf-8")
    start_server()
    interpret, _ = choose_backend("auto")
    steps = run_scripts(list(names), interpret, jobs=2, timeout=100, root=folder)
    return {names[file]: result for file, result in steps if result}


@pytest.mark.parametrize("case", BY_OUTPUT, ids=map(label, BY_OUTPUT))
def test_the_output_shows_it(case, outputs):
    result = outputs[case]
    assert not result.failure, "the edit makes a script that does not run"
    assert compare(read_expected(case[0]), result.stdout)


@pytest.mark.parametrize("case", BY_TEST, ids=map(label, BY_TEST))
def test_a_kernel_test_shows_it(case, tmp_path):
    name, function, bug = case
    for folder in "harness", "tests", *{n.split("/")[0] for n in BUGS}:
        shutil.copytree(ROOT / folder, tmp_path / folder)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    command = [sys.executable, "-m", "pytest", "-qx", "tests/test_kernels.py", "-k", bug.caught_by]
    (tmp_path / name).write_text(edit(*case), "utf-8")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode != 5, "no such test"
    assert done.returncode != 0, done.stdout
