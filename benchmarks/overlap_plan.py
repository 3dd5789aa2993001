"""What the benchmark of overlap measures: sizes, times, and the settings that take turns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from overlap_figures import ADAPTIVE, OFF

from dask_gpurt.overlap.actuators import USUAL
from dask_gpurt.overlap.knowledge import PRIORITY, Setting

#: Communication has the higher priority, and that is all.
FIRST = "priority"
#: The share of the time that trying may lose while it is learnt what pays.
LEARNING = 1.0


@dataclass(frozen=True)
class Plan:
    """What is measured, on what, how often.

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
    caps
        Residency caps that are measured, and tried.
    size, partitions
        Bytes of a shuffle of the runtime, on all workers together, and its partitions.
    rows, side
        Rows of the frames, and of the square matrices, that are computed with.
    collective
        Bytes of a collective on each GPU.
    """

    backend: str
    workers: int
    repeat: int
    seconds: float
    task: float
    learn: float
    caps: tuple[int, ...]
    size: int
    partitions: int
    rows: int
    side: int
    collective: int
    protocol: str | None = None
    rmm_pool_size: float = 0.5

    def candidates(self) -> dict[Setting, float]:
        """What the governor may try, with the share of its speed that compute keeps at worst."""
        return {Setting(residency=cap): min(1.0, cap / USUAL) for cap in self.caps}

    def settings(self, *, confines: bool) -> dict[str, Setting | None]:
        """The settings that take turns; None leaves it to the governor.

        Parameters
        ----------
        confines
            Whether anything can be confined; else there are no caps to measure.
        """
        capped = {str(setting): setting for setting in self.candidates()} if confines else {}
        return {OFF: PRIORITY, FIRST: PRIORITY, **capped, ADAPTIVE: None}


def rotated(settings: Mapping[str, Setting | None], turn: int) -> list[str]:
    """The settings in the order of a round: each is first once, so that none is always after the same."""
    names = list(settings)
    first = turn % len(names)
    return [*names[first:], *names[:first]]
