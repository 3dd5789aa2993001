"""Run a process with the interposer and the fake driver, which executes requests given as lines of JSON.

A request names a method of :class:`Host`; the reply is its return value, or ``{"error": ...}``.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from dask_gpurt.overlap.interposer import Caps, Interposer, Residency

POINTER, UNSIGNED = ctypes.c_void_p, ctypes.c_uint
#: Stand-ins for the kernel's parameters, which must arrive unchanged.
PARAMETERS, EXTRA = 0x1234, 0x5678


class Record(ctypes.Structure):
    _fields_ = [
        *((name, POINTER) for name in ("handle", "stream", "parameters", "extra")),
        ("grid", UNSIGNED * 3),
        ("block", UNSIGNED * 3),
        *((name, UNSIGNED) for name in ("shared", "per_thread", "ex", "attributes")),
        ("result", ctypes.c_int),
    ]


class Attribute(ctypes.Structure):
    _fields_ = [("id", UNSIGNED), ("pad", UNSIGNED), ("value", UNSIGNED * 16)]


class Config(ctypes.Structure):
    _fields_ = [
        ("grid", UNSIGNED * 3),
        ("block", UNSIGNED * 3),
        ("shared", UNSIGNED),
        ("stream", POINTER),
        ("attributes", ctypes.POINTER(Attribute)),
        ("count", UNSIGNED),
    ]


class Host:
    def __init__(self, driver: str):
        self.own: dict[tuple[str, str, int], Any] = {}
        self.residency: Residency | None = None
        if driver:
            self.load_driver(driver)

    def load_driver(self, path: str) -> None:
        self.driver = ctypes.CDLL(path)
        for name in ("fake_function", "fake_kernel", "fake_stream"):
            getattr(self.driver, name).restype = POINTER
        self.driver.fake_launches.restype = ctypes.c_long
        self.driver.fake_record.restype = ctypes.POINTER(Record)

    # ---- the policy

    def load(self) -> None:
        self.residency = Residency(Interposer())

    def apply(self, default: int | None = None, kernels: dict[str, int | None] | None = None) -> None:
        """Set caps; names that are numbers are ids."""
        assert self.residency
        given = {int(name) if name.isdecimal() else name: cap for name, cap in (kernels or {}).items()}
        self.residency.apply(Caps(default, given))

    def clear(self) -> None:
        assert self.residency
        self.residency.clear()

    def counters(self) -> dict[str, int]:
        assert self.residency
        return {name: count for name, count in self.residency.counters().items() if count}

    def kernels(self) -> list[dict[str, Any]]:
        assert self.residency
        return [vars(kernel) for kernel in self.residency.kernels()]

    # ---- the driver

    def limits(self, device: int) -> dict[str, int] | None:
        found = Interposer().limits(device)
        return None if found is None else vars(found)

    def function(self, name: str = "kernel", registers: int = 32, shared: int = 0, cluster: int = 0) -> int:
        made: int = self.driver.fake_function(name.encode(), registers, shared, cluster)
        return made

    def kernel(self, *functions: int) -> int:
        made: int = self.driver.fake_kernel(*map(POINTER, functions))
        return made

    def stream(self, capturing: bool = False) -> int:
        made: int = self.driver.fake_stream(capturing)
        return made

    def fake(self, name: str, *args: Any) -> int:
        """Call a function of the driver or of its test interface; large numbers are pointers."""
        done: int = getattr(self.driver, name)(
            *(POINTER(arg) if isinstance(arg, int) and arg > 2**31 else arg for arg in args)
        )
        return done

    def become(self, handle: int, name: str, registers: int, shared: int) -> None:
        self.driver.fake_become(POINTER(handle), name.encode(), registers, shared)

    def door(self, name: str, door: str = "dlsym", flags: int = 0, cuda: int = 13000) -> Any:
        """Look up a function of the driver by ``dlsym`` or an entry point of the driver."""
        key = (name, door, flags)
        if key not in self.own:
            if door == "dlsym":
                self.own[key] = getattr(ctypes.CDLL("libcuda.so.1"), name)
            else:
                found = POINTER()
                asked = name.encode(), ctypes.byref(found), cuda, ctypes.c_uint64(flags)
                status = (ctypes.byref(ctypes.c_int()),) if door.endswith("v2") else ()
                result = getattr(self.driver, door)(*asked, *status)
                assert result == 0, (key, result)
                self.own[key] = ctypes.CFUNCTYPE(ctypes.c_int)(found.value)
        return self.own[key]

    def call(self, name: str, *args: int, **door: Any) -> int:
        """Call a function of the driver with pointers."""
        done: int = self.door(name, **door)(*map(POINTER, args))
        return done

    def launch(
        self,
        handle: int,
        *,
        grid: Sequence[int] = (100_000, 1, 1),
        block: Sequence[int] = (256, 1, 1),
        shared: int = 0,
        stream: int = 0,
        attributes: Sequence[int] | None = None,
        **door: Any,
    ) -> dict[str, Any]:
        """Launch, through cuLaunchKernelEx if there are attributes; returns what the driver received."""
        before = self.driver.fake_recorded()
        sizes = [UNSIGNED(n) for n in (*grid, *block, shared)]
        rest = POINTER(PARAMETERS), POINTER(EXTRA)
        if attributes is None:
            name = door.pop("name", "cuLaunchKernel")
            result = self.door(name, **door)(POINTER(handle), *sizes, POINTER(stream), *rest)
        else:
            listed = (Attribute * max(len(attributes), 1))(*(Attribute(id=number) for number in attributes))
            config = Config(tuple(grid), tuple(block), shared, stream, listed, len(attributes))
            name = door.pop("name", "cuLaunchKernelEx")
            result = self.door(name, **door)(ctypes.byref(config), POINTER(handle), *rest)
            assert (config.shared, config.count) == (shared, len(attributes)), "the caller's own was changed"
        seen = [self.driver.fake_record(i).contents for i in range(before, self.driver.fake_recorded())]
        for record in seen:
            assert (record.handle, record.parameters, record.extra) == (handle, PARAMETERS, EXTRA)
            assert (*record.grid, *record.block, record.stream or 0) == (*grid, *block, stream)
        return {
            "result": result,
            "shared": [record.shared for record in seen],
            "per_thread": [bool(record.per_thread) for record in seen],
            "ex": [bool(record.ex) for record in seen],
        }

    def forget(self) -> None:
        self.own.clear()

    # ---- the process

    def same(self, first: dict[str, Any], second: dict[str, Any]) -> bool:
        """Return whether two lookups yield the same function."""
        one, other = (ctypes.cast(self.door(**door), POINTER).value for door in (first, second))
        return one == other

    def symbol(self, path: str, name: str) -> int:
        """Call a function of a library."""
        found: int = getattr(ctypes.CDLL(path), name)()
        return found

    def fork(self, call: str, **arguments: Any) -> Any:
        """Run a request in a forked child."""
        reading, writing = os.pipe()
        if (child := os.fork()) == 0:
            os.write(writing, json.dumps(getattr(self, call)(**arguments)).encode())
            os._exit(0)
        os.close(writing)
        _, status = os.waitpid(child, 0)
        with os.fdopen(reading) as pipe:
            return {"status": status, "answer": json.loads(pipe.read() or "null")}


def answer(host: Host, call: str, args: Sequence[Any], arguments: dict[str, Any]) -> Any:
    try:
        method: Callable[..., Any] = getattr(host, call)
        return {"answer": method(*args, **arguments)}
    except (ValueError, RuntimeError, AssertionError) as error:
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    host = Host("".join(sys.argv[1:]))
    for line in sys.stdin:
        call, args, arguments = json.loads(line)
        print(json.dumps(answer(host, call, args, arguments)), flush=True)


if __name__ == "__main__":
    main()
