"""Count the GPUs of the host that runs the tests."""

from __future__ import annotations

import ctypes
import os


def cuda_devices() -> int:
    """Count the CUDA devices through the driver's own library: it needs no package and makes no context."""
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
