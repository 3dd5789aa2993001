"""Rebalance the outputs of a shuffle between workers once their sizes are known.

Transfers report sizes and times when they end. At fixed points of a run, the last one before its barrier,
:mod:`dask_gpurt.shuffle.balance` decides, and :class:`~dask_gpurt.scheduler.recovery.Recovery` moves
outputs as it does for a worker that joins.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from statistics import median
from typing import Any, cast

from dask.typing import Key

from dask_gpurt.dask_hooks.shuffle import ShuffleId, ShuffleRunSpec, barrier_key
from dask_gpurt.dask_hooks.types import SchedulerServer
from dask_gpurt.placement import Headroom
from dask_gpurt.scheduler.recovery import Recovery
from dask_gpurt.scheduler.runs import sharing_outputs
from dask_gpurt.shuffle.balance import Moves, OutputBytes, OwnerCapacity, WorkerSpeeds, balanced
from dask_gpurt.shuffle.move_cost import HostLink, reading_s
from dask_gpurt.shuffle.owners import Owners
from dask_gpurt.shuffle.transfer_times import RunTransfers
from dask_gpurt.shuffle.transferred import sizes_of_task

#: How often the outputs of a run may move.
MAX_MOVES = 2


class Balancing:
    """Watch the runs of a scheduler, and move outputs away from workers that would finish much later.

    Parameters
    ----------
    scheduler
        Dask's scheduler.
    recovery
        Moves outputs.
    headroom
        The free memory of workers.
    """

    def __init__(self, scheduler: SchedulerServer, recovery: Recovery, headroom: Headroom):
        self._scheduler = scheduler
        self._recovery = recovery
        self._headroom = headroom
        self._watched: dict[ShuffleId, RunTransfers] = {}
        #: A watched shuffle and all that share its outputs, once looked up.
        self._shared: dict[ShuffleId, Collection[ShuffleId]] = {}
        #: The shuffle of each watched transfer.
        self._shuffle_of: dict[Key, ShuffleId] = {}
        self._speeds = WorkerSpeeds()

    def begins(self, shuffle: ShuffleId, run_spec: ShuffleRunSpec[Any]) -> None:
        """Watch a run that begins."""
        transfers = self._scheduler.tasks[barrier_key(shuffle)].dependencies
        owners = cast(Owners, run_spec.worker_for)
        outputs = [output for share in owners.shares.values() for output in share.outputs]
        self._stop(shuffle)
        if len(outputs) > 1 and transfers:
            self._watched[shuffle] = RunTransfers(
                run_spec.run_id, len(transfers), OutputBytes(outputs, len(transfers))
            )
            self._shuffle_of |= {task.key: shuffle for task in transfers}

    def forgotten(self, shuffle: ShuffleId) -> None:
        """Forget a shuffle whose barrier is forgotten."""
        self._stop(shuffle)

    def _stop(self, shuffle: ShuffleId) -> None:
        """Stop watching a run."""
        self._shared.pop(shuffle, None)
        if self._watched.pop(shuffle, None) is not None:
            self._shuffle_of = {key: of for key, of in self._shuffle_of.items() if of != shuffle}

    def on_worker_removed(self, worker: str) -> None:
        """Forget the speed of a worker that has left."""
        self._speeds.on_worker_removed(worker)

    def in_memory(self, key: Key) -> None:
        """Track a task that has ended. Called within its transition, before any worker gets the barrier."""
        if (shuffle := self._shuffle_of.get(key)) is None:
            return
        watch, task = self._watched[shuffle], self._scheduler.tasks[key]
        reported = sizes_of_task(task, watch.run)
        if reported is None or not self._recovery.is_current(shuffle, watch.run):
            return
        source, sizes = reported
        holder = next(iter(task.who_has or ()), None)
        watch.add(source, sizes, None if holder is None else holder.address)
        if watch.due > watch.checks:
            self._check(shuffle)

    # ---- checks ------------------------------------------------------------------------

    def _check(self, shuffle: ShuffleId) -> None:
        """Check the balance of a run, once the check is due on all sides of a join."""
        together = self._together(shuffle)
        watches = [self._watched[each] for each in together if self._is_watched(each)]
        due = min(watch.due for watch in watches)
        if len(watches) < len(together) or due <= max(watch.checks for watch in watches):
            return
        for watch in watches:
            watch.checks = due
            watch.compare(self._speeds)
        if all(watch.whole and watch.moves < MAX_MOVES for watch in watches):
            moves = self._decide(together)
            if moves.to:
                for watch in watches:
                    watch.moves += 1
                times = moves.before / moves.after
                reason = f"uneven outputs or workers: the last worker finishes {times:.1f} times as early"
                self._recovery.balance(together, moves.to, reason)
        if watches[0].is_last_check:
            for each in together:
                self._stop(each)

    def _together(self, shuffle: ShuffleId) -> Collection[ShuffleId]:
        """Return a shuffle and all that share its outputs. Cached, since they do not change during a run."""
        if shuffle not in self._shared:
            barrier = self._scheduler.tasks[barrier_key(shuffle)]
            self._shared[shuffle] = sharing_outputs(barrier) | {shuffle}
        return self._shared[shuffle]

    def _is_watched(self, shuffle: ShuffleId) -> bool:
        watch = self._watched.get(shuffle)
        return watch is not None and self._recovery.is_current(shuffle, watch.run)

    def _decide(self, together: Collection[ShuffleId]) -> Moves:
        """Return the moves of outputs to make now, for shuffles that share them."""
        nbytes = defaultdict[int, float](float)
        for each in together:
            for output, estimate in self._watched[each].nbytes.estimate().items():
                nbytes[output] += estimate
        # movable() is expensive and mostly unnecessary: first check whether any output would move.
        moves = self._moves(together, nbytes, self._recovery.owners_of(next(iter(together))))
        if moves.to:
            moves = self._moves(together, nbytes, self._recovery.movable(together))
        return moves if self._is_worth_reading(moves, together, nbytes) else Moves({})

    def _is_worth_reading(
        self, moves: Moves, together: Collection[ShuffleId], nbytes: Mapping[int, float]
    ) -> bool:
        """Return whether moves save more time than the new owners need to read the shards cut so far."""
        watches = [self._watched[each] for each in together]
        rates = [transfer.seconds_per_byte for watch in watches for transfer in watch.transfers]
        if not moves.to or not rates:
            return bool(moves.to)
        cut = sum(len(watch.nbytes) for watch in watches) / sum(watch.inputs for watch in watches)
        owners = self._recovery.owners_of(next(iter(together)))
        reading = reading_s(moves.to, owners, nbytes, cut, self._links(watches))
        return reading < (moves.before - moves.after) * median(rates)

    def _moves(
        self, together: Collection[ShuffleId], nbytes: Mapping[int, float], owners: Mapping[int, str]
    ) -> Moves:
        held = defaultdict[str, float](float)
        for output, owner in owners.items():
            held[owner] += nbytes[output]
        possible = set(self._recovery.candidates(*together))
        known = self._scheduler.workers
        threads = {
            worker: float(known[worker].nthreads) for worker in possible | held.keys() if worker in known
        }
        runs = {self._watched[each].run for each in together}
        capacities = [
            OwnerCapacity(
                worker,
                threads[worker],
                self._speeds.of(worker, runs),
                self._room(worker, held[worker]) if worker in possible else 0.0,
            )
            for worker in sorted(threads)
        ]
        present = {output: owner for output, owner in owners.items() if owner in threads}
        return balanced(nbytes, present, capacities) if present else Moves({})

    def _links(self, watches: Collection[RunTransfers]) -> dict[str, HostLink]:
        """Return the workers' measured links to other hosts."""
        made = Counter[str]()
        for watch in watches:
            for transfer in watch.transfers:
                made[transfer.worker] += transfer.nbytes
        rates = {worker: rate for watch in watches for worker, rate in watch.arriving.items()}
        total = max(1, made.total())
        return {
            worker: HostLink(self._host(worker), rate, made[worker] / total) for worker, rate in rates.items()
        }

    def _host(self, worker: str) -> str:
        known = self._scheduler.workers.get(worker)
        return worker if known is None else str(known.host)

    def _room(self, worker: str, held: float) -> float:
        """Return the bytes that a worker can take in addition to the outputs that it owns already."""
        memory = self._headroom.free_memory(worker)
        return max(0.0, memory.free + memory.below - held)
