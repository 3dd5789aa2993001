"""Run a worker's fused tasks on columns rather than through the frames of cudf.

Decisions and their figures: ``docs/decisions/programs.md``.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from dask.typing import Key

from dask_gpurt.config import ComputeSettings
from dask_gpurt.dask_hooks import PatchSet, UnsupportedError
from dask_gpurt.dask_hooks.graphs import Graph, wrap_execution, wrap_trees
from dask_gpurt.device import Device
from dask_gpurt.frames.programs import CALLS, Interpreter, ProgramError
from dask_gpurt.frames.registry import LIBRARIES, FrameLibrary
from dask_gpurt.observe import Fallback, Metrics


class WorkerPrograms:
    """Execute the graphs of fused tasks of this process.

    ``settings``: whether to do so, and which tasks to check; see the attributes.
    ``device``: the device that tasks compute on. On the host, fused tasks are left to Dask.
    ``on``: whether to do so. May be changed at any time; a task that has started goes on as it has begun.
    ``every``: of how many tasks one runs both ways; 0 for none.
    """

    def __init__(self, settings: ComputeSettings, device: Device, metrics: Metrics) -> None:
        self.on, self.every = settings.programs, settings.check_programs
        #: The library whose frames programs know, by its name; none on the host.
        on_device = ((name, each) for name, each in LIBRARIES.items() if each.device == device.kind)
        self._library = next(((name, each) for name, each in on_device if each.columnar), None)
        self._metrics = metrics
        self._refused = partial(metrics.fallback, Fallback.PROGRAMS_OFF)
        self._interpreter: Interpreter | None = None
        self._patches = PatchSet()
        self._lock = threading.Lock()
        self._number = itertools.count()

    def install(self) -> None:
        """Apply to all fused tasks that start from now on."""
        if self._library is None:
            return
        try:
            wrap_execution(self._patches, self.run)
        except UnsupportedError as error:
            self._refused(str(error))
            return
        CALLS.append(self.call)

    def uninstall(self) -> None:
        """Leave fused tasks to Dask from now on."""
        self._patches.restore()
        if self.call in CALLS:
            CALLS.remove(self.call)

    def run(self, graph: Graph, result: Key, by_dask: Callable[[], Any]) -> Any:
        """Return the result of a graph. On threads of tasks."""
        if not self.on or (interpreter := self._loaded()) is None:
            return by_dask()
        try:
            check = bool(self.every) and not next(self._number) % self.every
            return interpreter.run(graph, result, self._count, check=check)
        except ProgramError as error:
            self._failed("frame", error)
            return by_dask()

    def call(
        self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call a function of frames, as one operation. On threads of tasks."""
        if not self.on or (interpreter := self._loaded()) is None:
            return function(*args, **kwargs)
        return interpreter.call(name, function, args, kwargs)

    def _loaded(self) -> Interpreter | None:
        """Return the interpreter once the library has been imported, of which it needs private parts."""
        if self._interpreter is None and self._library is not None and self._library[0] in sys.modules:
            with self._lock:
                if self.on and self._interpreter is None:
                    self._load(self._library[1])
        return self._interpreter

    def _load(self, library: FrameLibrary) -> None:
        try:
            interpreter = Interpreter(library.engine(), self._failed, self._differed)
            wrap_trees(self._patches, self.call)
        except Exception as error:  # whatever has moved in the library
            self.on = False
            self._refused(f"{type(error).__name__}: {error}")
        else:
            self._interpreter = interpreter

    def _count(self, on_columns: int, left: int) -> None:
        self._metrics.add("programs.nodes", on_columns)
        self._metrics.add("programs.left", left)

    def _differed(self, name: str, difference: str) -> None:
        self._metrics.fallback(Fallback.PROGRAMS_DIFFERENT, f"{name}: {difference}")

    def _failed(self, name: str, error: Exception) -> None:
        self._metrics.fallback(Fallback.PROGRAMS_NODE, f"{name}: {type(error).__name__}: {error}")
