"""Find over-synchronisation in the runtime's work on a GPU, step by step; prints one line of JSON.

LD_PRELOAD=trap.so python tests/helpers/interposer/streams.py trap.so
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cudf
import cupy
import numpy as np

from dask_gpurt.device.cuda import CudaDevice
from dask_gpurt.frames.backend import Hashed, Part
from dask_gpurt.frames.cudf import CudfTable

ROWS = 1 << 16
#: Maximum number of stack frames.
FRAMES = 64


class Room:
    """Fake a pool."""

    def __init__(self, pool: Any):
        self.allocate, self.give_back = pool.allocate, pool.free


def shuffle(
    frame: cudf.DataFrame, device: CudaDevice, table: CudfTable, *, hashed: bool
) -> dict[str, Callable[[], Any]]:
    """Split, pack and assemble a partition; the steps run in order."""
    room, kept = Room(device.create_pool(1 << 24)), {}
    plain = frame.drop(columns="to")
    meta = plain.iloc[:0]

    def split() -> None:
        rows = Hashed(plain, ("number",), plain, meta, lambda rows: frame) if hashed else frame
        kept["pieces"] = table.split(rows, "to", [[0, 1], [2, 3]], 4, drop_column=True, ignore_index=False)

    def pack() -> None:
        kept["packed"] = [table.pack(piece, room) for piece in kept["pieces"]]
        table.settle()

    def assemble() -> None:
        parts = [
            Part(packed.header, packed.block.buffer, piece.offsets, 0, {})
            for piece, packed in zip(kept["pieces"], kept["packed"], strict=True)
        ]
        kept["frame"] = table.assemble(parts, meta, ignore_index=False)

    def let_go() -> None:
        table.fence()()

    return {step.__name__: step for step in (split, pack, assemble, let_go)}


def tiers(device: CudaDevice) -> dict[str, Callable[[], Any]]:
    """Spill buffers, bring them up, pull them and copy them to the host."""
    buffers = [cupy.arange(ROWS, dtype="u1") for _ in range(3)]
    sources = device.from_host([np.arange(ROWS, dtype="u1")])
    pieces = [[np.empty(ROWS // 2, np.uint8) for _ in range(2)] for _ in buffers]
    return {
        "spill": lambda: device.scatter(buffers, pieces)(),
        "bring up": lambda: device.gather_all(pieces)[1](),
        "pull": lambda: device.land(sources),
        "to the host": lambda: device.to_host(sources[0]),
    }


class Witness:
    """Record the callers of synchronisations: lines of Python, and functions of CUDA libraries."""

    def __init__(self, trap: ctypes.CDLL):
        self._libc = ctypes.CDLL(None)
        self._libc.backtrace_symbols.restype = ctypes.POINTER(ctypes.c_char_p)
        self._tell = ctypes.CFUNCTYPE(None)(self._look)  # kept alive: the trap calls it
        trap.trap_tell(self._tell)
        self.seen: list[str] = []

    def _look(self) -> None:
        lines = [f"{Path(one.filename).name}:{one.lineno} {one.name}" for one in traceback.extract_stack()]
        frames = (ctypes.c_void_p * FRAMES)()
        count = self._libc.backtrace(frames, FRAMES)
        symbols = self._libc.backtrace_symbols(frames, count)
        native = [Path(os.fsdecode(symbols[at])).name for at in range(count)]
        self.seen.append(
            " | ".join([*lines[1:-1], *(name for name in native if "cu" in name or "rmm" in name)])
        )


def main(path: str) -> None:
    trap, device = ctypes.CDLL(path), CudaDevice()
    witness = Witness(trap)
    columns = {"to": cupy.arange(ROWS, dtype="i4") % 4, "number": cupy.arange(ROWS)}
    plain = cudf.DataFrame(columns)
    strings = plain.assign(text=plain["number"].astype(str))
    shuffles = {
        f"{name}{', hashed' * hashed}": shuffle(frame, device, CudfTable(device), hashed=hashed)
        for name, frame in {"plain": plain, "strings": strings}.items()
        for hashed in (False, True)
    }
    steps = {
        **{f"{step} of {name}": call for name, steps in shuffles.items() for step, call in steps.items()},
        **tiers(device),
        # Positive controls, which it has to detect.
        "a fault: device": cupy.cuda.runtime.deviceSynchronize,
        "a fault: default stream": cupy.cuda.Stream.null.synchronize,
    }
    found = {}
    for trapped in (False, True):  # once without the trap, to load modules and kernels
        for name, step in steps.items():
            before = trap.trap_device(), trap.trap_default()
            (trap.trap_on if trapped else trap.trap_off)()
            step()
            trap.trap_off()
            found[name] = [trap.trap_device() - before[0], trap.trap_default() - before[1], witness.seen]
            witness.seen = []
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
