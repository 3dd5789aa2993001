"""Launch kernels with a fault that a tool of compute-sanitizer has to find, from a child process.

compute-sanitizer --tool memcheck --target-processes all python tests/gpu/sanitizer/faulty.py memcheck
"""

from __future__ import annotations

import multiprocessing
import sys

#: By tool: an out-of-bounds write, and a read that races with another warp's write.
KERNELS = {
    "memcheck": """
extern "C" __global__ void faulty(int *out) { out[1 << 28] = threadIdx.x; }
""",
    "racecheck": """
extern "C" __global__ void faulty(int *out) {
    __shared__ int shared[64];
    shared[threadIdx.x] = threadIdx.x;
    out[threadIdx.x] = shared[(threadIdx.x + 33) % 64];
}
""",
}


def launch(tool: str) -> None:
    import cupy

    out = cupy.zeros(64, dtype="int32")
    cupy.RawKernel(KERNELS[tool], "faulty")((1,), (64,), (out,))
    cupy.cuda.get_current_stream().synchronize()


if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=launch, args=(sys.argv[1],))
    child.start()
    child.join()
