"""Send tasks that read files to the workers that have read these before, and have kept what they read.

Decisions and their figures: ``docs/decisions/reads.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from dask.typing import Key

from dask_gpurt.dask_hooks.parquet_files import Piece, pieces_read
from dask_gpurt.dask_hooks.patch import FailureHandler
from dask_gpurt.dask_hooks.scheduler import Overrides
from dask_gpurt.dask_hooks.seams import READ_PLACES
from dask_gpurt.dask_hooks.types import SchedulerState, SchedulerTask, WorkerState

#: The most row groups whose last reader is known: some tens of MB.
MAX_PIECES = 100_000


class ReadPlaces:
    """Choose the workers of reads on a scheduler of Dask.

    A read whose place is known goes there at once, as a task does that the user has restricted to a worker.
    If that worker is busy, idle ones steal the read, as any task without inputs. All others are Dask's, also
    those whose place has left or is paused. Until a graph reads such files, Dask's methods are in place.

    ``keeps``: returns whether a worker, by its address, has anything of remote or of local files in its
    cache.
    ``keep_local``: returns whether there are workers that keep local files.
    ``failed``: called if Dask has to choose; see :class:`Overrides`.
    """

    def __init__(
        self,
        state: SchedulerState,
        keeps: Callable[[str, bool], bool],
        keep_local: Callable[[], bool],
        failed: FailureHandler,
    ):
        self._state = state
        self._keeps = keeps
        self._keep_local = keep_local
        self._overrides = Overrides(failed)
        self._is_bound = False
        #: The worker that has read a row group last, by its address; the latest reads come last.
        self._places: dict[Piece, str] = {}
        #: What tasks read that have not run yet.
        self._reads: dict[Key, list[Piece]] = {}

    def on_graph(self, keys: Iterable[Key]) -> None:
        """Replace Dask's choices if tasks of a new graph read files that workers keep."""
        tasks = self._state.tasks
        if not self._is_bound and any(self._pieces(ts) for key in keys if (ts := tasks.get(key))):
            self.bind()

    def bind(self) -> None:
        """Replace Dask's choices."""
        self._is_bound = True
        self._overrides.replace(READ_PLACES, self._state, lambda name: getattr(self, f"_{name}"))

    def unbind(self) -> None:
        """Restore Dask's choices."""
        self._is_bound = False
        self._overrides.restore()

    def transition(self, key: Key, finish: str, worker: str | None) -> None:
        """Note where a read was done, once it is."""
        if finish in ("memory", "released", "forgotten", "erred") and self._reads:
            for piece in self._reads.pop(key, ()):
                if worker is not None and finish == "memory":
                    self._places.pop(piece, None)
                    self._places[piece] = worker
            while len(self._places) > MAX_PIECES:
                del self._places[next(iter(self._places))]

    def _pieces(self, ts: SchedulerTask) -> list[Piece]:
        """Return what a task reads of files that workers keep."""
        spec: Any = ts.run_spec
        is_read = spec is not None and spec.data_producer and not ts.dependencies
        return pieces_read(spec, local=self._keep_local()) if is_read else []

    def _is_rootish(self, ts: SchedulerTask) -> bool:
        if pieces := self._pieces(ts):
            self._reads[ts.key] = pieces
            if self.place(ts) is not None:
                return False  # Dask gives the others to any worker that asks for one
        rootish: bool = self._overrides.originals["is_rootish"](ts)
        return rootish

    def _decide_worker_non_rootish(self, ts: SchedulerTask) -> WorkerState | None:
        if (place := self.place(ts)) is not None:
            return place
        chosen: WorkerState | None = self._overrides.originals["decide_worker_non_rootish"](ts)
        return chosen

    def place(self, ts: SchedulerTask) -> WorkerState | None:
        """Return the worker that has what a task reads; None if there is none, or if Dask has to choose."""
        pieces = self._reads.get(ts.key)
        if not pieces or ts.worker_restrictions or ts.host_restrictions or ts.resource_restrictions:
            return None
        known = [place for piece in pieces if (place := self._places.get(piece)) is not None]
        if not known:
            return None
        address = known[0] if len(known) < 3 else max(set(known), key=known.count)
        ws = self._state.workers.get(address)
        _, _, is_local = pieces[0]
        return ws if ws in self._state.running and self._keeps(address, is_local) else None
