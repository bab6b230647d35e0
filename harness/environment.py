"""Can the scripts run here, and on what: every problem is one line that names the fix."""

import contextlib
import importlib.metadata
import os
import re
import sys

INTERPRET_WORDS = ("1", "true", "yes", "on", "y")  # what triton takes for TRITON_INTERPRET=1


class EnvironmentProblem(Exception):
    """Something is missing or does not go together; the text names the fix."""


def version(package):
    """The installed version of a package, or None. PyTorch's own builds rename triton."""
    for name in package, f"pytorch-{package}", f"pytorch-{package}-rocm":
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def at_least(have, want):
    """Whether version `have` ("3.7.1+git") is `want` (3, 7) or newer."""
    return tuple(map(int, re.findall(r"\d+", have)[:2])) >= want


def check_packages():
    """Raise EnvironmentProblem if the scripts cannot run here at all."""
    if sys.platform != "linux":
        raise EnvironmentProblem(
            "Triton needs Linux: use WSL on Windows, a Linux container or Colab on a Mac"
        )
    if sys.version_info < (3, 11):  # noqa: UP036, a reader may start it with any Python
        raise EnvironmentProblem("Python 3.11 or newer is needed: install it, then a new .venv")
    for package in "rich", "torch", "triton", "numpy":
        if version(package) is None:
            raise EnvironmentProblem(f"{package} is not installed: pip install {package}")
    if not at_least(version("triton"), (3, 3)):
        raise EnvironmentProblem(
            f"triton {version('triton')} is too old: pip install -r requirements.txt"
        )


def choose_backend(backend):
    """(interpret, description) for --backend auto, gpu or interpreter. Imports torch.

    Raises EnvironmentProblem if the backend cannot work here.
    """
    try:
        import torch
    except Exception as error:
        raise EnvironmentProblem(f"torch does not import ({error}): reinstall it") from error
    asked = os.environ.get("TRITON_INTERPRET", "").lower() in INTERPRET_WORDS
    if backend == "interpreter":
        interpret, description = True, "Triton's interpreter on the CPU, as --backend asks"
    elif backend == "auto" and asked:
        interpret, description = True, "Triton's interpreter on the CPU, as TRITON_INTERPRET asks"
    elif torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        chip = "ROCm" if torch.version.hip else f"sm_{major}{minor}"
        interpret, description = False, f"GPU, {torch.cuda.get_device_name()} ({chip})"
        if not torch.version.hip and (major, minor) < (7, 5):
            raise EnvironmentProblem(
                f"Triton needs sm_75 or newer, not {description}: use --backend interpreter"
            )
    elif backend == "gpu":
        raise EnvironmentProblem("torch sees no GPU: see nvidia-smi, or --backend interpreter")
    else:
        interpret, description = True, "Triton's interpreter on the CPU, as torch sees no GPU"
    numpy, triton = version("numpy"), version("triton")
    if interpret and at_least(numpy, (2, 4)) and not at_least(triton, (3, 7)):
        raise EnvironmentProblem(
            f"the interpreter of triton {triton} fails with numpy {numpy}: pip install 'numpy<2.4'"
        )
    return interpret, description
