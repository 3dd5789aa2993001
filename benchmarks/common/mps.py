"""NVIDIA's Multi-Process Service: kernels of several processes run on one GPU at the same time."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

CONTROL = "nvidia-cuda-mps-control"
#: Seconds that the daemon may take to start, or to end.
LIMIT_S = 20


@contextmanager
def multi_process_service() -> Iterator[None]:
    """Run MPS for the processes that this one starts meanwhile, which share each GPU then.

    This process stays outside if it has used a GPU already. Where the daemon's program is not installed, as
    on a host without a GPU, nothing is done.
    """
    if shutil.which(CONTROL) is None:
        yield
        return
    before = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        os.environ |= {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        try:
            subprocess.run([CONTROL, "-d"], check=True, timeout=LIMIT_S)
            try:
                yield
            finally:
                subprocess.run([CONTROL], input="quit\n", text=True, check=True, timeout=LIMIT_S)
        finally:
            for name in ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"):
                os.environ.pop(name)
                if name in before:
                    os.environ[name] = before[name]
