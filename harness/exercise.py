"""Check a reader's kernel property by property, and say what is wrong with it.

An exercise holds a kernel to write, its launcher and the names of its properties in teaching order;
harness/properties.py holds what each property tries. This module runs them and prints the screen.
Inputs lie between margins of NaN and outputs between margins that must stay untouched, so a read or
a write past the end shows everywhere, without a memory checker.
"""

import argparse
import ast
import os
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

MARGIN = 4096  # elements on either side of a tensor; a multiple of 16 bytes, as alignment matters
# What stands in an output until a kernel writes it: a NaN that no computation gives; for ids, -1e9.
UNWRITTEN = {torch.float32: 0x7FC0BEEF, torch.int32: -1_000_000_000}


class Case(NamedTuple):
    """One launch: its input in words, tensors and options, and judge(output) -> (came, wanted)."""

    text: str
    inputs: tuple
    options: dict
    judge: Callable  # returns None if the output is right
    fill: float = float("nan")  # what the margins of the inputs hold


class Property(NamedTuple):
    """What must hold: its cases, the smallest first, a hint in one line and a longer one."""

    cases: Callable  # () -> list of Case
    hint: str
    more: str


class Exercise(NamedTuple):
    """What an exercise script says of itself."""

    file: str
    kernel: Callable
    launcher: Callable
    device: str
    table: dict  # name -> Property
    properties: list  # names, in teaching order
    solution: str  # the lesson script
    traps: str


class Failure(NamedTuple):
    """The first case of a property that is wrong, and in which way."""

    name: str
    text: str
    came: str
    wanted: str
    hint: str
    more: str


def blank(shape, dtype=torch.float32, device="cpu", stride=None):
    """An output in which every element that a kernel does not write can be told."""
    count = max(1, torch.Size(shape).numel())
    buffer = torch.full((count + 2 * MARGIN,), UNWRITTEN[dtype], dtype=torch.int32, device=device)
    stride = torch.empty(shape).stride() if stride is None else stride
    return buffer.view(dtype).as_strided(shape, stride, MARGIN)


def blank_like(x):
    """A blank output with the shape, strides and device that torch.empty_like(x) has."""
    return blank(x.shape, x.dtype, x.device, torch.empty_like(x, device="meta").stride())


def unwritten(out):
    """Where nothing was written, as a mask of the shape of out."""
    bits = out.view(torch.int32) if out.dtype == torch.float32 else out
    return bits == UNWRITTEN[out.dtype]


def written_outside(out):
    """How many elements of a blank output's margins were written."""
    whole = out.as_strided((out.untyped_storage().nbytes() // out.element_size(),), (1,), 0)
    return int((~unwritten(whole)).sum()) - int((~unwritten(out)).sum())


def guarded(x, device, fill):
    """A copy of x on the device, with its strides, between margins that hold `fill`."""
    extent = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True) if n)
    buffer = torch.full((max(1, extent) + 2 * MARGIN,), fill, dtype=x.dtype, device=device)
    copy = buffer.as_strided(x.shape, x.stride(), MARGIN)
    copy.copy_(x)
    return copy


# --- The reader's file ---------------------------------------------------------------------------


def find_function(text, name):
    """The syntax tree of a function of a script."""
    return next(
        node
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef) and node.name == name
    )


def is_empty(function):
    """Whether a function's body holds nothing but a docstring, pass and `...`."""
    return all(
        isinstance(node, ast.Pass)
        or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for node in function.body
    )


def explain_error(error, file):
    """(line number or None, the line, the error in one line) of what a launch raised."""
    chain = [error]
    while chain[-1].__cause__ or chain[-1].__context__:
        chain.append(chain[-1].__cause__ or chain[-1].__context__)
    text = Path(file).read_text("utf-8")
    number, message = None, ""
    for one in chain:
        said = str(getattr(one, "error_message", None) or one).strip()
        message = f"{type(one).__name__}: {said.splitlines()[-1] if said else ''}"
        # A compiler's error counts lines from the function's `def`.
        source, node = getattr(one, "src", None), getattr(one, "node", None)
        if isinstance(source, str) and node is not None and source.strip() in text:
            number = text[: text.index(source.strip())].count("\n") + node.lineno
        step = one.__traceback__
        while step and not hasattr(one, "src"):
            if step.tb_frame.f_code.co_filename == str(file):
                number = step.tb_lineno
            step = step.tb_next
    lines = text.splitlines()
    line = lines[number - 1].strip() if number and number <= len(lines) else ""
    return number, line, message


# --- Checking ------------------------------------------------------------------------------------


def check_property(exercise, name):
    """None if the property holds, else its Failure."""
    cases, hint, more = exercise.table[name]
    for case in cases():
        inputs = [guarded(x, exercise.device, case.fill) for x in case.inputs]
        try:
            with warnings.catch_warnings():
                # The interpreter computes with NumPy, which warns of NaN; the judge tells more.
                warnings.simplefilter("ignore", RuntimeWarning)
                out = exercise.launcher(*inputs, **case.options)
            outs = [whole_cpu(x) for x in out] if isinstance(out, tuple) else whole_cpu(out)
        except Exception as error:
            number, line, message = explain_error(error, exercise.file)
            where = f"line {number}: {line}" if number else "outside of this file"
            return Failure(name, case.text, message, "", where, more)
        verdict = case.judge(outs)
        if verdict:
            return Failure(name, case.text, *verdict, hint, more)
    return None


def whole_cpu(out):
    """The output on the CPU, margins included, which .cpu() would leave behind."""
    whole = out.as_strided((out.untyped_storage().nbytes() // out.element_size(),), (1,), 0)
    return whole.cpu().as_strided(out.shape, out.stride(), out.storage_offset())


def show_failure(failure, longer):
    """The lines that tell what is wrong."""
    rows = [("input", failure.text)]
    if failure.wanted:
        rows += [("came", failure.came), ("wanted", failure.wanted), ("hint", failure.hint)]
    else:
        rows += [("raised", failure.came), ("in", failure.hint)]
    if longer and failure.wanted:
        rows += [("more", failure.more)]
    print(f"FAILED  {failure.name}")
    for label, text in rows:
        indent = f"        {label:<7} "
        print(textwrap.fill(text, 100, initial_indent=indent, subsequent_indent=" " * len(indent)))


def main(exercise):
    """The command line of an exercise; the exit code: 0 if all holds, 1 if not, 2 for usage."""
    path = Path(exercise.file).resolve()
    name = os.path.relpath(path)
    kernel = exercise.kernel.__name__
    parser = argparse.ArgumentParser(description=f"Check {kernel}, which you write in this file.")
    parser.add_argument("--all", action="store_true", help="go on after a property that fails")
    parser.add_argument("--hint", action="store_true", help="say more about what fails")
    parser.add_argument("--solution", action="store_true", help="name the script that solves it")
    arguments = parser.parse_args()
    if arguments.solution:
        print(f"{exercise.solution} has a kernel that passes.")
        return 0
    if is_empty(find_function(path.read_text("utf-8"), kernel)):
        print(f"{name}: {kernel} is empty; write its body, then run this again.")
        return 1
    where = "a GPU" if exercise.device == "cuda" else "Triton's interpreter"
    print(f"{kernel}, on {where}")
    failed, raised = 0, set()
    for property_name in exercise.properties:
        failure = check_property(exercise, property_name)
        if failure is None:
            print(f"ok      {property_name}")
            continue
        failed += 1
        if failure.came in raised:
            print(f"FAILED  {property_name}: the same error")
        else:
            show_failure(failure, arguments.hint)
        if not failure.wanted:
            raised.add(failure.came)
        if not arguments.all:
            break
    if failed:
        more = "" if arguments.hint else "--hint says more, "
        more += "" if arguments.all else "--all goes on, "
        print(f"\nNext: change {kernel} and run this again; {more}--solution names the lesson.")
        return 1
    print(f"\nAll {len(exercise.properties)} properties hold.")
    print(f"Next: read {exercise.solution}, then run {exercise.traps}.")
    return 0
