"""run_all.py on a small repository of scripts that misbehave, each in its own way."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from harness.run import ROOT

SLOW_START = 60  # seconds for the server to import torch on a busy machine

# Script, what it is expected to print (None: no such file), what run_all.py must say about it.
CASES = {
    "good": ("print('sum 0.50001')", "sum 0.5\n", "ok"),
    "crlf": ("print('a'); print('b')", "a \r\nb", "ok"),
    "non_ascii": ("print('\u00fc \u2264')", "\u00fc \u2264\n", "ok"),
    "stderr": ("import sys, warnings; warnings.warn('w'); sys.stderr.write('e' * 200000); print(1)",
               "1\n", "ok"),
    "argv": ("import sys; print(len(sys.argv), __name__, sys.path[0].endswith('chapter01'))",
             "1 __main__ True\n", "ok"),
    "exits_0": ("import sys; print(1); sys.exit(0)", "1\n", "ok"),
    "leaves_daemon": ("import os\nif os.fork() == 0:\n    os.setsid()\n"
                      "    os.execvp('sleep', ['sleep', '9'])\nprint(1)", "1\n", "ok"),
    "leaves_child": ("import subprocess; subprocess.Popen(['sleep', '612']); print(1)",
                     "1\n", "ok"),
    "wrong": ("print('a'); print('sum 0.6')", "a\nsum 0.5\n", "0.6 is off by 0.1, allowed 5.1e-05"),
    "nan": ("print('sum nan')", "sum 0.5\n", "nan is not 0.5"),
    "short": ("print('a')", "a\nb\n", "line missing"),
    "missing": ("print('a')", None, "expected_outputs/chapter01/12_missing.txt is missing"),
    "exits_3": ("import sys; print('right'); sys.exit(3)", "right\n", "exit code 3"),
    "raises": ("print('right'); raise ValueError('no \u00fc')", "right\n", "exit code 1"),
    "syntax": ("print('right'", "right\n", "SyntaxError"),
    "aborts": ("import os; print('before the end', end=''); os.abort()", "x\n", "SIGABRT"),
    "hangs": ("import subprocess, sys; print('going in', flush=True)\n"
              "subprocess.Popen(['sleep', '613'])\nwhile True: pass", "x\n", "timed out after 8 s"),
    "chatty": ("while True: print('y' * 999)", "x\n", "printed more than"),
    "skips": ("import sys; sys.stderr.write('w\\nskipped: no such GPU\\n'); sys.exit(77)", "x\n",
              "skipped: no such GPU"),
    "skips_silently": ("import sys; sys.exit(77)", "x\n", "skipped: no reason given"),
    "half_skips": ("import sys; print('x'); sys.stderr.write('skipped: no'); sys.exit(77)", "x\n",
                   "exit code 77"),
}  # fmt: skip
NAMES = {name: f"chapter01/{number:02}_{name}.py" for number, name in enumerate(CASES, 1)}


def make_repository(root, cases):
    """run_all.py with its harness in a folder of its own, with these scripts."""
    shutil.copytree(ROOT / "harness", root / "harness")
    shutil.copy(ROOT / "run_all.py", root)
    for name, (code, want, _) in cases.items():
        path = root / NAMES[name]
        path.parent.mkdir(exist_ok=True)
        path.write_text(code, "utf-8")
        if want is not None:
            path = (root / "expected_outputs" / NAMES[name]).with_suffix(".txt")
            path.parent.mkdir(exist_ok=True, parents=True)
            path.write_bytes(want.encode("utf-8"))
    return root


def run(root, *arguments, cwd="/", **environment):
    """Start run_all.py from another folder; the finished process, output as text."""
    command = [sys.executable, root / "run_all.py", *arguments]
    return subprocess.run(
        command, cwd=cwd, env=os.environ | environment, capture_output=True, timeout=300,
        encoding="utf-8",
    )  # fmt: skip


def running(command):
    """Whether some process runs this command line."""
    done = subprocess.run(["pgrep", "-f", f"^{command}$"], stdout=subprocess.DEVNULL)
    return done.returncode == 0


def section(output, name):
    """What run_all.py printed about one script."""
    lines = output.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(NAMES[name]))
    end = start + 1
    while lines[end].startswith("  ") and end < len(lines):
        end += 1
    return "\n".join(lines[start:end])


@pytest.fixture(scope="module")
def all_cases(tmp_path_factory):
    """One run over every case, in a folder with a space and an umlaut, under the C locale."""
    root = make_repository(tmp_path_factory.mktemp("a b") / "\u00fc", CASES)
    before = sorted(path.name for path in root.rglob("*.txt"))
    environment = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = run(root, "--timeout", "8", "--jobs", "4", PYTHONWARNINGS="default", **environment)
    assert sorted(path.name for path in root.rglob("*.txt")) == before, "a file was created"
    return done


@pytest.mark.parametrize("name", CASES)
def test_verdict(name, all_cases):
    said = section(all_cases.stdout, name)
    assert CASES[name][2] in said
    assert ("FAILED" in said) == (CASES[name][2] != "ok" and "skipped" not in CASES[name][2])


def test_a_failing_script_is_shown(all_cases):
    assert all_cases.returncode == 1
    assert "8 of 19 scripts right, 2 skipped, in" in all_cases.stdout
    assert "before the end" in section(all_cases.stdout, "aborts")
    assert "going in" in section(all_cases.stdout, "hangs")
    assert "ValueError: no \\xfc" in section(all_cases.stdout, "raises")
    assert "runpy" not in section(all_cases.stdout, "raises")
    assert "Traceback" not in all_cases.stderr


def test_nothing_is_left_running(all_cases):
    assert not running("sleep 612")
    assert not running("sleep 613")


@pytest.fixture
def small(tmp_path):
    return make_repository(tmp_path / "small", {name: CASES[name] for name in ("good", "wrong")})


def test_a_missing_expected_file_fails_again_and_again(tmp_path):
    root = make_repository(tmp_path / "r", {"missing": CASES["missing"]})
    for _ in range(2):
        done = run(root)
        assert done.returncode == 1
        assert "12_missing.txt is missing" in done.stdout
    assert run(root, "--update").returncode == 0
    assert (root / "expected_outputs/chapter01/12_missing.txt").read_text() == "a\n"


def test_an_expected_file_without_a_script_fails(small):
    (small / NAMES["wrong"]).unlink()
    done = run(small)
    assert done.returncode == 1
    assert "expected_outputs/chapter01/09_wrong.txt has no script" in done.stdout


def test_update_writes_what_differs_and_shows_it(small):
    before = (small / "expected_outputs/chapter01/01_good.txt").read_bytes()
    done = run(small, "--update")
    assert done.returncode == 0
    assert "updated expected_outputs/chapter01/09_wrong.txt" in done.stdout
    assert "sum 0.5" in done.stdout and "sum 0.6" in done.stdout
    assert (small / "expected_outputs/chapter01/09_wrong.txt").read_bytes() == b"a\nsum 0.6\n"
    assert (small / "expected_outputs/chapter01/01_good.txt").read_bytes() == before


@pytest.mark.parametrize("code", ["print('ok? False')", "print('ok? Tru'); raise ValueError"])
def test_update_refuses_a_failing_script_and_true_to_false(code, small):
    (small / NAMES["wrong"]).write_text(code)
    expected = small / "expected_outputs/chapter01/09_wrong.txt"
    expected.write_text("ok? True\n")
    done = run(small, "--update")
    assert done.returncode == 1
    assert expected.read_text() == "ok? True\n"


@pytest.mark.parametrize("arguments", [(), ("--update",)])
@pytest.mark.parametrize("want", [None, "x\n"])
def test_a_skipped_script_fails_nothing_and_writes_nothing(want, arguments, tmp_path):
    cases = {"good": CASES["good"], "skips": (CASES["skips"][0], want, "")}
    root = make_repository(tmp_path / "r", cases)
    done = run(root, *arguments)
    assert done.returncode == 0, done.stdout
    assert "1 of 1 scripts right, 1 skipped, in" in done.stdout
    path = (root / "expected_outputs" / NAMES["skips"]).with_suffix(".txt")
    assert (path.read_text() if path.exists() else None) == want


def test_selection(small):
    assert run(small, "--list").stdout.split() == [NAMES["good"], NAMES["wrong"]]
    assert run(small, "chapter01/01").returncode == 0
    assert run(small, "01_good.py", cwd=small / "chapter01").returncode == 0
    assert run(small, f"{small}/chapter01/", "--list").stdout.split() == list(
        map(NAMES.get, ("good", "wrong"))
    )
    done = run(small, "chapter02")
    assert done.returncode == 2
    assert NAMES["good"] in done.stderr
    assert run(small, "--jobs", "0").returncode == 2
    assert run(small, "--timeout", "nan").returncode == 2


def test_no_script_is_a_failure(tmp_path):
    done = run(make_repository(tmp_path / "empty", {}))
    assert done.returncode == 1
    assert "no script found" in done.stdout


def test_ctrl_c_reports_what_finished_and_leaves_nothing(tmp_path):
    root = make_repository(tmp_path / "r", {name: CASES[name] for name in ("good", "hangs")})
    (root / NAMES["hangs"]).write_text("import subprocess; subprocess.run(['sleep', '614'])")
    process = subprocess.Popen(
        [sys.executable, root / "run_all.py"], stdout=subprocess.PIPE, encoding="utf-8"
    )
    deadline = time.monotonic() + SLOW_START
    while not running("sleep 614") and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=SLOW_START)
    assert process.returncode == 130
    assert "1 right" in output and NAMES["hangs"] in output.split("Not finished")[1]
    assert not running("sleep 614")


@pytest.mark.parametrize("seconds", [0.6, 1.2, 2.4])
def test_ctrl_c_while_starting(seconds, tmp_path):
    """Importing torch may swallow an exception; the run must end all the same."""
    root = make_repository(tmp_path / "r", {"hangs": CASES["hangs"]})
    process = subprocess.Popen([sys.executable, root / "run_all.py"], stdout=subprocess.DEVNULL)
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=SLOW_START) == 130
    assert not running("sleep 613")


# A stand-in for a package, in a folder that comes first on the path.
def fake(folder, package, version):
    metadata = folder / f"{package}-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")


@pytest.mark.parametrize(
    "versions, complaint",
    [
        ({"triton": "3.6.0", "numpy": "2.4.6"}, "pip install 'numpy<2.4'"),
        ({"triton": "3.2.0"}, "triton 3.2.0 is too old"),
    ],
)
def test_versions_that_do_not_go_together(versions, complaint, small, tmp_path):
    for package, number in versions.items():
        fake(tmp_path / "fake", package, number)
    done = run(small, "--backend", "interpreter", PYTHONPATH=str(tmp_path / "fake"))
    assert done.returncode == 1
    assert complaint in done.stdout and len(done.stdout.splitlines()) == 1
    assert done.stderr == ""


@pytest.mark.parametrize("package", ["rich", "torch", "triton", "numpy"])
def test_a_missing_package_is_named(package, small):
    code = (
        "import importlib.metadata as m, runpy, sys; real = m.version\n"
        f"def version(name):\n    if {package!r} in name: raise m.PackageNotFoundError\n"
        "    return real(name)\n"
        "m.version = version; sys.argv = ['run_all.py']; sys.path.insert(0, '.')\n"
        "runpy.run_path('run_all.py', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=small, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout == f"run_all.py: {package} is not installed: pip install {package}\n"


def test_no_gpu(small):
    done = run(small, "--backend", "gpu", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1
    assert "torch sees no GPU" in done.stdout
