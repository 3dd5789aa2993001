"""Build the interposer and a fake driver, and start processes with both."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from dask_gpurt.overlap.interposer import DeviceLimits, LaunchedKernel

ROOT = Path(__file__).parents[2]
SOURCES = Path(__file__).with_name("interposer")
#: The interposer: its sources, and the header that both include.
INTERPOSER = [ROOT / "dask_gpurt" / "overlap" / name for name in ("_interposer.c", "_residency.c")]
HEADER = INTERPOSER[0].with_suffix(".h")
COMPILER = shutil.which("cc")

#: Devices of the fake driver: an H200, and a GPU of compute capability 8.6.
H200 = DeviceLimits(132, 32, 2048, 65536, 233472, 1024, 232448)
SMALL = DeviceLimits(84, 16, 1536, 65536, 102400, 1024, 101376)


class Launches:
    """Fake the launches of a process: what is written, and what is launched while it is switched on."""

    #: All that were made since the list was cleared.
    made: ClassVar[list[Launches]] = []

    def __init__(self, limits: DeviceLimits | None = H200):
        self.made.append(self)
        self.on, self._limits = False, limits
        #: The cap of all kernels, and those of single ones.
        self.written: list[tuple[int, dict[str | int, int]]] = []
        self._launched: dict[int, LaunchedKernel] = {}

    def launch(self, name: str) -> None:
        """Launch a kernel."""
        if self.on:
            id = hash(name)
            before = self._launched[id].launches if id in self._launched else 0
            self._launched[id] = LaunchedKernel(name, 32, 0, before + 1, 0, False, id)

    def switch(self, on: bool) -> None:
        self.on = on

    def write(self, default: int, kernels: Mapping[str | int, int]) -> None:
        self.written.append((default, dict(kernels)))

    def limits(self, device: int) -> DeviceLimits | None:
        return self._limits

    def counters(self) -> dict[str, int]:
        return {"seen": 0}

    def kernels(self) -> list[LaunchedKernel]:
        return list(self._launched.values())


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
    """Build the interposer as setup.py does."""
    shared = ("-std=c11", "-shared", "-fPIC", "-fvisibility=hidden", f"-Wl,-soname,{name}")
    return compile_c(folder / name, *INTERPOSER, flags=(*shared, *flags))


def build_driver(folder: Path, *flags: str) -> Path:
    """Build the fake driver."""
    shared = ("-std=gnu11", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1")
    versions = f"-Wl,--version-script={SOURCES / 'driver.map'}"
    return compile_c(folder / "libcuda.so.1", SOURCES / "driver.c", flags=(*shared, versions, *flags))


def build_launcher(folder: Path, *flags: str) -> Path:
    """Build the launching program, linked with the interposer before the C library as if preloaded."""
    library = build_interposer(folder, *flags)
    build_driver(folder, *flags)
    linked = ("-std=gnu11", "-Wl,--no-as-needed", str(library))
    return compile_c(folder / "launcher", SOURCES / "launcher.c", flags=(*flags, *linked))


class Process:
    """Control a process; each method of ``Host`` in ``interposer/host.py`` is a method here."""

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
    """Start a process with libraries preloaded; terminates it afterwards."""
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


#: Prints the state of a one-nanny cluster's worker before and after a restart, and the doctor's report.
SCRIPT = """\
import json, os, sys
import dask_gpurt
from dask_gpurt.cli.doctor import examine
from distributed import Client, LocalCluster

def look(dask_worker):
    maps = open("/proc/self/maps").read()
    known = dask_worker.plugins["gpurt"].overlap.report()
    return {"preload": os.environ.get("LD_PRELOAD"), "loaded": "_interposer" in maps, **known}

def main():
    with LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=":0") as cluster:
        with Client(cluster) as client:
            dask_gpurt.enable(client)
            (first,) = client.run(look).values()
            facts = examine(client)
            if "--restart" in sys.argv:
                client.restart(timeout=120)
            (second,) = client.run(look).values()
    fallbacks = [fallback for fallback in facts["cluster"]["fallbacks"] if "overlap" in fallback["id"]]
    print(json.dumps({**first, "same": first == second, "doctor": facts["cluster"]["overlap"],
                      "interposer": facts["machine"]["interposer"], "fallbacks": fallbacks,
                      "package": dask_gpurt.__file__}))

if __name__ == "__main__":
    main()
"""


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the package, and build its interposer."""
    folder = tmp_path_factory.mktemp("packages")
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "dask_gpurt", folder / "built" / "dask_gpurt", ignore=ignored)
    build_interposer(folder / "built" / "dask_gpurt" / "overlap")
    compile_c(folder / "second.so", SOURCES / "second.c", flags=("-shared", "-fPIC"))
    (folder / "script.py").write_text(SCRIPT)
    return folder


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("interposer")
    build_interposer(folder)
    build_driver(folder)
    for name, *flags in (("next",), ("second",), ("rude", "-DRUDE")):
        source = SOURCES / ("next.c" if name == "next" else "second.c")
        compile_c(folder / f"{name}.so", source, flags=("-shared", "-fPIC", *flags))
    return folder


@pytest.fixture
def one(built: Path) -> Iterator[Process]:
    with process(built / "libcuda.so.1", built / "_interposer.so") as one:
        one.load()
        yield one
