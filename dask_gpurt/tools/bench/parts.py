"""Define the parts that make up the seconds of a run."""

from __future__ import annotations

from dataclasses import dataclass

#: The parts of a run's seconds, in chronological order.
PARTS = ("planning", "starting", "reading", "computing", "idle", "collecting")


@dataclass(frozen=True)
class Parts:
    """Hold how the seconds of one or several runs were spent.

    Parameters
    ----------
    planning, starting, reading, computing, idle, collecting
        Seconds that add up to the run: until the scheduler has its tasks; until the first task begins; then,
        for an average task thread, in file readers, in the rest of tasks, and without a task; and from the
        end of the last task until the client has the result.
    tasks
        Number of tasks.
    longest_gap
        The longest time in which a thread had no task, in seconds.
    spilled_bytes
        Bytes moved to lower memory tiers or to disk, on all workers.
    """

    planning: float
    starting: float
    reading: float
    computing: float
    idle: float
    collecting: float
    tasks: int
    longest_gap: float
    spilled_bytes: float

    @property
    def seconds(self) -> float:
        """Return the total seconds."""
        seconds: float = sum(getattr(self, name) for name in PARTS)
        return seconds
