"""Run the interposer on the real driver: libcudf's kernels are counted and capped, results are unchanged."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from dask_gpurt.overlap.interposer import DeviceLimits
from tests.helpers.commands import answer
from tests.helpers.interposer.sm_model import residency, shared_for
from tests.helpers.interposers import ROOT, SOURCES, build_interposer, needs_compiler
from tests.helpers.interposers import packages as packages  # a fixture

pytestmark = [pytest.mark.gpu, needs_compiler]

CAP = 4


def paths(package: Path) -> str:
    """Return an environment in which a process imports the given copy of the package."""
    return os.pathsep.join([str(package), *(path for path in sys.path if path != str(ROOT))])


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    library = build_interposer(tmp_path_factory.mktemp("alone"))
    return answer(SOURCES / "capped.py", str(CAP), LD_PRELOAD=str(library), PYTHONPATH=paths(ROOT))


def test_results_are_the_same_with_a_cap(alone: Any) -> None:
    assert alone["capped"] == alone["plain"] == alone["after"]


def test_launches_are_counted_while_caps_count(alone: Any) -> None:
    assert alone["before"]["seen"] == 0
    assert alone["counters"]["seen"] > 20
    assert alone["counters"]["capped"] > 4
    assert alone["counters"]["left.unknown"] == 0
    assert alone["idle"] == alone["counters"]


def test_the_driver_sees_the_residency_of_capped_kernels_of_libcudf(alone: Any) -> None:
    limits = DeviceLimits(**alone["limits"])
    roomy = [kernel for kernel in alone["kernels"] if (kernel["natural"] or 0) > CAP]
    assert {kernel["then"] for kernel in roomy} == {CAP}
    for kernel in roomy:
        natural = residency(limits, kernel["threads"], kernel["registers"], kernel["shared"])
        assert natural == kernel["natural"], kernel
        assert residency(limits, kernel["threads"], kernel["registers"], shared_for(limits, CAP)) == CAP
    assert len({kernel["name"] for kernel in roomy if "cudf" in kernel["name"]}) >= 2


def test_a_worker_of_dask_cuda_caps(packages: Path) -> None:
    found = answer(
        SOURCES / "capped_worker.py",
        PYTHONPATH=paths(packages / "built"),
        DASK_GPURT__ENABLED="True",
        DASK_GPURT__OVERLAP__MODE=str(CAP),
        DASK_DISTRIBUTED__NANNY__PRELOAD='["dask_gpurt.preload"]',
    )
    assert found["overlap"]["caps"]["default"] == CAP
    assert found["worker"] == found["plain"]
    assert found["counters"]["residency.capped"] > 0
