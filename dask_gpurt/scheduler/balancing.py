"""Rebalance the outputs of a shuffle between workers once the sizes of its inputs are known.

Transfers report sizes when they end. After the last transfer of a run, before its barrier is assigned to a
worker, :mod:`dask_gpurt.shuffle.balance` decides, and :class:`~dask_gpurt.scheduler.recovery.Recovery` moves
outputs as it does for a worker that joins.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any, cast

from dask.typing import Key

from dask_gpurt.dask_hooks.shuffle import ShuffleId, ShuffleRunSpec, barrier_key
from dask_gpurt.dask_hooks.types import SchedulerServer
from dask_gpurt.memory.ledger import room
from dask_gpurt.scheduler.recovery import Recovery
from dask_gpurt.scheduler.runs import ActiveRuns, sharing_outputs
from dask_gpurt.scheduler.worker_calls import heartbeat_of
from dask_gpurt.shuffle.balance import Moves, OwnerCapacity, RunSizes, balanced
from dask_gpurt.shuffle.messages import sizes_of_task
from dask_gpurt.shuffle.owners import Owners

logger = logging.getLogger(__name__)


class Balancing:
    """Watch the runs of a scheduler, and move outputs away from workers that would get too many bytes."""

    def __init__(self, scheduler: SchedulerServer, runs: ActiveRuns, recovery: Recovery, token: str):
        self._scheduler = scheduler
        self._runs = runs
        self._recovery = recovery
        self._token = token
        self._watched: dict[ShuffleId, RunSizes] = {}
        #: The shuffle of each watched transfer.
        self._shuffle_of: dict[Key, ShuffleId] = {}

    def begins(self, shuffle: ShuffleId, run_spec: ShuffleRunSpec[Any]) -> None:
        """Watch a run that begins."""
        transfers = self._scheduler.tasks[barrier_key(shuffle)].dependencies
        owners = cast(Owners, run_spec.worker_for)
        outputs = [output for share in owners.shares.values() for output in share.outputs]
        self.forgotten(shuffle)
        if len(outputs) > 1 and transfers:
            self._watched[shuffle] = RunSizes(run_spec.run_id, outputs, len(transfers))
            self._shuffle_of |= {task.key: shuffle for task in transfers}

    def forgotten(self, shuffle: ShuffleId) -> None:
        """Stop watching a shuffle: its outputs have been balanced, or its barrier is forgotten."""
        if self._watched.pop(shuffle, None) is not None:
            self._shuffle_of = {key: of for key, of in self._shuffle_of.items() if of != shuffle}

    def in_memory(self, key: Key) -> None:
        """Track a task that has ended. Called within its transition, before any worker gets the barrier."""
        if (shuffle := self._shuffle_of.get(key)) is None:
            return
        watched = self._watched[shuffle]
        reported = sizes_of_task(self._scheduler.tasks[key], watched.run)
        if reported is not None and self._runs.is_current(shuffle, watched.run):
            watched.add(*reported)
            if watched.is_complete:
                self._balance(shuffle)

    def _balance(self, shuffle: ShuffleId) -> None:
        """Move the outputs of a run, once the sizes of all sides of a join are known."""
        together = sharing_outputs(self._scheduler.tasks[barrier_key(shuffle)]) | {shuffle}
        sizes = [self._watched[each] for each in together if self._is_complete(each)]
        if len(sizes) < len(together):
            return
        if all(each.whole for each in sizes):
            moves = self._decide(together, sizes)
            if moves.to:
                reason = f"uneven outputs: the heaviest load shrinks {moves.before / moves.after:.1f} times"
                self._recovery.balance(together, moves.to, reason)
        else:
            logger.debug("Shuffles %s: outputs stay, since shards are no longer in the pools", together)
        for each in together:
            self.forgotten(each)

    def _is_complete(self, shuffle: ShuffleId) -> bool:
        watched = self._watched.get(shuffle)
        return watched is not None and watched.is_complete and self._runs.is_current(shuffle, watched.run)

    def _decide(self, together: Collection[ShuffleId], sizes: Collection[RunSizes]) -> Moves:
        """Return the moves of outputs to make now, for shuffles that share them."""
        nbytes = defaultdict[int, float](float)
        for each in sizes:
            for output, size in each.nbytes().items():
                nbytes[output] += size
        # movable() is expensive and mostly unnecessary: first check whether any output would move.
        moves = self._moves(together, nbytes, self._runs.owners(next(iter(together))))
        if moves.to:
            moves = self._moves(together, nbytes, self._recovery.movable(together))
        if logger.isEnabledFor(logging.DEBUG):
            chosen = f"moves {moves.to}" if moves.to else "no move pays, or none is possible any more"
            logger.debug(
                "Shuffles %s: heaviest load %.0f bytes, %.0f with moves: %s; bytes by output: %s",
                together,
                moves.before,
                moves.after,
                chosen,
                dict(nbytes),
            )
        return moves

    def _moves(
        self, together: Collection[ShuffleId], nbytes: Mapping[int, float], owners: Mapping[int, str]
    ) -> Moves:
        held = defaultdict[str, float](float)
        for output, owner in owners.items():
            held[owner] += nbytes[output]
        possible, known = set(self._runs.candidates(*together)), self._scheduler.workers
        capacities = [
            OwnerCapacity(
                worker,
                float(known[worker].nthreads),
                self._room(worker, held[worker]) if worker in possible else 0.0,
            )
            for worker in sorted(possible | held.keys())
            if worker in known
        ]
        present = {output: owner for output, owner in owners.items() if owner in known}
        return balanced(nbytes, present, capacities) if present else Moves({})

    def _room(self, worker: str, held: float) -> float:
        """Return the bytes that a worker can take in addition to the outputs that it owns already."""
        state = self._scheduler.workers[worker]
        if (beat := heartbeat_of(state, self._token)) is not None:
            free: float = room(beat["memory"])
        else:  # no heartbeat has brought one yet
            free = state.memory_limit - state.nbytes if state.memory_limit else math.inf
        return max(0.0, free - held)
