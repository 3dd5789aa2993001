"""Run a worker's fused tasks on columns rather than through the frames of cudf.

Decisions and their figures: ``docs/decisions/programs.md``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from dask.typing import Key

from dask_gpurt.dask_hooks import PatchSet, UnsupportedError
from dask_gpurt.dask_hooks.graphs import Graph, wrap_execution
from dask_gpurt.frames.programs import Interpreter, ProgramError
from dask_gpurt.frames.registry import LIBRARIES
from dask_gpurt.observe import Fallback, Metrics

LIBRARY = "cudf"


class WorkerPrograms:
    """Execute the graphs of fused tasks of this process.

    Parameters
    ----------
    on
        Whether to do so. May be changed at any time; a task that has started goes on as it has begun.
    """

    def __init__(self, on: bool, metrics: Metrics) -> None:
        self.on = on
        self._metrics = metrics
        self._refused = partial(metrics.fallback, Fallback.PROGRAMS_OFF)
        self._interpreter: Interpreter | None = None
        self._patches = PatchSet()

    def install(self) -> None:
        """Apply to all fused tasks that start from now on."""
        try:
            wrap_execution(self._patches, self.run)
        except UnsupportedError as error:
            self._refused(str(error))

    def uninstall(self) -> None:
        """Leave fused tasks to Dask from now on."""
        self._patches.restore()

    def run(self, graph: Graph, result: Key, by_dask: Callable[[], Any]) -> Any:
        """Return the result of a graph. On threads of tasks."""
        if not self.on or (interpreter := self._loaded()) is None:
            return by_dask()
        try:
            return interpreter.run(graph, result, self._count)
        except ProgramError as error:
            self._failed("frame", error)
            return by_dask()

    def _loaded(self) -> Interpreter | None:
        """Return the interpreter once a task has imported the library, of which it needs private parts."""
        if self._interpreter is None and LIBRARY in sys.modules and self.on:
            try:
                self._interpreter = Interpreter(LIBRARIES[LIBRARY].engine(), self._failed)
            except Exception as error:  # whatever has moved in the library
                self.on = False
                self._refused(f"{type(error).__name__}: {error}")
        return self._interpreter

    def _count(self, on_columns: int, left: int) -> None:
        self._metrics.add("programs.nodes", on_columns)
        self._metrics.add("programs.left", left)

    def _failed(self, name: str, error: Exception) -> None:
        self._metrics.fallback(Fallback.PROGRAMS_NODE, f"{name}: {type(error).__name__}: {error}")
