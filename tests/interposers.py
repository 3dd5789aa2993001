"""The interposer, a fake driver and processes that have both."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dask_gpurt.overlap.occupancy import DeviceLimits

ROOT = Path(__file__).parents[1]
SOURCES = Path(__file__).with_name("interposer")
INTERPOSER = ROOT / "dask_gpurt" / "overlap" / "_interposer.c"
COMPILER = shutil.which("cc")

#: The devices of the fake driver: an H200, and one of compute capability 8.6.
H200 = DeviceLimits(132, 32, 2048, 65536, 233472, 1024, 232448)
SMALL = DeviceLimits(84, 16, 1536, 65536, 102400, 1024, 101376)

needs_compiler = pytest.mark.skipif(
    COMPILER is None or sys.platform != "linux", reason="there is no C compiler for Linux"
)


def compile_c(target: Path, *sources: Path, flags: tuple[str, ...] = ()) -> Path:
    """Compile with warnings as errors."""
    assert COMPILER
    strict = ("-O2", "-g", "-Wall", "-Wextra", "-Werror")
    command = [COMPILER, *strict, *flags, "-o", str(target), *map(str, sources), "-ldl", "-pthread"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target


def build_interposer(folder: Path, *flags: str, name: str = "_interposer.so") -> Path:
    """As setup.py does."""
    shared = ("-std=c11", "-shared", "-fPIC", "-fvisibility=hidden", f"-Wl,-soname,{name}")
    return compile_c(folder / name, INTERPOSER, flags=(*shared, *flags))


def build_driver(folder: Path, *flags: str) -> Path:
    """The fake one."""
    shared = ("-std=gnu11", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1")
    versions = f"-Wl,--version-script={SOURCES / 'driver.map'}"
    return compile_c(folder / "libcuda.so.1", SOURCES / "driver.c", flags=(*shared, versions, *flags))


def build_launcher(folder: Path, *flags: str) -> Path:
    """The program that launches, with the interposer before the C library as if it were preloaded."""
    library = build_interposer(folder, *flags)
    build_driver(folder, *flags)
    linked = ("-std=gnu11", "-Wl,--no-as-needed", str(library))
    return compile_c(folder / "launcher", SOURCES / "launcher.c", flags=(*flags, *linked))


class Process:
    """A process; each method of ``Host`` in ``interposer/host.py`` is one here."""

    def __init__(self, child: subprocess.Popen[str]):
        self._child = child

    def __getattr__(self, call: str) -> Any:
        if call.startswith("_"):
            raise AttributeError(call)

        def method(*args: Any, **arguments: Any) -> Any:
            assert self._child.stdin
            assert self._child.stdout
            print(json.dumps([call, args, arguments]), file=self._child.stdin, flush=True)
            line = self._child.stdout.readline()
            assert line, "the process has died"
            found = json.loads(line)
            if "error" in found:
                raise RuntimeError(found["error"])
            return found["answer"]

        return method


@contextlib.contextmanager
def process(driver: Path | None, *preload: Path) -> Iterator[Process]:
    """Start a process with libraries preloaded, and end it."""
    environment = {
        **os.environ,
        "LD_PRELOAD": ":".join(map(str, preload)),
        "LD_LIBRARY_PATH": str(driver.parent) if driver else "",
        "PYTHONPATH": str(ROOT),
    }
    child = subprocess.Popen(
        [sys.executable, str(SOURCES / "host.py"), *([str(driver)] if driver else [])],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        try:
            yield Process(child)
        finally:
            assert child.stdin
            child.stdin.close()
            assert child.wait(20) == 0
