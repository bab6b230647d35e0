"""Run the book's scripts and compare what they print with expected_outputs/.

python run_all.py                 run everything
python run_all.py chapter21/03    run what begins with this path
python run_all.py --help          the other options
"""

import argparse
import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path

from harness.compare import compare, merge, turns_false
from harness.environment import EnvironmentProblem, check_packages, choose_backend, version
from harness.run import ROOT, find_scripts, run_scripts, start_server

EXPECTED = ROOT / "expected_outputs"


def expected_path(name):
    """Where the expected output of a script lies."""
    return (EXPECTED / name).with_suffix(".txt")


def read_expected(name):
    """The expected text of a script, or None if there is no such file."""
    path = expected_path(name)
    return (
        path.read_bytes().decode("utf-8-sig", errors="backslashreplace") if path.is_file() else None
    )


def orphans(names):
    """Expected files whose script is gone."""
    known = {expected_path(name) for name in names}
    return sorted(p.relative_to(ROOT).as_posix() for p in EXPECTED.rglob("*.txt") if p not in known)


def write_file(path, text):
    """Replace a file as a whole, so that an interrupted update leaves the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".new")
    new.write_text(text, encoding="utf-8", newline="")
    new.replace(path)


def show_tail(console, title, text, lines=20):
    """Print the end of a script's output."""
    every = text.rstrip().splitlines()
    cut = f" (the last {lines} of {len(every)} lines)" if len(every) > lines else ""
    if every:
        console.print(f"  {title}{cut}:", style="bold")
    for line in every[-lines:]:
        console.print("    " + line)


def show_differences(console, differences, most=20):
    """Print the lines that differ, wanted and got side by side."""
    from rich.table import Table
    from rich.text import Text

    table = Table("line", "wanted", "got", "why", box=None, padding=(0, 2, 0, 2))
    for d in differences[:most]:
        cells = (str(d.line), d.want, d.got, d.why)
        table.add_row(*(Text(cell, overflow="fold") for cell in cells))
    console.print(table)
    if len(differences) > most:
        console.print(f"  ... and {len(differences) - most} more lines")


def judge(console, result, update):
    """Report one finished script; True if it is right or skipped (or, with update, now right)."""
    if result.skipped:
        console.print(f"{result.name:<50} {result.seconds:6.1f} s  skipped: {result.skipped}")
        return True
    want = read_expected(result.name)
    where = expected_path(result.name).relative_to(ROOT).as_posix()
    differences = [] if result.failure else compare(want or "", result.stdout)
    verdict = "ok"
    if result.failure:
        verdict = "FAILED: " + result.failure
    elif want is None:
        verdict = f"wrote {where}" if update else f"FAILED: {where} is missing"
    elif differences and update:
        refused = turns_false(differences)
        verdict = "FAILED: a line turns from True to False" if refused else f"updated {where}"
    elif differences:
        verdict = f"FAILED: {len(differences)} line(s) differ from {where}"
    good = not verdict.startswith("FAILED")
    console.print(
        f"{result.name:<50} {result.seconds:6.1f} s  {verdict}", style="" if good else "bold red"
    )
    if result.failure:
        show_tail(console, "stdout", result.stdout)
    if differences:
        show_differences(console, differences)
    if not good:
        show_tail(console, "stderr", result.stderr)
    if good and update and (want is None or differences):
        write_file(expected_path(result.name), merge(want or "", result.stdout))
    if verdict.endswith("is missing"):
        console.print("  Restore it with git, or write it from this run with --update.")
    if verdict.endswith("True to False"):
        console.print("  Nothing was written. If False is right, edit the expected file by hand.")
    return good


def select(prefixes, names):
    """The names that begin with one of the prefixes, which may also be paths from here."""
    wanted = []
    for prefix in prefixes:
        path = Path(prefix).resolve()
        if path.exists() and path.is_relative_to(ROOT):
            prefix = path.relative_to(ROOT).as_posix()
            prefix = "" if prefix == "." else prefix + "/" * path.is_dir()
        matching = [name for name in names if name.startswith(prefix.removeprefix("./"))]
        if not matching:
            have = "\n  ".join(names)
            raise LookupError(f"no script begins with {prefix!r}; there are:\n  {have}")
        wanted += matching
    return [name for name in names if name in wanted] if prefixes else names


def positive(kind):
    """An argparse type: a positive int or float."""

    def parse(text):
        value = kind(text)
        if not 0 < value < float("inf"):
            raise ValueError
        return value

    parse.__name__ = f"positive {kind.__name__}"
    return parse


def parse_arguments(names):
    """The command line, with .names the selected scripts; exits with 2 if it makes no sense."""
    parser = argparse.ArgumentParser(
        description="Run the book's scripts and compare what they print with expected_outputs/."
    )
    cpus = min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)
    parser.add_argument(
        "prefix", nargs="*", help="run only scripts that begin with this: chapter21, chapter21/03"
    )
    parser.add_argument("--list", action="store_true", help="list the scripts and stop")
    parser.add_argument(
        "--jobs", type=positive(int), default=cpus, help=f"scripts at a time (here: {cpus})"
    )
    parser.add_argument(
        "--timeout", type=positive(float), default=300, help="seconds for one script (300)"
    )
    parser.add_argument(
        "--backend", choices=["auto", "gpu", "interpreter"], default="auto", help="where to run"
    )
    parser.add_argument(
        "--update",
        action="store_true",
        help="write what differs into expected_outputs/; lines that match keep their digits",
    )
    arguments = parser.parse_args()
    try:
        arguments.names = select(arguments.prefix, names)
    except LookupError as error:
        parser.error(str(error))
    return arguments


def report(console, arguments, all_names, interpret, start, stop):
    """Run the selected scripts, print a line for each and a summary; the exit code."""
    good, bad, skipped, running = [], [], [], []
    steps = run_scripts(arguments.names, interpret, arguments.jobs, arguments.timeout, stop=stop)
    status = console.status("starting") if console.is_terminal else contextlib.nullcontext()
    with contextlib.closing(steps), status as display:
        for name, result in steps:
            if result is None:
                running.append(name)
            else:
                running.remove(name)
                right = judge(console, result, arguments.update)
                (skipped if result.skipped else good if right else bad).append(name)
            if display:
                done = len(good) + len(bad) + len(skipped)
                display.update(f"{done} of {len(arguments.names)}: {', '.join(running)}")
    unfinished = [name for name in arguments.names if name not in good + bad + skipped]
    if unfinished:
        console.print(f"Interrupted. {len(good)} right, {len(bad)} wrong. Not finished:")
        for name in unfinished:
            console.print("  " + name)
        return 130

    lost = [] if arguments.prefix else orphans(all_names)
    for path in lost:
        console.print(f"FAILED: {path} has no script: remove it or restore the script", style="red")
    console.print()
    seconds = time.monotonic() - start
    ran, skips = len(good) + len(bad), f", {len(skipped)} skipped" if skipped else ""
    console.print(f"{len(good)} of {ran} scripts right{skips}, in {seconds:.1f} s.")
    if bad or lost:
        if bad:
            console.print(f"Next: python {bad[0]}, then README.md, 'When a script fails'.")
        return 1
    console.print("Next: open a script, change a kernel, and run this again.")
    return 0


def main():
    start = time.monotonic()
    # A Ctrl-C ends the run at a defined point. As an exception it could come while torch is being
    # imported, which may swallow it, or before a new process is known, which would then live on.
    stop = threading.Event()
    for number in signal.SIGINT, signal.SIGTERM:
        signal.signal(number, lambda *_: stop.set())
    # A character that the terminal's encoding lacks is shown as an escape.
    sys.stdout.reconfigure(errors="backslashreplace")
    all_names = find_scripts()
    arguments = parse_arguments(all_names)
    if not all_names:
        print(f"no script found: there is no chapter*/[0-9]*.py in {ROOT}")
        return 1
    if arguments.list:
        print("\n".join(arguments.names))
        return 0
    try:
        check_packages()
        start_server()
        interpret, backend = choose_backend(arguments.backend)
    except EnvironmentProblem as problem:
        print(f"run_all.py: {problem}")
        return 1
    from rich.console import Console

    # Unknown width in a pipe: lines stay whole.
    console = Console(markup=False, highlight=False, emoji=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = 160
    versions = ", ".join(f"{p} {version(p)}" for p in ("torch", "triton", "numpy"))
    console.print(f"Python {sys.version.split()[0]}, {versions}")
    console.print(f"Backend: {backend}")
    return report(console, arguments, all_names, interpret, start, stop)


if __name__ == "__main__":
    sys.exit(main())
