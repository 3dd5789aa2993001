"""Name the parts that the seconds of a run add up from."""

from __future__ import annotations

from dataclasses import dataclass

#: The parts of a run's seconds, in the order of time.
PARTS = ("planning", "starting", "reading", "computing", "idle", "collecting")


@dataclass(frozen=True)
class Parts:
    """Tell what the seconds of a run, or of several, were spent on.

    Parameters
    ----------
    planning, starting, reading, computing, idle, collecting
        Seconds that add up to those of the run: until the scheduler has its tasks; until the first of them
        begins; then, of a mean task thread, in readers of files, in the rest of tasks, and without a task;
        and from the end of the last task until the result is with the client.
    tasks
        How many there were.
    longest_gap
        Seconds of the longest time in which a thread had no task.
    spilled_bytes
        Of all workers: down the memory tiers or to disk.
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
        """Return the seconds in all."""
        seconds: float = sum(getattr(self, name) for name in PARTS)
        return seconds
