"""run_all.py under load: 200 scripts of ten kinds, with one, two and eight jobs."""

import os
import subprocess
import sys

import pytest
from test_run_all import running

from harness.run import ROOT, run_scripts, start_server

# Kind: the script, with N for its number, and its right verdict.
KINDS = {
    "right": ("print('number', N)", ""),
    "silent": ("pass", ""),
    "non_ascii": ("print('\u00fc\u2264' * 50)", ""),
    "chatty": ("import sys; print('y' * 100000); sys.stderr.write('e' * 200000)", ""),
    "waits": ("import time; time.sleep(0.05); print(N)", ""),
    "raises": ("print(1); raise ValueError(N)", "exit code 1"),
    "exits": ("import sys; print(1); sys.exit(3)", "exit code 3"),
    "aborts": ("import os; print(1); os.abort()", "killed by SIGABRT"),
    "is_killed": ("import os; os.kill(os.getpid(), 9)", "killed by SIGKILL"),
    "leaves_child": ("import subprocess; subprocess.Popen(['sleep', '615']); print(N)", ""),
}
HANGS = "import subprocess; print(N, flush=True); subprocess.run(['sleep', '616'])"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("load")
    for number in range(197):
        kind = list(KINDS)[number % len(KINDS)]
        (folder / f"{number:03}_{kind}.py").write_text(f"N = {number}\n{KINDS[kind][0]}", "utf-8")
    for number in range(197, 200):
        (folder / f"{number:03}_hangs.py").write_text(f"N = {number}\n{HANGS}")
    return folder


@pytest.mark.parametrize("jobs", [1, 2, 8])
def test_every_verdict_is_right_and_nothing_is_left(jobs, folder):
    names = sorted(path.name for path in folder.iterdir())
    start_server()
    steps = run_scripts(names, interpret=True, jobs=jobs, timeout=3, root=folder)
    started, results = [], {}
    for name, result in steps:
        if result is None:
            started.append(name)
        else:
            results[name] = result
            assert len(started) - len(results) < jobs
    assert sorted(results) == sorted(started) == names
    for name, result in results.items():
        number, kind = int(name[:3]), name[4:-3]
        want = "timed out after 3 s" if kind == "hangs" else KINDS[kind][1]
        assert result.failure == want, name
        if kind in ("waits", "leaves_child", "hangs"):
            assert result.stdout == f"{number}\n", name
        if kind == "non_ascii":
            assert result.stdout == "\u00fc\u2264" * 50 + "\n"
    assert not running("sleep 615") and not running("sleep 616")


def test_memory_stays_flat(folder):
    """200 scripts need no more memory than 20: what a script printed is dropped when judged."""
    code = (
        "import resource, sys; from harness.run import *; start_server(); names = sys.argv[2:]\n"
        "for _ in run_scripts(names, True, 8, 3, root=Path(sys.argv[1])): pass\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    names = sorted(path.name for path in folder.iterdir() if "hangs" not in path.name)
    peak = []
    for some in names[:20], names:
        command = [sys.executable, "-c", code, folder, *some]
        done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        peak.append(int(done.stdout.split()[-1]))
    assert peak[1] < peak[0] + 5000, f"{peak} kB"
