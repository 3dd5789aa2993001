"""Hold the plan of the overlap benchmark: sizes, times, and the settings that take turns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.overlap.figures import OFF

#: The setting in which communication only has the higher priority.
FIRST = "priority"
#: Modes of the runtime that can be compared; ``calibrated`` needs a table of ``dask gpurt calibrate``.
MODES = (OFF, FIRST, "calibrated")


@dataclass(frozen=True)
class Plan:
    """Hold sizes, times and settings.

    Parameters
    ----------
    backend
        ``cudf`` on GPUs; ``pandas`` rehearses on the host.
    seconds
        Compute alone in a leg, and as much communication.
    task
        Seconds of a task.
    caps
        Residency caps for compute.
    size, partitions
        Bytes of a shuffle of the runtime, on all workers together, and its partitions.
    rows, side
        Rows of the frames, and of the square matrices, of compute.
    collective
        Bytes of a collective on each GPU.
    modes, threads
        The pipeline's modes of the runtime, which take turns, and task threads per worker.
    timeline
        Whether to record GPU activity in the pipeline, which has a cost of its own.
    """

    backend: str
    workers: int
    repeat: int
    seconds: float
    task: float
    caps: tuple[int, ...]
    size: int
    partitions: int
    rows: int
    side: int
    collective: int
    modes: tuple[str, ...]
    threads: int = 1
    timeline: bool = False
    protocol: str | None = None
    rmm_pool_size: float = 0.5

    def settings(self, *, caps: bool) -> dict[str, int | None]:
        """Return the settings that take turns, with their caps; without caps if those are not available."""
        capped = {f"residency {cap}": cap for cap in self.caps} if caps else {}
        return {OFF: None, FIRST: None, **capped}


def rotated(settings: Iterable[str], turn: int) -> list[str]:
    """Return the settings rotated by ``turn``, so that each is first in some round."""
    names = list(settings)
    first = turn % len(names)
    return [*names[first:], *names[:first]]
