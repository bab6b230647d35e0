"""What several test files need."""

import importlib.util

import pytest

from harness.run import ROOT


def load_script(name):
    """Import a script by its path in the repository; its kernels then run where it chose."""
    spec = importlib.util.spec_from_file_location(name.replace("/", "_"), ROOT / name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def script():
    """load_script, each script once."""
    loaded = {}
    return lambda name: (
        loaded[name] if name in loaded else loaded.setdefault(name, load_script(name))
    )
