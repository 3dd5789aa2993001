"""Use green contexts on a GPU: SMs that a kernel gets, ordering around it, equal results."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

import dask_gpurt
from tests.helpers.clusters import cluster
from tests.helpers.commands import answer
from tests.helpers.interposers import SOURCES, build_interposer, needs_compiler

pytestmark = [pytest.mark.gpu, needs_compiler]


@pytest.fixture(scope="module")
def interposer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_interposer(tmp_path_factory.mktemp("green"))


@pytest.fixture(scope="module")
def found(interposer: Path) -> Any:
    path = os.pathsep.join(filter(None, sys.path))
    return answer(SOURCES / "green.py", LD_PRELOAD=str(interposer), PYTHONPATH=path)


def test_all_checks_in_green_contexts_pass(found: Any) -> None:
    assert len(found["checked"]) > 1
    assert not found["wrong"], "\n".join(found["wrong"].values())


def test_the_mode_fixed_confines_tasks_beside_a_run(
    found: Any, interposer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_PRELOAD", str(interposer))  # for the workers, which start with it
    # Without the caps for all kernels that ``ci/gpu_residency.sh`` sets: the two exclude each other.
    fixed = {
        "overlap__mode": "fixed",
        "overlap__residency": "off",
        "overlap__fixed__sms": found["sms"],
    }

    def double(number: int) -> int:  # pickled with the task, unlike a function of this module
        import cupy

        return int((cupy.arange(1000) * 2).sum())

    with cluster("cudf", **fixed) as client:
        run = ("run of the test", 1)
        client.run(lambda dask_worker: dask_worker.plugins["gpurt"].exchange.run_begins(run))
        client.gather(client.map(double, range(8)))
        client.run(lambda dask_worker: dask_worker.plugins["gpurt"].exchange.run_ends(run))
        for reply in dask_gpurt.report(client)["workers"].values():
            assert "overlap.unconfined" not in reply["fallbacks"]
            assert reply["overlap"]["launches"]["confined to SMs"] > 0
