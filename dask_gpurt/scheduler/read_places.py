"""Send tasks that read files to the workers that have read these before, and have kept what they read.

Decisions and their figures: ``docs/decisions/reads.md``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from dask.typing import Key

from dask_gpurt.dask_hooks.parquet_files import Piece, pieces_read
from dask_gpurt.dask_hooks.patch import FailureHandler
from dask_gpurt.dask_hooks.scheduler import Overrides
from dask_gpurt.dask_hooks.seams import READ_PLACES
from dask_gpurt.dask_hooks.types import SchedulerState, SchedulerTask, WorkerState

#: The most row groups whose readers are known: some tens of MB.
MAX_PIECES = 100_000
#: The most readers of a row group that are known, the latest ones.
MAX_READERS = 4
#: What a column that a worker has read counts, next to anything else of the same row group, as its footer.
COLUMN = 1_000
#: How many times as long a read takes on a worker that has nothing of its files, for those that would steal
#: it: with columns kept, 0.03 to 0.28 of the time was measured.
ELSEWHERE = 4


class ReadPlaces:
    """Choose the workers of reads on a scheduler of Dask.

    A read goes at once, as a task does that the user has restricted to a worker, to the one that has read
    most of its columns, of equals to the one with the fewest tasks. If that worker is busy, idle ones steal
    the read, where that pays though they have to fetch the files. All others are Dask's, also those whose
    places have left or are paused. Until a graph reads such files, Dask's methods are in place.

    ``with_gpu``: the addresses of the workers that keep local files, too: those with a GPU.
    ``failed``: called if Dask has to choose; see :class:`Overrides`.
    """

    def __init__(self, state: SchedulerState, with_gpu: Collection[str], failed: FailureHandler):
        self._state = state
        self._with_gpu = with_gpu
        self._overrides = Overrides(failed)
        self._is_bound = False
        #: The columns of a row group that workers have read, by their addresses; the latest reads come last.
        self._places: dict[Piece, dict[str, int]] = {}
        #: What tasks read that have not run yet: row groups and their columns.
        self._reads: dict[Key, list[tuple[Piece, int]]] = {}
        #: The bit of each name of a column in a set of them.
        self._bits: dict[str, int] = {}

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
            for piece, columns in self._reads.pop(key, ()):
                if worker is not None and finish == "memory":
                    readers = self._places[piece] = self._places.pop(piece, {})
                    readers[worker] = readers.pop(worker, 0) | columns
                    if len(readers) > MAX_READERS:
                        del readers[next(iter(readers))]
            while len(self._places) > MAX_PIECES:
                del self._places[next(iter(self._places))]

    def _pieces(self, ts: SchedulerTask) -> list[tuple[Piece, Sequence[str]]]:
        """Return what a task reads of files that workers keep."""
        spec: Any = ts.run_spec
        # It may have inputs, as values to look for or a small table to join, which Dask does not look at.
        is_read = spec is not None and spec.data_producer
        return pieces_read(spec, local=bool(self._with_gpu)) if is_read else []

    def _set(self, columns: Sequence[str]) -> int:
        """Return a set of columns as bits of a number."""
        bits, found = self._bits, 0
        for name in columns:
            found |= bits.get(name) or bits.setdefault(name, 1 << len(bits))
        return found

    def _is_rootish(self, ts: SchedulerTask) -> bool:
        if pieces := self._pieces(ts):
            self._reads[ts.key] = [(piece, self._set(columns)) for piece, columns in pieces]
            if self.place(ts) is not None:
                return False  # Dask gives the others to any worker that asks for one
        rootish: bool = self._overrides.originals["is_rootish"](ts)
        return rootish

    def _decide_worker_non_rootish(self, ts: SchedulerTask) -> WorkerState | None:
        if (place := self.place(ts)) is not None:
            return place
        chosen: WorkerState | None = self._overrides.originals["decide_worker_non_rootish"](ts)
        return chosen

    def _get_comm_cost(self, ts: SchedulerTask, ws: WorkerState) -> float:
        """Return the seconds to fetch inputs, as Dask does, and those to read files that are elsewhere."""
        seconds: float = self._overrides.originals["get_comm_cost"](ts, ws)
        if (known := self._known(ts)) and known.get(ws.address, 0) < max(known.values()):
            seconds += (ELSEWHERE - 1) * max(0.0, ts.prefix.duration_average)
        return seconds

    def _known(self, ts: SchedulerTask) -> dict[str, int]:
        """Return how much of what a task reads workers have, by their addresses."""
        known: dict[str, int] = {}
        for piece, columns in self._reads.get(ts.key, ()):
            for address, read in self._places.get(piece, {}).items():
                known[address] = known.get(address, 0) + 1 + COLUMN * (read & columns).bit_count()
        return known

    def place(self, ts: SchedulerTask) -> WorkerState | None:
        """Return the worker that has what a task reads; None if there is none, or if Dask has to choose."""
        reads = self._reads.get(ts.key)
        if not reads or ts.worker_restrictions or ts.host_restrictions or ts.resource_restrictions:
            return None
        known = self._known(ts)
        (_, _, is_local), _ = reads[0]
        workers, running = self._state.workers, self._state.running
        found: tuple[int, float] | None = None
        place: WorkerState | None = None
        for address, count in known.items():
            ws = workers.get(address)
            keeps = not is_local or address in self._with_gpu
            if keeps and ws is not None and ws in running:
                rank = count, -len(ws.processing) / ws.nthreads
                if found is None or rank >= found:  # the latest of equals
                    found, place = rank, ws
        return place
