"""Print what libcudf computes without a cap, with a cap, and without it again, as one line of JSON.

LD_PRELOAD=dask_gpurt/overlap/_interposer.so python tests/helpers/interposer/capped.py 4
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import sys
from typing import Any

import cudf
import cupy
from sm_model import shared_for

from dask_gpurt.overlap import Caps, Interposer, Residency

#: Threads per block to query the driver for: those that most kernels of libcudf use.
THREADS = (128, 256)


def digests() -> dict[str, str]:
    """Hash results regardless of the order of rows."""
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
        name: hashlib.sha256(result.to_pandas().to_numpy().tobytes()).hexdigest()
        for name, result in results.items()
    }


def fits(function: int, threads: int, dynamic: int) -> int | None:
    """Return the blocks of a kernel that fit on an SM according to the driver; None if the query fails."""
    driver, blocks = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    arguments = (ctypes.c_void_p(function), ctypes.c_int(threads), ctypes.c_size_t(dynamic))
    error = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(ctypes.byref(blocks), *arguments)
    return None if error else blocks.value


def capped_kernels(interposer: Interposer, cap: int) -> list[dict[str, Any]]:
    """Return the driver's occupancy of each capped kernel, without and with the cap's shared memory."""
    limits, shared = interposer.limits(0), interposer._shared
    assert limits is not None
    return [
        {
            "name": kernel.name.decode(),
            "registers": kernel.registers,
            "shared": kernel.shared,
            "threads": threads,
            "natural": fits(kernel.function, threads, 0),
            "then": fits(kernel.function, threads, shared_for(limits, cap) - kernel.shared),
        }
        for kernel in shared.kernels[: shared.kernel_count]
        if kernel.capped
        for threads in THREADS
    ]


def main(cap: int) -> None:
    interposer = Interposer()
    residency = Residency(interposer)
    found: dict[str, Any] = {"plain": digests(), "before": residency.counters()}
    residency.apply(Caps(cap))
    found["capped"] = digests()
    residency.clear()
    found["counters"] = residency.counters()
    found["after"] = digests()
    found["idle"] = residency.counters()
    found["limits"] = vars(interposer.limits(0))
    found["kernels"] = capped_kernels(interposer, cap)
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]))
