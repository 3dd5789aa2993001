"""The interposer on the real driver: kernels of libcudf are counted and capped, and results stay the same."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import answer
from interposers import ROOT, build_interposer, needs_compiler
from test_residency import packages as packages  # a fixture

from dask_gpurt.overlap.occupancy import Limits, residency, shared_for

pytestmark = [pytest.mark.gpu, needs_compiler]

CAP = 4

#: What both scripts compute, as bytes that do not depend on the order of rows.
WORK = """\
import hashlib
import cudf, cupy

def digests():
    random = cupy.random.RandomState(1)
    key, value = (random.randint(0, 1 << bits, 1 << 23) for bits in (20, 40))
    left = cudf.DataFrame({"key": key, "value": value})
    right = cudf.DataFrame({"key": cupy.arange(1 << 20), "weight": random.randint(0, 1 << 40, 1 << 20)})
    results = {
        "groupby": left.groupby("key").sum().sort_index(),
        "join": left.merge(right, on="key").sort_values(["key", "value", "weight"], ignore_index=True),
        "sort": left.sort_values(["key", "value"], ignore_index=True),
        "elementwise": left["value"] * 3 + left["key"],
    }
    return {
        name: hashlib.sha256(result.to_arrow().to_pandas().to_numpy().tobytes()).hexdigest()
        for name, result in results.items()
    }
"""

#: One process: what is launched with a cap and without, and what the driver says of its residency.
ALONE = (
    WORK
    + """
import ctypes, json
from dask_gpurt.overlap import Caps, Interposer, Residency
from dask_gpurt.overlap.occupancy import shared_for

CAP = %d
driver = ctypes.CDLL("libcuda.so.1")

def fits(function, threads, dynamic):
    blocks = ctypes.c_int()
    error = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
        ctypes.byref(blocks), ctypes.c_void_p(function), ctypes.c_int(threads), ctypes.c_size_t(dynamic))
    return None if error else blocks.value

interposer = Interposer()
residency = Residency(interposer)
plain = digests()
before = residency.counters()
residency.apply(Caps(CAP))
capped = digests()
residency.clear()
counters = residency.counters()
after = digests()
limits = interposer.limits(0)
shared = interposer._shared
kernels = [
    {"name": one.name.decode(), "registers": one.registers, "shared": one.shared, "capped": one.capped,
     "threads": threads, "natural": fits(one.function, threads, 0),
     "then": fits(one.function, threads, shared_for(limits, CAP) - one.shared)}
    for one in shared.kernels[:shared.kernel_count] for threads in (128, 256) if one.capped
]
print(json.dumps({"plain": plain, "capped": capped, "after": after, "before": before, "counters": counters,
                  "idle": residency.counters(), "limits": vars(limits), "kernels": kernels}))
"""
)

#: A worker of dask-cuda: its nanny has loaded the interposer, and its settings name the cap.
WORKER = (
    WORK
    + """
import json
import dask_gpurt
from dask_cuda import LocalCUDACluster
from distributed import Client

def main():
    plain = digests()
    with LocalCUDACluster(n_workers=1, rmm_pool_size=0.3, dashboard_address=":0") as cluster:
        with Client(cluster) as client:
            dask_gpurt.enable(client)
            (found,) = client.run(digests).values()
            (reply,) = dask_gpurt.report(client)["workers"].values()
    print(json.dumps({"plain": plain, "worker": found, "residency": reply["residency"],
                      "counters": reply["counters"]}))

if __name__ == "__main__":
    main()
"""
)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("alone")
    library = build_interposer(folder)
    (folder / "script.py").write_text(ALONE % CAP)
    paths = os.pathsep.join([str(ROOT), *sys.path])
    return answer(folder / "script.py", LD_PRELOAD=str(library), PYTHONPATH=paths)


def test_results_are_the_same_with_a_cap(alone: Any) -> None:
    assert alone["capped"] == alone["plain"] == alone["after"]


def test_launches_are_counted_while_caps_count(alone: Any) -> None:
    assert alone["before"]["seen"] == 0
    assert alone["counters"]["seen"] > 20
    assert alone["counters"]["capped"] > 4
    assert alone["counters"]["left.unknown"] == 0
    assert alone["idle"] == alone["counters"]


def test_the_driver_sees_the_residency_of_capped_kernels_of_libcudf(alone: Any) -> None:
    limits = Limits(**alone["limits"])
    roomy = [kernel for kernel in alone["kernels"] if kernel["natural"] and kernel["natural"] > CAP]
    assert {kernel["then"] for kernel in roomy} == {CAP}
    for kernel in roomy:
        natural = residency(limits, kernel["threads"], kernel["registers"], kernel["shared"])
        assert natural == kernel["natural"], kernel
        shared = max(kernel["shared"], shared_for(limits, CAP))
        assert residency(limits, kernel["threads"], kernel["registers"], shared) == CAP
    assert len({kernel["name"] for kernel in roomy if "cudf" in kernel["name"]}) >= 2


def test_a_worker_of_dask_cuda_caps(packages: Path) -> None:
    paths = os.pathsep.join([str(packages / "built"), *(path for path in sys.path if path != str(ROOT))])
    (packages / "worker.py").write_text(WORKER)
    found = answer(
        packages / "worker.py",
        PYTHONPATH=paths,
        DASK_GPURT__ENABLED="True",
        DASK_GPURT__OVERLAP__RESIDENCY=str(CAP),
        DASK_DISTRIBUTED__NANNY__PRELOAD='["dask_gpurt.preload"]',
    )
    assert found["residency"] == {"setting": CAP, "ready": True, "reason": None}
    assert found["worker"] == found["plain"]
    assert found["counters"]["residency.capped"] > 0
