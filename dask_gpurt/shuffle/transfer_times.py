"""Collect the times and sizes of a run's transfers, and decide when its balance is checked. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from dask_gpurt.shuffle.balance import InputSizes, OutputBytes, WorkerSpeeds

#: The fractions of a run's inputs after which its balance is checked. An early move wastes fewer shards that
#: were offered to the previous owners. At the last check the barrier has not been sent yet.
BALANCE_CHECKS = (0.125, 0.5, 1.0)
#: The fewest inputs from which the sizes of the others are extrapolated.
MIN_INPUTS = 4


class TransferTime(NamedTuple):
    """Record the duration of a transfer, and the bytes that it has published."""

    worker: str
    seconds: float
    nbytes: int

    @property
    def seconds_per_byte(self) -> float:
        """Return the duration of the transfer relative to its size."""
        return self.seconds / self.nbytes


@dataclass(eq=False)
class RunTransfers:
    """Collect the reports of a run's transfers.

    Attributes
    ----------
    run
        The run id.
    inputs
        The number of inputs.
    nbytes
        The estimated sizes of outputs.
    transfers, compared
        The times of transfers; how many of them have been compared.
    arriving
        The measured rate at which each worker receives from other hosts, in bytes per second.
    whole
        Whether every published shard can still be offered to other workers.
    checks, moves
        How often the balance was checked, and how often outputs moved.
    """

    run: int
    inputs: int
    nbytes: OutputBytes
    transfers: list[TransferTime] = field(default_factory=list)
    compared: int = 0
    arriving: dict[str, float] = field(default_factory=dict)
    whole: bool = True
    checks: int = 0
    moves: int = 0

    def add(self, source: int, sizes: InputSizes, worker: str | None) -> None:
        """Add the report of an input.

        Parameters
        ----------
        worker
            The worker that has transferred it; None if it has left.
        """
        self.nbytes.add(source, sizes)
        self.whole &= sizes.whole
        if sizes.nbytes and worker is not None:
            self.transfers.append(TransferTime(worker, sizes.seconds, sizes.nbytes))
            if sizes.arriving:
                self.arriving[worker] = sizes.arriving

    @property
    def due(self) -> int:
        """Return how many checks are due by now."""
        seen = len(self.nbytes)
        if seen < min(MIN_INPUTS, self.inputs):
            return 0
        return sum(seen >= share * self.inputs for share in BALANCE_CHECKS)

    @property
    def is_last_check(self) -> bool:
        """Return whether the balance has been checked for the last time."""
        return self.checks == len(BALANCE_CHECKS)

    def compare(self, speeds: WorkerSpeeds) -> None:
        """Update the relative speeds of workers from transfers that have not been compared yet."""
        if not self.transfers:
            return
        usual = median(transfer.seconds_per_byte for transfer in self.transfers)
        # The duration of small inputs is mostly call overhead.
        least = median(transfer.nbytes for transfer in self.transfers) / 2
        for worker, seconds, nbytes in self.transfers[self.compared :]:
            if nbytes >= least:
                speeds.observe(worker, seconds, usual * nbytes, self.run)
        self.compared = len(self.transfers)
