"""Stand in for the scheduler of shuffles: Dask's p2p extension and our recovery, as far as runs need them."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from distributed.core import Status, error_message
from distributed.shuffle._core import ShuffleId, ShuffleRunSpec
from distributed.shuffle._exceptions import P2PConsistencyError

from dask_gpurt.protocol import NEW_OWNERS_OP, SEALED_OP
from dask_gpurt.shuffle import ShuffleSpec
from dask_gpurt.shuffle.owners import Owners, deal
from tests.helpers.exchange_processes import Network, Process, received

#: Column with the output of each row, and the schema of the tests' frames.
TARGET = "_target"
META = pd.DataFrame({"row": np.empty(0, "int64")})


def frame_of(rows: Sequence[int], outputs: int) -> pd.DataFrame:
    """Return a frame with these rows; row ``n`` belongs to output ``n % outputs``."""
    numbers = np.array(rows, "int64")
    return pd.DataFrame({"row": numbers, TARGET: numbers % outputs})


def spec_of(shuffle: str, outputs: int) -> ShuffleSpec:
    """Return a shuffle of such frames."""
    return ShuffleSpec(
        id=ShuffleId(shuffle),
        disk=False,
        npartitions=outputs,
        column=TARGET,
        meta=pickle.dumps(META),
        columns=(*META.columns, TARGET),
        parts_out=tuple(range(outputs)),
        drop_column=True,
        ignore_index=True,
    )


@dataclass
class Active:
    """Hold the scheduler's state of an active shuffle."""

    spec: ShuffleSpec
    run_spec: ShuffleRunSpec[int]
    participants: set[str]
    #: Results of transfer tasks, by input.
    transferred: dict[int, Any] = field(default_factory=dict)
    #: Outputs in memory, each with the worker that holds it.
    outputs: dict[int, tuple[str, pd.DataFrame]] = field(default_factory=dict)
    #: Whether the barrier has sealed the run, and whether it is done.
    sealed: bool = False
    done: bool = False

    @property
    def owners(self) -> Owners:
        assert isinstance(self.run_spec.worker_for, Owners)
        return self.run_spec.worker_for


class Scheduler:
    """Fake Dask's p2p extension on the scheduler with our recovery, as far as runs need them."""

    def __init__(self, network: Network):
        self.network = network
        self.workers: set[str] = set()
        #: The workers that have fallen silent.
        self.silent: set[str] = set()
        self.active: dict[str, Active] = {}
        self._dispatches = itertools.count()
        self.restarts = 0
        self.recoveries = 0

    def next_dispatch(self) -> int:
        return next(self._dispatches)

    def begin(self, spec: ShuffleSpec) -> Active:
        workers = sorted(self.workers)
        worker_for = {output: spec.pick_worker(output, workers) for output in spec.output_partitions}
        run_spec = ShuffleRunSpec(spec=spec, worker_for=Owners.begin(worker_for), span_id=None)
        self.active[spec.id] = Active(spec, run_spec, set(worker_for.values()))
        return self.active[spec.id]

    def end(self, shuffle: str) -> None:
        """End a shuffle that is no longer needed."""
        ended = self.active.pop(shuffle)
        for address in ended.participants & self.network.processes.keys():
            self.network.stream(
                self.network.processes[address],
                "shuffle-fail",
                shuffle_id=shuffle,
                run_id=ended.run_spec.run_id,
                message=f"{shuffle} forgotten",
            )

    def restart(self, shuffle: str) -> None:
        spec = self.active[shuffle].spec
        self.end(shuffle)
        self.begin(spec)
        self.restarts += 1

    def joins(self, process: Process) -> None:
        self.workers.add(process.address)

    def leaves(self, address: str, *, results_survive: bool = False) -> None:
        """Handle the death of a worker.

        ``results_survive``: whether the results of its transfer tasks have replicas elsewhere.
        """
        self.workers.discard(address)
        for process in self.network.processes.values():
            if process.address in self.workers:
                self.network.stream(process, "remove-worker", worker=address)
        for active in self.active.values():
            if address not in active.participants:
                continue
            active.participants.discard(address)
            for output in [o for o, (where, _) in active.outputs.items() if where == address]:
                del active.outputs[output]
            if not results_survive:
                for source in [s for s, one in active.transferred.items() if one.producer == address]:
                    del active.transferred[source]
            self._move(active, {o for o, owner in active.owners.items() if owner == address}, [address])

    def _move(
        self, active: Active, outputs: Iterable[int], gone: Sequence[str] = (), avoiding: str | None = None
    ) -> None:
        """Reassign outputs, possibly to the same owners, and rerun the barrier."""
        self.recoveries += 1
        idle = {output for output in outputs if output in active.outputs}
        workers = sorted(self.workers - self.silent - {avoiding}) or [str(avoiding)]
        active.owners.move(deal(set(outputs) - idle, workers, {}), gone=gone, idle=deal(idle, workers, {}))
        self._moved(active)

    def balance(self, shuffle: str, outputs: Iterable[int], owner: str) -> None:
        """Move outputs that are not in memory yet to another owner, as when they turn out to be large.

        The barrier reruns if it has passed: the other side of a join may be late.
        """
        active = self.active[shuffle]
        if to := dict.fromkeys(set(outputs) - active.outputs.keys(), owner):
            active.owners.move(to)
            self._moved(active)

    def _moved(self, active: Active) -> None:
        """Rerun the barrier, and send the new owners to the workers."""
        active.sealed = active.done = False
        active.participants |= set(active.owners.values())
        for address in active.participants & self.network.processes.keys():
            self.network.stream(
                self.network.processes[address],
                NEW_OWNERS_OP,
                id=active.spec.id,
                run_id=active.run_spec.run_id,
                owners=active.owners.snapshot(),
            )

    # ---- what workers call -----------------------------------------------------------

    async def gpurt_gone(self, peers: list[str], closing: bool = False) -> list[str]:
        return [peer for peer in peers if peer not in self.workers or (closing and self._closes(peer))]

    async def gpurt_silent(self, id: str, run_id: int, worker: str) -> bool:
        return worker in self.silent and self._of(id, run_id) is not None

    def _closes(self, address: str) -> bool:
        process = self.network.processes.get(address)
        return process is not None and process.status is Status.closing

    async def shuffle_get(self, id: str, worker: str) -> Any:
        if id not in self.active or worker not in self.workers:
            return received(error_message(P2PConsistencyError(f"No active shuffle with id={id!r} found")))
        self.active[id].participants.add(worker)
        return {"status": "OK", "run_spec": self.active[id].run_spec}

    async def shuffle_get_or_create(self, shuffle_id: str, key: Any, worker: str) -> Any:
        return await self.shuffle_get(shuffle_id, worker)

    async def shuffle_restrict_task(self, id: str, run_id: int, key: str, worker: str) -> dict[str, str]:
        return {"status": "OK"}

    async def shuffle_barrier(self, id: str, run_id: int, consistent: bool) -> None:
        active = self.active[id]
        if active.run_spec.run_id != run_id:
            raise ValueError(f"{run_id=} does not match")
        assert not consistent
        self.restart(id)

    def _of(self, id: str, run_id: int) -> Active | None:
        active = self.active.get(id)
        return active if active is not None and active.run_spec.run_id == run_id else None

    async def gpurt_owners(self, id: str, run_id: int) -> dict[str, Owners | None]:
        active = self._of(id, run_id)
        return {"owners": active and active.owners.snapshot()}

    def hear(self, message: dict[str, Any]) -> None:
        """Handle a worker's stream message that a barrier, which is about to end, has sealed a run."""
        assert message["op"] == SEALED_OP
        if (active := self._of(message["id"], message["run_id"])) is not None:
            active.owners.seal(message["epoch"])

    async def gpurt_recover(
        self,
        id: str,
        run_id: int,
        epoch: int,
        reason: str,
        outputs: Sequence[int] = (),
        inputs: Sequence[str] = (),
        producers: Sequence[str] = (),
        unreachable: str | None = None,
    ) -> None:
        active = self._of(id, run_id)
        if active is None or active.owners.epoch != epoch:
            return
        lost = active.owners.received(outputs) - active.outputs.keys()
        avoided = {unreachable} | (self.silent & set(producers))
        lost |= {o for o, owner in active.owners.items() if owner in avoided} - active.outputs.keys()
        if lost or inputs or (outputs and active.done):
            for key in inputs:
                active.transferred.pop(int(key.removeprefix("transfer-")), None)
            self._move(active, lost, avoiding=unreachable)
