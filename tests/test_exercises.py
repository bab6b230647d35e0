"""The exercises: a right kernel passes, each planted bug fails first where its mistake is named.

A reader may have written into the exercises here. So each test puts a kernel of its own in place of
whatever body stands there, in a temporary copy.
"""

import subprocess
import sys
from typing import NamedTuple

import pytest

from harness.exercise import check_property, find_function
from harness.run import ROOT, find_scripts


class Lesson(NamedTuple):
    """The script that solves an exercise, and its kernel."""

    script: str
    kernel: str


LESSONS = {
    "chapter08_softmax/exercises/three_pass_softmax.py": Lesson(
        "chapter08_softmax/01_brute_force_softmax.py", "softmax_kernel_brute_force"
    ),
    "chapter08_softmax/exercises/online_softmax.py": Lesson(
        "chapter08_softmax/02_online_softmax.py", "softmax_kernel"
    ),
    "chapter09_flashattn/exercises/scalar_attention.py": Lesson(
        "chapter09_flashattn/01_scalar_flash_attention.py", "flashatt_kernel"
    ),
    "chapter21/exercises/flash_attention.py": Lesson(
        "chapter21/01_flash_attention_core.py", "flash_attn_kernel"
    ),
    "chapter21/exercises/causal_flash_attention.py": Lesson(
        "chapter21/02_causal_flash_attention.py", "flash_attn_causal_kernel"
    ),
    "chapter21/exercises/top2_gating.py": Lesson(
        "chapter21/03_moe_gating.py", "moe_top2_gating_kernel"
    ),
}
THREE, ONLINE, SCALAR, CORE, CAUSAL, GATING = LESSONS


def function_text(text, name):
    """The lines of a function, decorators included, without those behind it."""
    node = find_function(text, name)
    start = min(d.lineno for d in node.decorator_list)
    return "\n".join(text.splitlines()[start - 1 : node.end_lineno])


def lesson_kernel(exercise):
    script, kernel = LESSONS[exercise]
    return function_text((ROOT / script).read_text("utf-8"), kernel)


def empty_kernel(exercise):
    """The kernel's signature with an empty body, as a reader first meets it."""
    lines = lesson_kernel(exercise).splitlines()
    node = find_function((ROOT / LESSONS[exercise].script).read_text("utf-8"), LESSONS[exercise][1])
    signature = node.body[0].lineno - min(d.lineno for d in node.decorator_list)
    while lines[signature - 1].strip().startswith("#"):
        signature -= 1
    return "\n".join([*lines[:signature], "    pass"])


def write(exercise, kernel, folder):
    """A copy of the exercise in the folder, with this kernel instead of what stands there."""
    text = (ROOT / exercise).read_text("utf-8")
    old = function_text(text, LESSONS[exercise].kernel)
    assert text.count(old) == 1
    path = folder / exercise
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.replace(old, kernel), "utf-8")
    if not (folder / "harness").exists():
        (folder / "harness").symlink_to(ROOT / "harness")
    return path


def load(path):
    """EXERCISE of a script."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("exercise", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.EXERCISE


def first_failure(exercise):
    """The Failure of the first property that does not hold, or None."""
    return next(
        (f for name in exercise.properties if (f := check_property(exercise, name)) is not None),
        None,
    )


@pytest.fixture(autouse=True)
def same_path(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))


def run(path, *options):
    command = [sys.executable, path, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=path.parent)


@pytest.mark.parametrize("name", LESSONS)
def test_the_lesson_passes_every_property(name, tmp_path):
    exercise = load(write(name, lesson_kernel(name), tmp_path))
    assert [check_property(exercise, one) for one in exercise.properties] == [None] * len(
        exercise.properties
    )


def test_every_property_is_listed_once_somewhere(tmp_path):
    for name in LESSONS:
        exercise = load(write(name, empty_kernel(name), tmp_path))
        assert len(set(exercise.properties)) == len(exercise.properties)
        assert (ROOT / exercise.solution).is_file() and (ROOT / exercise.traps).is_file()
        assert exercise.solution == LESSONS[name].script
    assert not any("exercises" in script for script in find_scripts())


INF = 'float("-inf")'
# Exercise -> property -> edits of the lesson's kernel, (right, wrong) pairs; the first property to
# fail must be this one.
BUGS = {
    THREE: {
        "every element of z is written": [("range(0, T, B1):\n        cols = start + tl.arange(0, B1)[None, :]\n        x = tl.load(x_rows + cols, mask=cols < T, other=float(\"-inf\"))\n        z =", "range(0, B1, B1):\n        cols = start + tl.arange(0, B1)[None, :]\n        x = tl.load(x_rows + cols, mask=cols < T, other=float(\"-inf\"))\n        z =")],
        "every row sums to 1": [(" / row_sum_exp", "")],
        "relative error below 1e-5": [("exp_approx(", "tl.exp2(")],
        "two blocks: both count in the sum": [("row_sum_exp +=", "row_sum_exp =")],
        "the maximum of an early block is kept": [("row_max = tl.maximum(row_max, tl.max(x, axis=1, keep_dims=True))", "row_max = tl.maximum(tl.minimum(row_max, -1e30), tl.max(x, axis=1, keep_dims=True))")],
        "T not a multiple of B1: the tail adds nothing": [(f"other={INF})\n        row_sum", "other=0.0)\n        row_sum")],
        "T not a multiple of B1: nothing is written past z": [("(rows < N0) & (cols < T)", "rows < N0")],
        "several rows per program": [("tl.minimum(rows, N0 - 1) * T", "tl.minimum(rows, 0) * T")],
        "N0 not a multiple of B0: no row past the last is written": [("(rows < N0) & (cols < T)", "cols < T")],
        "large values": [("x - row_max", "x")],
        "very negative values": [(f"(B0, 1), {INF}", "(B0, 1), 0.0")],
    },
    ONLINE: {
        "every element of z is written": [("tl.program_id(0).to(tl.int64) * B0", "0")],
        "every row sums to 1": [(" / row_sum_exp", "")],
        "relative error below 1e-5": [("exp_approx(", "tl.exp2(")],
        "two blocks: both count in the sum": [("row_sum_exp += ", "row_sum_exp = ")],
        "a maximum that rises rescales the sum": [("row_sum_exp *= exp_approx(row_max - shift)", "pass")],
        "T not a multiple of B1: the tail adds nothing": [("mask=cols < T, other=float(\"-inf\"))\n        new", "mask=cols < T, other=0.0)\n        new")],
        "T not a multiple of B1: nothing is written past z": [("(rows < N0) & (cols < T)", "rows < N0")],
        "several rows per program": [("tl.minimum(rows, N0 - 1) * T", "tl.minimum(rows, 0) * T")],
        "N0 not a multiple of B0: no row past the last is written": [("(rows < N0) & (cols < T)", "cols < T")],
        "large values": [("row_sum_exp *= exp_approx(row_max - shift)", "pass", "x - shift", "x", "x - row_max", "x")],
        "very negative values": [(f"(B0, 1), {INF}", "(B0, 1), 0.0"), (f"(B0, 1), {INF}", "(B0, 1), -1e6")],
        "a first block of nothing but -inf": [(f"tl.where(new_max == {INF}, 0.0, new_max)", "new_max")],
    },
    SCALAR: {
        "every element of z is written": [("tl.program_id(0).to(tl.int64) * B0", "0")],
        "v = ones gives 1": [("z = z / tl.where(exp_sum == 0.0, 1.0, exp_sum)", "pass")],
        "one block of keys: the weighted mean of v": [("weights * v[None, :]", "weights"), ("exp_approx(", "tl.exp2(")],
        "two blocks of keys: both count": [("z = z * factor +", "z ="), ("exp_sum = exp_sum * factor +", "exp_sum =")],
        "a maximum that rises rescales both sums": [("z = z * factor", "z = z"), ("exp_sum = exp_sum * factor", "exp_sum = exp_sum")],
        "T not a multiple of B1: a key past the end gets no weight": [(f"k[None, :], {INF}", "k[None, :], 0.0")],
        "N0 not a multiple of B0: nothing is written past z": [(", mask=rows < N0)\n", ")\n", -1)],
        "large scores": [("qk - shift[:, None]", "qk", "exp_approx(qk_max - shift)", "1.0")],
        "very negative scores": [(f"(B0,), {INF}", "(B0,), 0.0"), (f"(B0,), {INF}", "(B0,), -1e6")],
        "a first block of keys whose score is -inf": [(f"tl.where(new_max == {INF}, 0.0, new_max)", "new_max")],
        "no key at all gives 0": [("tl.where(exp_sum == 0.0, 1.0, exp_sum)", "exp_sum")],
    },
    GATING: {
        "every element of w0, w1, idx0, idx1 is written": [("tl.store(idx1_ptr + row, idx1, mask=inside)", "pass")],
        "idx0 is the expert with the largest logit": [("idx0 = tl.argmax", "idx0 = tl.argmin")],
        "two distinct experts": [(f"ranked = tl.where(experts == idx0, {INF}, ranked)", "pass")],
        "idx1 is the expert with the second largest logit": [(f"ranked = tl.where(experts == idx0, {INF}, ranked)\n    weight1 = tl.max(ranked, axis=0)\n    idx1 = tl.argmax(ranked, axis=0)", "weight1 = tl.min(ranked, axis=0)\n    idx1 = tl.argmin(ranked, axis=0)")],
        "the two weights sum to 1": [("weight0 / total", "weight0"), ("total = weight0 + weight1", "total = weight0")],
        "each weight is its expert's share": [("weight1 = tl.max(ranked, axis=0)", "weight1 = weight0"), ("tl.exp(", "tl.exp2(")],
        "of equal logits, the lowest index first": [("tl.argmax(ranked, axis=0)", "tl.argmax(ranked, axis=0, tie_break_left=False)")],
        "E not a power of two: ids below E": [(f"other={INF}", "other=0.0", f"ranked = tl.where(experts < E, ranked, {INF})", "pass")],
        "E not a power of two: the right ids": [("row * stride_m", "row * BLOCK_E")],
        "large and very negative logits": [(f"other={INF}", "other=0.0"), ("logits - tl.max(logits, axis=0)", "logits")],
        "a probability that underflows to 0: still two distinct experts": [(f"(experts == idx0, {INF}", "(experts == idx0, 0.0")],
        "strides: rows that are part of wider ones": [("row * stride_m", "row * E")],
    },
}  # fmt: skip


def attention_bugs(causal):
    """Those of both attention exercises, and with `causal` those of the diagonal."""
    score = "visible" if causal else "cols[None, :] < N"
    bugs = {
        "every element of out is written": [("tl.program_id(0).to(tl.int64) * BLOCK_M", "0")],
        "v = ones gives ones": [("acc = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]", "pass")],
        "one block: the weighted mean of v": [('"ieee") * scale', '"ieee")'), ("tl.exp(", "tl.exp2(")],
        "D narrower than the tile": [("(dims[None, :] < D)", "(dims[None, :] < BLOCK_D)")],
        "N not a multiple of the block: NaN behind k and v is not read": [("v = tl.load(v_ptrs, mask=inside, other=0.0)", "v = tl.load(v_ptrs, mask=dims[None, :] < D, other=0.0)")],
        "M not a multiple of the block: nothing is written past out": [("        acc,\n        mask=(rows[:, None] < M) & (dims[None, :] < D)", "        acc,\n        mask=dims[None, :] < D")],
        "two blocks of keys: both count": [("acc = acc * alpha[:, None] +", "acc ="), ("l_i = l_i * alpha +", "l_i ="), ("m_i = m_new", "pass")],
        "a maximum that rises rescales l_i and acc": [("acc = acc * alpha[:, None]", "acc = acc"), ("l_i = l_i * alpha", "l_i = l_i")],
        "strides: q, k and v are not contiguous": [("dims[None, :] * stride_kd", "dims[None, :]"), ("rows[:, None] * stride_qm", "rows[:, None] * D")],
        "large scores": [("qk - shift[:, None]", "qk", "tl.exp(m_i - shift)", "tl.full((BLOCK_M,), 1.0, tl.float32)")],
        "very negative scores": [(f"(BLOCK_M,), {INF}", "(BLOCK_M,), 0.0"), (f"(BLOCK_M,), {INF}", "(BLOCK_M,), -1e6")],
        "a first block of keys whose score is -inf": [(f"tl.where(m_new == {INF}, 0.0, m_new)", "m_new")],
        "no key at all gives 0": [("tl.where(l_i == 0.0, 1.0, l_i)", "l_i")],
    }  # fmt: skip
    tail = "N not a multiple of the block: a key past the end gets no weight"
    if not causal:
        return bugs | {tail: [(f"qk = tl.where({score}, qk, {INF})", "pass")]}
    return bugs | {
        tail: [(" & (cols[None, :] < N)\n        qk", "\n        qk")],
        "keys past the diagonal are ignored": [("rows[:, None] >= cols[None, :]", "rows[:, None] <= cols[None, :]"), ("(rows[:, None] >= cols[None, :]) & ", "")],
        "row 0 sees itself": [("rows[:, None] >= cols[None, :]", "rows[:, None] > cols[None, :]")],
        "M and N differ: aligned top left": [("rows[:, None] >= cols[None, :]", "rows[:, None] + tl.maximum(N - M, 0) >= cols[None, :]")],
    }  # fmt: skip


BUGS[CORE] = attention_bugs(causal=False)
BUGS[CAUSAL] = attention_bugs(causal=True)
CASES = [(n, p, edit) for n, table in BUGS.items() for p, edits in table.items() for edit in edits]


def planted(name, edit):
    """The lesson's kernel with an edit: (right, wrong) pairs in a row; -1 for the last place."""
    kernel = lesson_kernel(name) + "\n"
    if edit[-1] == -1:
        before, right, after = kernel.rpartition(edit[0])
        assert right
        return before + edit[1] + after
    for right, wrong in zip(edit[::2], edit[1::2], strict=True):
        assert right in kernel, right
        kernel = kernel.replace(right, wrong)
    return kernel


@pytest.mark.parametrize("name", LESSONS)
def test_every_property_has_a_planted_bug(name, tmp_path):
    exercise = load(write(name, empty_kernel(name), tmp_path))
    assert sorted(exercise.properties) == sorted(BUGS[name])


@pytest.mark.parametrize("case", CASES, ids=[f"{n.split('/')[2][:-3]}: {p}" for n, p, _ in CASES])
def test_a_planted_bug_fails_first_where_it_is_named(case, tmp_path):
    name, wanted, edit = case
    exercise = load(write(name, planted(name, edit), tmp_path))
    failure = first_failure(exercise)
    assert failure and failure.name == wanted, failure
    assert failure.wanted, f"raised {failure.came}"
    for text in failure.text, failure.came, failure.wanted, failure.hint:
        assert 0 < len(text) <= 120 and "\n" not in text, text


@pytest.mark.parametrize("name", LESSONS)
def test_an_unfinished_kernel_is_told_in_one_line(name, tmp_path):
    done = run(write(name, empty_kernel(name), tmp_path))
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.count("\n") == 1 and "is empty; write its body" in done.stdout


def test_a_right_kernel_is_told_what_is_next(tmp_path):
    done = run(write(ONLINE, lesson_kernel(ONLINE), tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert "All 12 properties hold." in done.stdout and "FAILED" not in done.stdout
    assert LESSONS[ONLINE].script in done.stdout


def test_options(tmp_path):
    path = write(ONLINE, planted(ONLINE, (f"(B0, 1), {INF}", "(B0, 1), 0.0")), tmp_path)
    plain, everything, hint = run(path), run(path, "--all"), run(path, "--hint")
    assert [done.returncode for done in (plain, everything, hint)] == [1, 1, 1]
    assert plain.stdout.count("FAILED") == 1
    assert "FAILED  very negative values" in plain.stdout
    assert "a first block of nothing but -inf" not in plain.stdout
    assert "a first block of nothing but -inf" in everything.stdout
    assert "more " in hint.stdout and len(hint.stdout) > len(plain.stdout)
    assert run(path, "--solution").stdout.startswith(LESSONS[ONLINE].script)
    assert run(path, "--nonsense").returncode == 2


def test_an_error_shows_the_reader_s_line(tmp_path):
    path = write(ONLINE, planted(ONLINE, ("tl.maximum(row_max", "tl.maximun(row_max")), tmp_path)
    number = 1 + path.read_text("utf-8")[: path.read_text("utf-8").index("maximun")].count("\n")
    done = run(path)
    assert (done.returncode, done.stderr) == (1, "")
    assert f"line {number}: new_max = tl.maximun(row_max" in done.stdout
    assert "Traceback" not in done.stdout
