"""pytest plugin: PyTorch's ``test/test_optim.py`` over the classes of this package instead of its own."""

from __future__ import annotations

import sys
import unittest
from types import ModuleType

from conformance.registry import plug_in

OTHERS = {
    "optim.test_lrscheduler": "TestLRScheduler",
    "optim.test_optim": "TestDifferentiableOptimizer",
    "optim.test_swa_utils": "TestSWAUtils",
}
"""Modules that the file imports test cases from, which are about torch's own classes."""


def pytest_configure() -> None:
    """Before anything is collected: the framework reads its list of optimizers when the file is imported."""
    plug_in()
    package = ModuleType("optim")
    sys.modules[package.__name__] = package
    for name, case in OTHERS.items():
        module = ModuleType(name)
        setattr(module, case, type(case, (unittest.TestCase,), {}))
        sys.modules[name] = module
