"""Check that the programs of all benchmarks find what they import."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

import benchmarks

MODULES = [module.name for module in pkgutil.walk_packages(benchmarks.__path__, "benchmarks.")]


@pytest.mark.parametrize("name", MODULES)
def test_a_benchmark_can_be_imported(name: str) -> None:
    importlib.import_module(name)
