"""Hold the plan of the overlap benchmark: sizes, times, and the settings that take turns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.overlap.figures import ADAPTIVE, OFF
from dask_gpurt.overlap.actuators import USUAL_BLOCKS
from dask_gpurt.overlap.samples import PRIORITY, Setting

#: The setting in which communication only has the higher priority.
FIRST = "priority"
#: Compared modes of the runtime.
MODES = (OFF, FIRST, ADAPTIVE)
#: The governor's budget while it learns: the share of the time that exploration may cost.
LEARNING = 1.0


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
        Seconds of a task, the governor's unit of work.
    learn
        Seconds for which the governor may explore before it is measured.
    caps, sms
        Residency caps and SMs for compute, both as fixed settings and as the governor's candidates.
    size, partitions
        Bytes of a shuffle of the runtime, on all workers together, and its partitions.
    rows, side
        Rows of the frames, and of the square matrices, of compute.
    collective
        Bytes of a collective on each GPU.
    modes, threads, concurrency
        The pipeline's modes of the runtime, which take turns; task threads per worker; and workers in place
        of each one, which share its GPU.
    timeline
        Whether to record GPU activity in the pipeline, which has a cost of its own.
    """

    backend: str
    workers: int
    repeat: int
    seconds: float
    task: float
    learn: float
    caps: tuple[int, ...]
    sms: tuple[int, ...]
    size: int
    partitions: int
    rows: int
    side: int
    collective: int
    modes: tuple[str, ...]
    threads: int = 1
    concurrency: int = 1
    timeline: bool = False
    protocol: str | None = None
    rmm_pool_size: float = 0.5

    def candidates(self) -> dict[Setting, float]:
        """Return the caps that the governor may try, with the lowest share of speed that compute keeps."""
        return {Setting(residency=cap): min(1.0, cap / USUAL_BLOCKS) for cap in self.caps}

    def settings(self, *, caps: bool, contexts: bool = False) -> dict[str, Setting | None]:
        """Return the settings that take turns; None stands for the governor's choice.

        Parameters
        ----------
        caps, contexts
            Whether caps and green contexts are available; settings of unavailable ones are left out.
        """
        confined = [*(self.candidates() if caps else ()), *(Setting(sms=n) for n in self.sms if contexts)]
        return {OFF: PRIORITY, FIRST: PRIORITY, **{str(one): one for one in confined}, ADAPTIVE: None}


def rotated(settings: Iterable[str], turn: int) -> list[str]:
    """Return the settings rotated by ``turn``, so that each is first in some round."""
    names = list(settings)
    first = turn % len(names)
    return [*names[first:], *names[:first]]
