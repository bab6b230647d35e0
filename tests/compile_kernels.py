"""Compile every kernel that scripts launch, for GPUs that are not here; no GPU is needed.

    python tests/compile_kernels.py SCRIPT...

Each launch is first compiled for every target, with the very arguments of that launch and so with
the specialisation that they cause (an int that equals 1 becomes a constant), and then run in the
interpreter, so that the script goes on with real results. One JSON line per kernel, specialisation
and target goes to stdout: script, kernel, target, shared (bytes of shared memory), error; for Gluon
kernels also stack (bytes a thread, for want of registers).

A script's gpu_only_launches makes the launches that only a GPU can run. It may take an argument:
then it makes those of that architecture, if it has any.
"""

import contextlib
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile

# Both must be so before triton is imported: kernels are to be compiled, and no GPU is to be used.
os.environ.pop("TRITON_INTERPRET", None)
os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["HIP_VISIBLE_DEVICES"] = ""

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

TARGETS = {f"sm_{chip}": GPUTarget("cuda", chip, 32) for chip in (75, 80, 86, 89, 90, 100, 120)}
TARGETS["gfx942"] = GPUTarget("hip", "gfx942", 64)


class StandInDriver:
    """What JITFunction.run asks of a driver when it only compiles."""

    def __init__(self, target):
        self.get_current_target = lambda: target
        self.get_current_device = lambda: str(target)  # the key of its cache of compiled kernels
        self.get_current_stream = lambda device: 0


DRIVERS = {name: StandInDriver(target) for name, target in TARGETS.items()}
compile_launch = JITFunction.run


def stack(compiled):
    """Bytes a thread keeps in memory for want of registers."""
    program = os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin/cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [program, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", usage)[1])


@contextlib.contextmanager
def unpatched_language():
    """Undo what the interpreter patches in triton.language, for the next compilation."""
    owners = [tl, tl.core, tl.math, tl.tensor, tl.core.tensor, tl.core.dtype]
    owners += [owner for name in ("tensor_descriptor", "tensor_descriptor_base")
               if (owner := getattr(tl.core, name, None))]  # fmt: skip
    before = [(owner, dict(vars(owner))) for owner in owners]
    try:
        yield
    finally:
        for owner, members in before:
            for name, member in dict(vars(owner)).items():
                if name not in members:
                    delattr(owner, name)
                elif member is not members[name]:
                    setattr(owner, name, members[name])


def compile_then_interpret(kernel, *args, grid, warmup, **kwargs):
    """In place of JITFunction.run: compile this launch for all targets, then interpret it."""
    for name, stand_in in DRIVERS.items():
        driver.set_active(stand_in)
        row = {"script": script, "kernel": kernel.fn.__name__, "target": name}
        try:
            compiled = compile_launch(kernel, *args, grid=grid, warmup=True, **kwargs)
            row |= {"shared": compiled.metadata.shared, "error": ""}
            if type(kernel) is not JITFunction:
                row["stack"] = stack(compiled)
        except Exception as error:
            row |= {"shared": 0, "error": f"{type(error).__name__}: {error}"}
        if row not in rows:
            rows.append(row)
            print(json.dumps(row), file=report, flush=True)
    if not interpret:
        return
    with unpatched_language():
        InterpretedFunction(kernel.fn).run(*args, grid=grid, warmup=False, **kwargs)


JITFunction.run = compile_then_interpret
# Inside an interpreted kernel, a call of another jitted function is interpreted too.
JITFunction.__call__ = lambda self, *args, **kwargs: InterpretedFunction(self.fn)(*args, **kwargs)
# A script that finds no GPU asks for the interpreter; here its kernels are compiled all the same.
triton.jit = lambda fn=None, **options: JITFunction(fn, **options) if fn else triton.jit

report = sys.stdout
for script in sys.argv[1:]:
    sys.argv = [script]  # what the script sees
    rows, interpret = [], True
    with contextlib.redirect_stdout(sys.stderr):
        try:
            names = runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            if end.code != 77:
                raise
            names = runpy.run_path(script)  # it cannot run here, but says what it would launch
        # Programs that wait for one another never end in the interpreter: these only compile.
        interpret = False
        launches = names.get("gpu_only_launches", lambda: None)
        if launches.__code__.co_argcount == 0:
            launches()
        else:  # the tiles of every architecture are its own
            everyone = DRIVERS
            for name, target in TARGETS.items():
                DRIVERS = {name: everyone[name]}
                launches(target.arch if target.backend == "cuda" else 0)
            DRIVERS = everyone
