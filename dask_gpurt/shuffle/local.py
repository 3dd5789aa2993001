"""Run the tasks of a shuffle on one of Dask's local schedulers, where there are no workers.

Where a graph will run is unknown if it is made by ``optimize()``, ``to_delayed()`` or ``.dask``: only then
does a program hand it to a client or to a local scheduler. So the tasks themselves find out. On a worker they
take part in a run of the shuffle. Elsewhere they pass the rows on as their results::

    transfer  ->  its input
    barrier   ->  the rows of all inputs, split by output as with ``tasks``
    unpack    ->  the rows of its output, in the order of the inputs

With threads nothing is copied for that. With processes each output receives the rows of all outputs: plan
under ``dask.config.set(scheduler="processes")``, and Dask's own ``tasks`` method is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from distributed import get_worker

from dask_gpurt.dask_hooks.shuffle import P2PBarrierTask
from dask_gpurt.dask_hooks.shuffle import output_of as output_on_worker
from dask_gpurt.dask_hooks.shuffle import shuffle_unpack as unpack_on_worker
from dask_gpurt.dask_hooks.shuffle import transfer as transfer_on_worker
from dask_gpurt.frames import Routed
from dask_gpurt.shuffle.spec import ShuffleSpec


@dataclass(frozen=True)
class LocalInput:
    """Hold an input of a shuffle, with its output partitions as a column."""

    frame: Any


@dataclass(frozen=True)
class LocalRun:
    """Hold the rows of a shuffle, by input and output."""

    split: Sequence[dict[int, Any]]
    ignore_index: bool

    @classmethod
    def of(cls, spec: ShuffleSpec, inputs: Sequence[LocalInput]) -> LocalRun:
        """Split the inputs."""
        return cls([_split(spec, one.frame) for one in inputs], spec.ignore_index)

    def output(self, partition: int) -> Any:
        """Return the rows of an output."""
        from dask_gpurt.dask_hooks.types import concat  # a scheduler that unpickles tasks does not need it

        return concat([pieces[partition] for pieces in self.split], ignore_index=self.ignore_index)


def _split(spec: ShuffleSpec, frame: Any) -> dict[int, Any]:
    from dask.dataframe.dispatch import group_split_dispatch

    targets = frame[spec.column].astype("int64")
    rows = frame.drop(columns=spec.column) if spec.drop_column else frame
    pieces: dict[int, Any] = group_split_dispatch(rows, targets, spec.npartitions, spec.ignore_index)
    return pieces


class BarrierTask(P2PBarrierTask):
    """Run the barrier of a shuffle: on a worker by its coroutine, elsewhere by splitting the inputs."""

    spec: ShuffleSpec
    __slots__ = ()

    def __call__(self, values: Any = ()) -> Any:
        _, *transfers = self.args
        inputs = [values[transfer.key] for transfer in transfers]
        if all(isinstance(one, LocalInput) for one in inputs):
            return LocalRun.of(self.spec, inputs)
        return super().__call__(values)  # type: ignore[no-untyped-call]


def transfer(input: Any, id: Any, input_partition: int) -> Any:
    """Transfer an input of a shuffle. The arguments are those of Dask's task."""
    if _runs_on_worker(id):
        return transfer_on_worker(input, id, input_partition)
    return LocalInput(input.assigned() if isinstance(input, Routed) else input)


def shuffle_unpack(id: Any, output_partition: int, run: Any) -> Any:
    """Return an output of a shuffle. Name and arguments are those of Dask's task."""
    return (
        run.output(output_partition)
        if isinstance(run, LocalRun)
        else unpack_on_worker(id, output_partition, run)
    )


def output_of(id: Any, run: Any, partition: int) -> Any:
    """Return an output of a shuffle, for a task that does more than that."""
    return run.output(partition) if isinstance(run, LocalRun) else output_on_worker(id, run, partition)


def runtime_here() -> Any:
    """Return the runtime of the worker that runs this task; None if it is off, or there is no worker."""
    try:
        return get_worker().plugins.get("gpurt")
    except ValueError:
        return None


def _runs_on_worker(id: Any) -> bool:
    """Return whether this thread runs a transfer as a task of a worker.

    A task may also compute a graph by a local scheduler, in its own thread or in others.
    """
    try:
        return str(id) in str(get_worker().get_current_task())
    except ValueError:
        return False
