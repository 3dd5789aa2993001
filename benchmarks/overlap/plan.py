"""Hold the plan of the overlap benchmark: sizes, times, and the settings that take turns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.overlap.figures import ADAPTIVE, OFF
from dask_gpurt.overlap.actuators import USUAL_BLOCKS
from dask_gpurt.overlap.samples import PRIORITY, Setting

#: Communication has the higher priority, and that is all.
FIRST = "priority"
#: The modes of the runtime that are compared.
MODES = (OFF, FIRST, ADAPTIVE)
#: The share of the time that trying may lose while it is learnt what pays.
LEARNING = 1.0


@dataclass(frozen=True)
class Plan:
    """Hold sizes, times and settings.

    Parameters
    ----------
    backend
        ``cudf`` on GPUs; ``pandas`` rehearses on the host.
    seconds
        Of compute alone in a leg, and as much of communication.
    task
        Seconds of a task: the governor is told of tasks.
    learn
        Seconds for which the governor may try before it is measured.
    caps, sms
        Residency caps that are measured, and tried; SMs for compute.
    size, partitions
        Bytes of a shuffle of the runtime, on all workers together, and its partitions.
    rows, side
        Rows of the frames, and of the square matrices, that are computed with.
    collective
        Bytes of a collective on each GPU.
    modes, threads
        Of the pipeline: modes of the runtime, that take turns, and threads for tasks of a worker.
    timeline
        Whether to look at what GPUs do in the pipeline, which takes time of its own.
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
    timeline: bool = False
    protocol: str | None = None
    rmm_pool_size: float = 0.5

    def candidates(self) -> dict[Setting, float]:
        """Return the caps that the governor may try, with the least share of speed that compute keeps."""
        return {Setting(residency=cap): min(1.0, cap / USUAL_BLOCKS) for cap in self.caps}

    def settings(self, *, caps: bool, contexts: bool = False) -> dict[str, Setting | None]:
        """Return the settings that take turns; None leaves it to the governor.

        Parameters
        ----------
        caps, contexts
            What can confine; what cannot is not measured.
        """
        confined = [*(self.candidates() if caps else ()), *(Setting(sms=n) for n in self.sms if contexts)]
        return {OFF: PRIORITY, FIRST: PRIORITY, **{str(one): one for one in confined}, ADAPTIVE: None}


def rotated(settings: Iterable[str], turn: int) -> list[str]:
    """Return the settings in the order of a round: each is first once, and none always after the same."""
    names = list(settings)
    first = turn % len(names)
    return [*names[first:], *names[:first]]
