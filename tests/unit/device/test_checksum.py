"""Compile the GPU kernel for the CPU, and compare it with zlib."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.device.checksum import KERNEL, PART, POWERS, THREADS, times

#: CUDA's keywords in C++: threads run sequentially, and each rebuilds the table.
IN_CPP = """
#define __device__ static
#define __global__
#define __shared__
#define __syncthreads()
struct Index { unsigned int x; };
static Index threadIdx, blockIdx, blockDim;
static void atomicXor(unsigned int* at, unsigned int value) { *at ^= value; }
%s
extern "C" unsigned all_blocks(const unsigned char* data, unsigned long long nbytes, unsigned blocks) {
    unsigned found = 0;
    blockDim.x = 1;  // so that one thread fills the table
    for (blockIdx.x = 0; blockIdx.x < blocks * %d; ++blockIdx.x) crc32(data, nbytes, &found);
    return found;
}
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Callable[[np.ndarray], int]:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    directory: Path = tmp_path_factory.mktemp("kernel")
    source, library = directory / "kernel.cpp", directory / "kernel.so"
    source.write_text(IN_CPP % (KERNEL, THREADS))
    # Otherwise a call of the kernel resolves to any crc32 that the process has already loaded.
    flags = ["-O2", "-shared", "-fPIC", "-Wl,-Bsymbolic"]
    subprocess.run([compiler, *flags, "-o", library, source], check=True, timeout=120)
    _zlib_for_all()
    function = ctypes.CDLL(str(library)).all_blocks
    function.restype = ctypes.c_uint

    def crc32(data: np.ndarray) -> int:
        blocks = -(-data.nbytes // (PART * THREADS))
        return int(function(ctypes.c_void_p(data.ctypes.data), ctypes.c_ulonglong(data.nbytes), blocks))

    return crc32


def _zlib_for_all() -> None:
    """Load zlib globally, so that later libraries resolve ``crc32`` to it first, as with cudf."""
    if hasattr(zlib, "__file__"):
        ctypes.CDLL(zlib.__file__, mode=ctypes.RTLD_GLOBAL)


@given(
    nbytes=st.one_of(st.integers(0, 3 * PART), st.integers(PART * THREADS - 2, PART * THREADS + 2)),
    offset=st.integers(0, 7),
    seed=st.integers(0, 99),
)
def test_the_kernel_gives_what_zlib_gives(kernel: Any, nbytes: int, offset: int, seed: int) -> None:
    data = np.random.default_rng(seed).integers(0, 256, nbytes + offset, np.uint8)[offset:]
    assert kernel(data) == zlib.crc32(data.data)


def test_powers_repeat() -> None:
    """The kernel indexes powers modulo 32, so a file may have any size."""
    assert times(POWERS[-1], POWERS[-1]) == POWERS[0]
    assert times(1 << 31, POWERS[7]) == POWERS[7]


@pytest.mark.gpu
@pytest.mark.parametrize("nbytes", [0, 1, PART, PART * THREADS + 5, 100 << 20])
def test_the_gpu_gives_what_zlib_gives(nbytes: int) -> None:
    import cupy

    from dask_gpurt.device.cuda import CudaDevice
    from dask_gpurt.device.cuda_files import CudaFiles

    data = np.random.default_rng(nbytes).integers(0, 256, nbytes + 3, np.uint8)
    on_device = cupy.asarray(data)[3:]
    files = CudaFiles(CudaDevice(), pytest.fail)
    assert files.checksums([on_device], ordered=True) == [zlib.crc32(data[3:].data)]
