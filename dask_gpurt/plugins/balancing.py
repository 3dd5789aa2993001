"""Rebalance the outputs of a shuffle between workers once their sizes are known.

Transfers report sizes and times when they end. At fixed points of a run, the last one before its barrier,
:mod:`dask_gpurt.shuffle.balance` decides, and :class:`~dask_gpurt.plugins.recovery.Recovery` moves outputs as
it does for a worker that joins.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from dask.typing import Key

from dask_gpurt.dask_hooks.shuffle import barrier_key
from dask_gpurt.placement import Headroom
from dask_gpurt.plugins.recovery import Recovery
from dask_gpurt.plugins.run_outputs import sharing_outputs
from dask_gpurt.shuffle.balance import Capacity, Moves, OutputBytes, WorkerSpeeds, balanced
from dask_gpurt.shuffle.move_cost import Link, reading_s
from dask_gpurt.shuffle.transferred import sizes_of_task

#: The fractions of a run's inputs after which its balance is checked. An early move wastes fewer shards that
#: were offered to the previous owners. At the last check the barrier has not been sent yet.
LOOKS = (0.125, 0.5, 1.0)
#: The fewest inputs from which the sizes of the others are extrapolated.
MIN_INPUTS = 4
#: How often the outputs of a run may move.
MAX_MOVES = 2


@dataclass(eq=False)
class _Watch:
    """Collect the reports of a run's transfers.

    Attributes
    ----------
    run
        The run id.
    inputs
        The number of inputs.
    nbytes
        The estimated sizes of outputs.
    paces, compared
        The worker, seconds and bytes of each transfer; how many of them have been compared.
    arriving
        The measured rate at which each worker receives from other hosts, in bytes per second.
    whole
        Whether every published shard can still be offered to other workers.
    looks, moves
        How often the balance was checked, and how often outputs moved.
    together
        The shuffle and all that share its outputs, once looked up.
    """

    run: int
    inputs: int
    nbytes: OutputBytes
    paces: list[tuple[str, float, int]] = field(default_factory=list)
    compared: int = 0
    arriving: dict[str, float] = field(default_factory=dict)
    whole: bool = True
    looks: int = 0
    moves: int = 0
    together: Collection[Any] = ()

    @property
    def due(self) -> int:
        """Return how many checks are due by now."""
        seen = len(self.nbytes)
        if seen < min(MIN_INPUTS, self.inputs):
            return 0
        return sum(seen >= share * self.inputs for share in LOOKS)


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

    def __init__(self, scheduler: Any, recovery: Recovery, headroom: Headroom):
        self._scheduler = scheduler
        self._recovery = recovery
        self._headroom = headroom
        self._watched: dict[Any, _Watch] = {}
        #: The shuffle of each watched transfer.
        self._shuffle_of: dict[Key, Any] = {}
        self._speeds = WorkerSpeeds()

    def begins(self, shuffle: Any, run_spec: Any) -> None:
        """Watch a run that begins."""
        transfers = self._scheduler.tasks[barrier_key(shuffle)].dependencies
        outputs = [output for share in run_spec.worker_for.shares.values() for output in share.outputs]
        self._stop(shuffle)
        if len(outputs) > 1 and transfers:
            self._watched[shuffle] = _Watch(
                run_spec.run_id, len(transfers), OutputBytes(outputs, len(transfers))
            )
            self._shuffle_of |= {task.key: shuffle for task in transfers}

    def forgotten(self, shuffle: Any) -> None:
        """Forget a shuffle whose barrier is forgotten."""
        self._stop(shuffle)

    def _stop(self, shuffle: Any) -> None:
        """Stop watching a run."""
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
        if (told := sizes_of_task(task, watch.run)) is None or not self._recovery.goes_on(shuffle, watch.run):
            return
        source, sizes = told
        watch.nbytes.add(source, sizes)
        watch.whole &= sizes.whole
        if sizes.nbytes and (holder := next(iter(task.who_has), None)) is not None:
            watch.paces.append((holder.address, sizes.seconds, sizes.nbytes))
            if sizes.arriving:
                watch.arriving[holder.address] = sizes.arriving
        if watch.due > watch.looks:
            self._look(shuffle)

    # ---- checks ------------------------------------------------------------------------

    def _look(self, shuffle: Any) -> None:
        """Check the balance of a run, once the check is due on all sides of a join."""
        together = self._together(shuffle)
        watches = [self._watched[each] for each in together if self._is_watched(each)]
        due = min(watch.due for watch in watches)
        if len(watches) < len(together) or due <= max(watch.looks for watch in watches):
            return
        for watch in watches:
            watch.looks = due
            self._compare(watch)
        if all(watch.whole and watch.moves < MAX_MOVES for watch in watches):
            moves = self._decide(together)
            if moves.to:
                for watch in watches:
                    watch.moves += 1
                times = moves.before / moves.after
                reason = f"uneven outputs or workers: the last worker finishes {times:.1f} times as early"
                self._recovery.balance(together, moves.to, reason)
        if due == len(LOOKS):
            for each in together:
                self._stop(each)

    def _together(self, shuffle: Any) -> Collection[Any]:
        """Return a shuffle and all that share its outputs. Cached, since they do not change during a run."""
        watch = self._watched[shuffle]
        if not watch.together:
            watch.together = sharing_outputs(self._scheduler.tasks[barrier_key(shuffle)]) | {shuffle}
        return watch.together

    def _is_watched(self, shuffle: Any) -> bool:
        watch = self._watched.get(shuffle)
        return watch is not None and self._recovery.goes_on(shuffle, watch.run)

    def _compare(self, watch: _Watch) -> None:
        """Learn the relative speeds of workers from the durations and sizes of their transfers."""
        if not watch.paces:
            return
        usual = median(seconds / nbytes for _, seconds, nbytes in watch.paces)
        # The duration of small inputs is mostly call overhead.
        least = median(nbytes for _, _, nbytes in watch.paces) / 2
        for worker, seconds, nbytes in watch.paces[watch.compared :]:
            if nbytes >= least:
                self._speeds.observe(worker, seconds, usual * nbytes, watch.run)
        watch.compared = len(watch.paces)

    def _decide(self, together: Collection[Any]) -> Moves:
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

    def _is_worth_reading(self, moves: Moves, together: Collection[Any], nbytes: Mapping[int, float]) -> bool:
        """Return whether moves save more time than the new owners need to read the shards cut so far."""
        watches = [self._watched[each] for each in together]
        paces = [seconds / nbytes for watch in watches for _, seconds, nbytes in watch.paces]
        if not moves.to or not paces:
            return bool(moves.to)
        cut = sum(len(watch.nbytes) for watch in watches) / sum(watch.inputs for watch in watches)
        owners = self._recovery.owners_of(next(iter(together)))
        reading = reading_s(moves.to, owners, nbytes, cut, self._links(watches))
        return reading < (moves.before - moves.after) * median(paces)

    def _moves(
        self, together: Collection[Any], nbytes: Mapping[int, float], owners: Mapping[int, str]
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
            Capacity(
                worker,
                threads[worker],
                self._speeds.of(worker, runs),
                self._room(worker, held[worker]) if worker in possible else 0.0,
            )
            for worker in sorted(threads)
        ]
        present = {output: owner for output, owner in owners.items() if owner in threads}
        return balanced(nbytes, present, capacities) if present else Moves({})

    def _links(self, watches: Collection[_Watch]) -> dict[str, Link]:
        """Return the workers' measured links to other hosts."""
        made = Counter[str]()
        for watch in watches:
            for worker, _, nbytes in watch.paces:
                made[worker] += nbytes
        rates = {worker: rate for watch in watches for worker, rate in watch.arriving.items()}
        total = max(1, made.total())
        return {
            worker: Link(self._host(worker), rate, made[worker] / total) for worker, rate in rates.items()
        }

    def _host(self, worker: str) -> str:
        known = self._scheduler.workers.get(worker)
        return worker if known is None else str(known.host)

    def _room(self, worker: str, held: float) -> float:
        """Return the bytes that a worker can take in addition to the outputs that it owns already."""
        memory = self._headroom.free_memory(worker)
        return max(0.0, memory.free + memory.below - held)
