"""Finding the scripts, and running them several at a time, each in a process of its own.

Importing torch takes longer than what a script does with it. So one server process imports it once,
and every script runs in a fork of the server, with torch in memory.
"""

import contextlib
import io
import multiprocessing
import multiprocessing.connection
import os
import runpy
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
FORKSERVER = multiprocessing.get_context("forkserver") if sys.platform == "linux" else None
OUTPUT_LIMIT = 1_000_000  # bytes; a script that prints more is stopped
SKIPPED = 77  # the exit code of a script that cannot run on this machine, as in GNU automake


class Result(NamedTuple):
    """What a script did: failure is "" after exit code 0, else what happened, in words.

    skipped is why the script cannot run here: exit code 77, nothing on stdout. Then failure is "".
    """

    name: str
    stdout: str
    stderr: str
    seconds: float
    failure: str
    skipped: str = ""


def find_scripts():
    """Names of all scripts, relative to the repository, in the book's order."""
    return sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("chapter*/[0-9]*.py"))


def start_server():
    """Start the server, which imports torch while this process goes on."""
    FORKSERVER.set_forkserver_preload(["torch"])
    multiprocessing.forkserver.ensure_running()


def child(script, interpret, stdout_path, stderr_path):
    """Become `python script`, with stdout and stderr in files. Runs in a fork of the server."""
    os.setsid()  # a session of its own, so that it can be killed with all that it starts
    # What the server opened is not for programs that the script starts: one that outlives the
    # script would hold this process's end of a pipe, and whoever reads the other end would wait.
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            os.set_inheritable(descriptor, descriptor < 3)
    for descriptor, path in (1, stdout_path), (2, stderr_path):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, descriptor)
        os.close(opened)
    # UTF-8 whatever the locale, and unbuffered, so that nothing is lost if the script aborts.
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(
            io.FileIO(descriptor, "w", closefd=False),
            encoding="utf-8",
            errors="backslashreplace",
            write_through=True,
        )
        for descriptor in (1, 2)
    )
    os.environ["TRITON_INTERPRET"] = "1" if interpret else "0"
    sys.argv = [script]
    sys.path[0] = os.path.dirname(script)
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit:
        raise
    except BaseException as error:
        # The traceback from the script's first frame on, as `python script` would print it.
        frames = error.__traceback__
        while frames and frames.tb_frame.f_code.co_filename != script:
            frames = frames.tb_next
        traceback.print_exception(error.with_traceback(frames))
        sys.exit(1)


def kill(process):
    """Kill a script's process with all that it started, and wait for its end."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def read_output(path):
    """The text a script printed, up to OUTPUT_LIMIT."""
    if not path.exists():
        return ""
    with open(path, "rb") as file:
        return file.read(OUTPUT_LIMIT).decode("utf-8", errors="backslashreplace")


def skip_reason(code, stdout, stderr):
    """The last line on stderr of a script that says it cannot run here, or "" if it does not."""
    if code != SKIPPED or stdout:
        return ""
    lines = stderr.strip().splitlines() or ["no reason given"]
    return lines[-1].removeprefix("skipped: ")


def run_scripts(names, interpret, jobs, timeout, root=ROOT, stop=None):
    """Run scripts, `jobs` at a time; yield (name, None) when one starts, (name, Result) at its end.

    interpret: run in Triton's interpreter instead of on the GPU. timeout: seconds for one script.
    root: the folder that the names are relative to. stop: a threading.Event that ends it early.
    Whatever ends the generator early, what still runs is killed.
    """
    waiting, running = list(reversed(names)), {}
    with tempfile.TemporaryDirectory() as folder:

        def files(name):
            return tuple(Path(folder, name.replace("/", "_") + end) for end in (".out", ".err"))

        try:
            while (waiting or running) and not (stop and stop.is_set()):
                while waiting and len(running) < jobs:
                    name = waiting.pop()
                    process = FORKSERVER.Process(
                        target=child, args=(str(root / name), interpret, *files(name)), daemon=False
                    )
                    process.start()
                    running[name] = process, time.monotonic()
                    yield name, None
                multiprocessing.connection.wait([p.sentinel for p, _ in running.values()], 0.1)
                for name, (process, start) in list(running.items()):
                    seconds = time.monotonic() - start
                    size = max((f.stat().st_size for f in files(name) if f.exists()), default=0)
                    if not process.is_alive():
                        code = process.exitcode
                        failure = f"exit code {code}" if code > 0 else ""
                        if code < 0:
                            failure = f"killed by {signal.Signals(-code).name}"
                    elif seconds > timeout:
                        failure = f"timed out after {timeout:g} s"
                    elif size > OUTPUT_LIMIT:
                        failure = f"stopped: printed more than {OUTPUT_LIMIT:,} bytes"
                    else:
                        continue
                    kill(process)
                    del running[name]
                    stdout, stderr = map(read_output, files(name))
                    skipped = skip_reason(process.exitcode, stdout, stderr)
                    failure = "" if skipped else failure
                    yield name, Result(name, stdout, stderr, seconds, failure, skipped)
        finally:
            for process, _ in running.values():
                kill(process)
