"""Hold the figures of a finished simulation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Result:
    """Hold the figures of one simulation.

    Attributes
    ----------
    makespan
        Virtual seconds from the first submission until all results were in memory.
    bytes
        Bytes moved between workers, by class of link.
    spilled
        Bytes moved to a lower tier.
    worst_memory
        The largest peak of a live tier, relative to its capacity.
    over_memory
        Number of workers whose live tier ever exceeded its capacity.
    too_large
        Number of tasks whose inputs, result and workspace together exceed every live tier of the cluster.
    runs
        Number of finished tasks.
    decisions, decision_us
        Number of worker choices, and their mean CPU time in microseconds.
    scheduler_us
        CPU time of the scheduler for messages and stealing per task, in microseconds.
    fallbacks
        Number of placement decisions that were left to Dask because they raised.
    """

    workload: str
    cluster: str
    placement: str
    workers: int
    tasks: int
    makespan: float
    bytes: dict[str, int]
    between_hosts: int
    spilled: int
    worst_memory: float
    over_memory: int
    too_large: int
    runs: int
    steals: int
    decisions: int
    decision_us: float
    scheduler_us: float
    fallbacks: int
