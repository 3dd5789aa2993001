"""Count the GPUs of the host that runs the tests, and check why tests of GPUs were skipped."""

from __future__ import annotations

import ctypes
import os

import pytest

#: Accepted reasons for skipping a test of GPUs on a host with GPUs.
ACCEPTED = {
    "LocalCUDACluster cannot grow beyond the GPUs there are",
    "LocalCUDACluster needs a GPU for each worker",
    "cudf has no such column",
    "cupy has no such arrays",
    "dask_cudf joins the labels of columns as text",
    "cudf's groupby.apply returns another index than pandas for a scalar",
    "pandas has its own test of these",
    "xgboost was built without CUDA",
    "strings of cudf are cut the same way; a pool this small is tested above",
}


def cuda_devices() -> int:
    """Count CUDA devices through the driver's library, which needs no package and creates no context."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip()
    if visible in ("", "-1"):
        return 0
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    count = ctypes.c_uint(0)
    if nvml.nvmlInit_v2() != 0 or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return 0
    return count.value if visible == "all" else min(count.value, len(visible.split(",")))


def unaccepted_skip(report: pytest.TestReport) -> str | None:
    """Return the reason for which a test of GPUs was skipped, unless it is accepted."""
    if not report.skipped or "gpu" not in report.keywords or not isinstance(report.longrepr, tuple):
        return None
    reason = report.longrepr[2].removeprefix("Skipped: ")
    return None if reason in ACCEPTED else reason
