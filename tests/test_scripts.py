"""Every script prints what the book says, stands alone, and agrees with its siblings."""

import ast
import contextlib
import subprocess
import sys

import pytest

from harness.compare import compare
from harness.environment import choose_backend
from harness.run import ROOT, find_scripts, run_scripts, skip_reason, start_server
from run_all import expected_path, orphans, read_expected

SCRIPTS = find_scripts()


@pytest.fixture(scope="module")
def results():
    start_server()
    interpret, _ = choose_backend("auto")
    steps = run_scripts(SCRIPTS, interpret, jobs=2, timeout=300)
    return {name: result for name, result in steps if result}


def explain(differences):
    return "\n".join(f"line {d.line}: want {d.want!r}, got {d.got!r}: {d.why}" for d in differences)


@pytest.mark.parametrize("name", SCRIPTS)
def test_prints_what_the_book_says(name, results, file_regression, pytestconfig):
    assert not pytestconfig.getoption("force_regen"), "use python run_all.py --update"
    # file_regression would create a missing file, and the next run would pass.
    assert read_expected(name) is not None, f"{expected_path(name)} is missing"
    assert results[name].failure == "", results[name].stderr
    if results[name].skipped:
        pytest.skip(results[name].skipped)

    def check(obtained_path, expected):
        differences = compare(expected.read_text("utf-8"), obtained_path.read_text("utf-8"))
        assert not differences, explain(differences)

    file_regression.check(
        results[name].stdout, fullpath=expected_path(name), check_fn=check, encoding="utf-8"
    )


def test_every_expected_file_has_a_script():
    assert len(SCRIPTS) >= 7
    assert orphans(SCRIPTS) == []


@pytest.mark.parametrize("name", SCRIPTS)
def test_runs_as_a_reader_starts_it(name, tmp_path):
    # Warnings are errors here: a kernel that computes -inf - -inf on the way would stop.
    command = [sys.executable, "-W", "error", ROOT / name]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    if reason := skip_reason(done.returncode, done.stdout, done.stderr):
        pytest.skip(reason)
    assert done.returncode == 0, done.stderr
    differences = compare(read_expected(name), done.stdout)
    assert not differences, explain(differences)


@pytest.mark.parametrize("name", SCRIPTS)
def test_importing_prints_and_runs_nothing(name, script, capfd):
    script(name)
    assert capfd.readouterr() == ("", "")


def parse(name):
    return ast.parse((ROOT / name).read_text("utf-8"))


def imported(tree):
    """Top-level names of the modules that a syntax tree imports, the standard library's aside."""
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            modules.add(node.module.split(".")[0])
    return modules - set(sys.stdlib_module_names)


@pytest.mark.parametrize("name", SCRIPTS)
def test_imports_nothing_of_this_repository(name):
    for node in parse(name).body:
        allowed = {"torch", "triton"}
        # Only --bench takes what its tables share from here, and runs peers that are installed.
        if isinstance(node, ast.FunctionDef) and node.name.startswith("bench"):
            allowed |= {"harness", "liger_kernel", "quack"}
        assert imported(node) <= allowed


def test_functions_of_one_name_are_the_same_code():
    """A kernel stands in every script that shows it; the copies may not drift apart."""
    first = {}
    for name in SCRIPTS:
        for node in parse(name).body:
            # These differ by design: 21.4 prints less than 21.1 to 21.3, and what is measured or
            # only compiled is each script's own.
            own = ("section_", "bench", "gpu_only_launches")
            if isinstance(node, ast.FunctionDef) and not node.name.startswith(own):
                origin, code = first.setdefault(node.name, (name, ast.unparse(node)))
                assert ast.unparse(node) == code, f"{node.name} differs: {origin} and {name}"


def test_every_script_chooses_its_backend_in_the_same_lines():
    heads = set()
    for name in SCRIPTS:
        text = (ROOT / name).read_text("utf-8")
        start = text.index("# Without a GPU, Triton's interpreter")
        heads.add(text[start : text.index("\nimport triton\n", start)])
    assert len(heads) == 1


@pytest.mark.parametrize("value", ["", "0", "1", "true", "yes", "ON"])
def test_without_a_gpu_every_value_of_the_variable_runs(value, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    name = "chapter21/03_moe_gating.py"
    with contextlib.chdir(tmp_path):
        done = subprocess.run([sys.executable, ROOT / name], capture_output=True, text=True)
    assert compare(read_expected(name), done.stdout) == [], done.stderr
