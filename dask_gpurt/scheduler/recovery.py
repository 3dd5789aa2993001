"""Repair runs that have lost a worker, and redo only the lost work.

Dask's p2p restarts the whole shuffle. Here the run continues:

- Outputs of the lost worker are given to other workers, and producers offer the new owners the shards that
  they still hold.
- Results of transfers and of the barrier are kept as long as an output may be needed again, so Dask reruns
  only the transfers whose results were lost.
- The barrier reruns. It reports missing inputs, which are transferred again.

See docs/design/exactly-once.md for the protocol.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from dask.typing import Key
from distributed.metrics import time
from distributed.protocol.serialize import ToPickle

from dask_gpurt.dask_hooks.shuffle import ShuffleId, barrier_key, restrict_again
from dask_gpurt.dask_hooks.types import SchedulerServer, ShuffleExtension
from dask_gpurt.dask_hooks.worker import CLOSING
from dask_gpurt.observe import Metrics
from dask_gpurt.protocol import NEW_OWNERS_OP
from dask_gpurt.scheduler.results import RetainedResults
from dask_gpurt.scheduler.runs import ActiveRuns, is_unfinished
from dask_gpurt.scheduler.switching import Workers
from dask_gpurt.shuffle.losses import ConsecutiveLosses, Contribution, Loss, PendingLosses, common_owners
from dask_gpurt.shuffle.owners import Owners, deal, fair_share
from dask_gpurt.shuffle.spec import outputs_of

logger = logging.getLogger(__name__)

#: The topic of Dask's event log for the beginnings, repairs and restarts of runs.
SHUFFLE_TOPIC = "gpurt-shuffle"
#: How long a repair waits for unaffected outputs being assembled, and the polling interval, in seconds.
MAX_REPAIR_DELAY_S, REPAIR_POLL_INTERVAL_S = 0.25, 0.02


class Recovery:
    """Repair the runs of a scheduler.

    ``retries``: how many times in a row a run is repaired before its shuffle restarts.
    ``begin_again``: restarts a whole shuffle; takes its id and the reason.
    """

    def __init__(
        self,
        scheduler: SchedulerServer,
        workers: Workers,
        runs: ActiveRuns,
        retries: int,
        metrics: Metrics,
        begin_again: Callable[[ShuffleId, str], None],
    ):
        self._scheduler = scheduler
        self._extension: ShuffleExtension = scheduler.extensions["shuffle"]
        self._workers = workers
        self._runs = runs
        self._retries = retries
        self._metrics = metrics
        self._begin_again = begin_again
        self._in_a_row = ConsecutiveLosses()
        self._results = RetainedResults(scheduler, self._in_a_row.forget)
        self._losses = PendingLosses[ShuffleId]()

    # ---- the life of runs ------------------------------------------------------------

    def begins(self, shuffle: ShuffleId) -> None:
        """Track a run that begins."""
        self._losses.forget([shuffle])  # of the previous run
        self._results.begins(shuffle)

    def forgotten(self, shuffle: ShuffleId) -> None:
        """Forget a shuffle whose barrier is forgotten."""
        self._results.forgotten(shuffle)

    def transition(self, key: Key, finish: str, worker: str | None) -> None:
        """Track the state of a task; see :meth:`RetainedResults.transition`."""
        if finish in ("memory", "forgotten"):
            self._in_a_row.done(key)
        self._results.transition(key, finish, worker)

    def is_done(self, shuffle: ShuffleId) -> bool:
        """Return whether all needed outputs of a shuffle are assembled."""
        return self._results.is_done(shuffle)

    def restart(self) -> None:
        """Forget all runs when the scheduler restarts and forgets all tasks."""
        self._results.restart()
        self._losses.clear()

    def end_all(self) -> None:
        """End all runs and release their kept results."""
        self._results.end_all()
        self._losses.clear()

    # ---- calls from workers ----------------------------------------------------------

    def owners(self, id: ShuffleId, run_id: int) -> dict[str, Any]:
        """Return the owners of a run; None if it is over (handler)."""
        owners = self._runs.current_owners(id, run_id)
        return {"owners": None if owners is None else ToPickle(owners.snapshot())}

    def sealed(self, id: ShuffleId, run_id: int, epoch: int, worker: str) -> None:
        """Seal an epoch: its barrier reports that all owners have received every shard.

        ``worker``: the worker that runs the barrier. This message precedes the end of the task on its stream.
        """
        owners = self._runs.current_owners(id, run_id)
        if owners is None or owners.seal(epoch) or owners.sealed:
            return
        # The epoch is stale. Every move of outputs sends the new owners and then reruns the barrier. If the
        # worker missed them nevertheless, the barrier must not end with the old owners: rerun it.
        self._send_owners(id, {worker})
        self.rerun([barrier_key(id)], "processing")

    def recover(
        self,
        id: ShuffleId,
        run_id: int,
        epoch: int,
        reason: str,
        outputs: Collection[int] = (),
        inputs: Collection[Key] = (),
        producers: Collection[str] = (),
        unreachable: str | None = None,
    ) -> None:
        """Repair a loss that a worker reports, unless the report is of a stale epoch (handler).

        ``producers``: the workers that held the lost shards. Those that have left or are closing are to
        blame.
        ``unreachable``: a worker that does not answer; its unfinished outputs are given to other workers. So
        are those of silent workers among the producers.
        """
        owners = self._runs.current_owners(id, run_id)
        if owners is None or owners.epoch != epoch:
            return
        named = set() if unreachable is None else {unreachable}
        silent = {worker for worker in named.union(producers) if worker in self._workers.silent}
        avoided = named | silent
        lost = owners.received(outputs)
        if lost:  # other outputs that were read and are needed again would be reported lost soon
            lost |= self._runs.unfinished(id, self._results.read(id))
        for worker in avoided:
            lost |= self._runs.unfinished(id, self._runs.owned(id, worker))
        if lost or inputs or (outputs and self._runs.is_task(barrier_key(id), "memory")):
            if id not in self._results:  # the run had ended, and an output is needed again
                self._results.keep(id)
            shuffles = self._runs.sharing(id) if lost else {id}
            loss = self._record_loss(shuffles, lost, reason)
            loss.missing.update(outputs, inputs)
            loss.unreachable |= avoided
            loss.culprits |= avoided - silent
            loss.culprits.update(producer for producer in producers if self._leaves(producer))
            if silent:  # it is no failure, however often it happens
                for shuffle in shuffles:
                    self._in_a_row.moves(shuffle)
            self.rerun(inputs)
            self._repair_soon(loss)

    def _leaves(self, worker: str) -> bool:
        state = self._scheduler.workers.get(worker)
        return state is None or state.status in CLOSING

    # ---- workers that leave or join --------------------------------------------------

    def remove_worker(self, worker: str) -> None:
        """Repair the runs in which a worker took part.

        Runs before Dask's own method, which restarts every run that still lists the worker as participating.
        """
        affected = set()
        for shuffle, run in self._runs.all().items():
            if worker in run.participating_workers:
                run.participating_workers.discard(worker)
                affected.add(shuffle)
        for together in self._runs.grouped(affected):
            with self._or_begin_again(together, f"worker {worker} has left"):
                self._replace(worker, together)

    def _replace(self, worker: str, shuffles: set[ShuffleId]) -> None:
        """Give the outputs of a worker that has left to other workers."""
        reason = f"worker {worker} has left"
        owned = set().union(*(self._runs.owned(shuffle, worker) for shuffle in shuffles))
        lost = set().union(*(self._runs.unfinished(shuffle, owned) for shuffle in shuffles))
        transfers = [key for shuffle in shuffles for key in self._transferred_by(worker, shuffle)]
        if lost or (transfers and not all(map(self._runs.is_sealed, shuffles))):
            loss = self._record_loss(shuffles, lost, reason)
            loss.gone.add(worker)
            loss.culprits.add(worker)
            # Dask reruns a transfer only if its result is lost too; the result may have other replicas.
            self.rerun(transfers)
            self._repair_soon(loss)
            return
        if all(map(self.is_done, shuffles)):
            for shuffle in shuffles:  # all outputs are assembled: do not rerun the lost transfers
                self._results.end(shuffle)
        elif owned and (candidates := self._runs.candidates(*shuffles)):
            for shuffle in shuffles:
                self._move(shuffle, {}, {worker}, deal(owned, candidates, {}))

    def _transferred_by(self, worker: str, shuffle: ShuffleId) -> list[Key]:
        tasks = self._runs.barrier(shuffle).dependencies
        return [task.key for task in tasks if self._results.producer(task.key) == worker]

    def retires(self, worker: str) -> None:
        """Give the outputs of a worker that retires to others, while it can still offer its shards."""
        for together in self._runs.grouped(self._runs.all()):
            owned = set().union(*(self._runs.owned(shuffle, worker) for shuffle in together))
            needed = set().union(*(self._runs.unfinished(shuffle, owned) for shuffle in together))
            candidates = self._runs.candidates(*together)
            if needed and candidates and worker not in candidates:  # otherwise all workers retire
                self._repair_soon(self._record_loss(together, needed, f"worker {worker} retires"))

    def contributions(self, worker: str) -> dict[ShuffleId, Contribution]:
        """Return what would have to be transferred again if a worker left now, by shuffle."""
        found = {}
        for shuffle, run in self._runs.all().items():
            if not self.is_done(shuffle):
                epoch, transfers = self._runs.owners(shuffle).epoch, self._transferred_by(worker, shuffle)
                found[shuffle] = Contribution(run.run_id, epoch, transfers)
        return {shuffle: contributed for shuffle, contributed in found.items() if contributed.transfers}

    def evacuated(self, worker: str, contributed: Contribution) -> None:
        """Note that owners have copied the shards of a worker, so that they are not lost with it."""
        self._results.evacuated(worker, contributed.transfers)

    def is_repair_pending(self, shuffles: Iterable[ShuffleId]) -> bool:
        """Return whether a loss, or a move of outputs, has not been carried out yet."""
        return any(shuffle in self._losses for shuffle in shuffles)

    def joined(self, worker: str) -> None:
        """Give a worker that has joined a fair share of the unfinished outputs."""
        self._in_a_row.takes_part(worker)
        for shuffle in self._runs.all():
            owners = self._runs.owners(shuffle)
            if owners.sealed or worker not in self._runs.candidates(shuffle):
                continue
            taken = self._share_for(worker, shuffle, owners)
            if taken and shuffle not in self._losses:
                self._reassign(self._runs.sharing(shuffle), taken, [worker], f"worker {worker} has joined")

    def _share_for(self, worker: str, shuffle: ShuffleId, owners: Owners) -> set[int]:
        """Return the outputs to give to a worker that joins; none if it owns some already."""
        waiting = {output: owners[output] for output in self._runs.unfinished(shuffle, owners)}
        if worker in waiting.values():
            return set()
        return fair_share(waiting, len(self._runs.candidates(shuffle)))

    # ---- outputs that move for balance -----------------------------------------------

    def movable(self, shuffles: Collection[ShuffleId]) -> dict[int, str]:
        """Return the outputs that can still move to other workers, with their current owners.

        Empty if no barrier waits any more, if a loss is pending, or if other tasks read one of the shuffles.

        ``shuffles``: an active shuffle and all that share its outputs, such as the other side of a join.
        """
        if self._runs.sharing(next(iter(shuffles))) != set(shuffles):  # another one runs by Dask's own p2p
            return {}
        barriers = [self._runs.barrier(each) for each in shuffles]
        runs = [self._runs.owners(each) for each in shuffles]
        waits = any(barrier.state == "waiting" for barrier in barriers)
        alike = all(barrier.dependents == barriers[0].dependents for barrier in barriers)
        if not waits or not alike or self.is_repair_pending(shuffles):
            return {}
        outputs = set.intersection(*(self._runs.unfinished(each, runs[0]) for each in shuffles))
        return common_owners(outputs, runs)

    def balance(self, shuffles: Collection[ShuffleId], to: Mapping[int, str], reason: str) -> None:
        """Give movable outputs to other owners. May be called within a transition.

        Workers receive the new owners before a barrier that still waits for transfers. If the barrier of the
        other side of a join has been sent or has ended, it reruns.
        """
        for each in shuffles:
            logger.info("Shuffle %s continues: %s", each, reason)
            self._log_event(each, "balances", reason, len(to))
            self._in_a_row.moves(each)
            self._move(each, to, (), {})
        for worker in set(to.values()):
            self._in_a_row.takes_part(worker, shuffles)
        self._metrics.add("shuffle.outputs.moved", len(to))
        barriers = map(barrier_key, shuffles)
        passed = [key for key in barriers if self._runs.is_task(key, "memory", "processing")]
        if passed:  # deferred, since this may be within a transition
            self._scheduler.loop.add_callback(self.rerun, passed, "memory", "processing")

    # ---- repair ----------------------------------------------------------------------

    def _record_loss(self, shuffles: Collection[ShuffleId], outputs: Collection[int], reason: str) -> Loss:
        return self._losses.add(shuffles, outputs, reason, time())

    def _repair_soon(self, loss: Loss) -> None:
        """Repair a loss as soon as no unaffected output is being assembled, or after ``MAX_REPAIR_DELAY_S``.

        When the barrier reruns, Dask cancels the tasks that are assembling outputs. Some may have finished by
        then and released their shards, so their outputs would be lost too, and repairing these would cancel
        further tasks.
        """
        shuffles = self._losses.shuffles(loss)
        with self._or_begin_again(shuffles, loss.reason):
            others = any(self._has_others(shuffle, loss) for shuffle in shuffles)
            if others and time() - loss.since < MAX_REPAIR_DELAY_S:
                self._scheduler.loop.call_later(REPAIR_POLL_INTERVAL_S, self._repair_soon, loss)
                return
            self._losses.forget(shuffles)
            if active := [shuffle for shuffle in shuffles if self._runs.is_active(shuffle)]:
                self._repair(active, loss)

    def _repair(self, shuffles: Collection[ShuffleId], loss: Loss) -> None:
        """Give the outputs of a loss to the workers that are left."""
        needed = set().union(*(self._runs.unfinished(shuffle, loss.outputs) for shuffle in shuffles))
        owned = set().union(*(self._runs.owned(each, worker) for each in shuffles for worker in loss.gone))
        workers = [worker for worker in self._runs.candidates(*shuffles) if worker not in loss.unreachable]
        what = loss if loss.is_loss else None
        self._reassign(shuffles, needed, workers, loss.reason, idle=owned - needed, loss=what)

    @contextmanager
    def _or_begin_again(self, shuffles: Collection[ShuffleId], reason: str) -> Iterator[None]:
        """Restart shuffles if the body, which repairs them, raises.

        The repair may have been deferred, or be a part of Dask's removal of a worker: then its exception
        reaches no caller, and outputs that are still bound to a lost worker would never be assembled.
        """
        try:
            yield
        except Exception as error:
            logger.exception("Shuffles %s cannot be repaired", ", ".join(map(str, shuffles)))
            self._losses.forget(shuffles)
            for shuffle in shuffles:
                if self._runs.is_active(shuffle):
                    self._begin_again(shuffle, f"{reason}; its repair has failed: {error!r}")

    def _has_others(self, shuffle: ShuffleId, loss: Loss) -> bool:
        """Return whether outputs that a loss does not affect are being assembled."""
        if not self._runs.is_task(barrier_key(shuffle), "memory"):
            return False
        outputs = self._results.outputs(shuffle)
        return any(
            partition not in loss.outputs and self._runs.is_task(key, "processing")
            for key, partition in outputs.items()
        )

    def _reassign(
        self,
        shuffles: Collection[ShuffleId],
        lost: Collection[int],
        workers: list[str],
        reason: str,
        *,
        idle: Collection[int] = (),
        loss: Loss | None = None,
    ) -> None:
        """Give outputs to workers, and rerun the barriers of their shuffles.

        ``shuffles``: the shuffles that share the outputs: tasks of a join read both sides on one worker.
        ``lost``, ``idle``: the outputs to give away: those that are needed now, and those that may be needed
        again.
        ``loss``: the loss to repair; None if outputs move for another reason.
        """
        exhausted = [
            shuffle for shuffle in shuffles if loss is not None and self._is_exhausted(shuffle, loss)
        ]
        if impossible := self._impossible(workers, exhausted):
            for shuffle in exhausted:
                self._in_a_row.forget(shuffle)
            for shuffle in shuffles:
                self._begin_again(shuffle, f"{reason}; {impossible}")
            return
        if loss is not None:
            self._count(shuffles, loss)
        to = deal(lost, workers, self._runs.load(next(iter(shuffles)), lost))
        kept = deal(idle, workers, {})
        for shuffle in shuffles:
            logger.warning("Shuffle %s continues: %s", shuffle, reason)
            self._metrics.add("shuffle.runs.recovered", int(loss is not None))
            self._log_event(shuffle, "goes-on" if loss is None else "recovers", reason, len(lost))
            self._move(shuffle, to, () if loss is None else loss.gone, kept)
            logger.debug(
                "Shuffle %s: new owners %s, if needed again %s; of workers %s", shuffle, to, kept, workers
            )
        for worker in {*to.values(), *kept.values()}:
            self._in_a_row.takes_part(worker, shuffles)
        barriers = map(barrier_key, shuffles)
        self.rerun(barriers, "memory", "processing", "queued", "no-worker")

    def _log_event(self, shuffle: ShuffleId, action: str, reason: str, outputs: int) -> None:
        """Log an event with an action, its reason, and the number of outputs that change owners."""
        event = {"action": action, "shuffle": str(shuffle), "reason": reason, "outputs": outputs}
        self._scheduler.log_event(SHUFFLE_TOPIC, event)

    def rerun(self, keys: Iterable[Key], *states: str) -> None:
        """Release those tasks that are in one of the states, by default in memory, so that they rerun."""
        stimulus = f"gpurt-recovery-{time()}"
        released = [key for key in keys if self._runs.is_task(key, *(states or ("memory",)))]
        self._scheduler.transitions(dict.fromkeys(released, "released"), stimulus_id=stimulus)
        self._scheduler.stimulus_queue_slots_maybe_opened(stimulus_id=stimulus)

    def _impossible(self, workers: list[str], exhausted: Collection[ShuffleId]) -> str | None:
        """Return why runs cannot be repaired; None if they can.

        ``exhausted``: the shuffles without repairs left.
        """
        if not workers:
            return "no worker is left for its outputs"
        return f"it was repaired {self._retries} times in a row" if exhausted else None

    def _is_exhausted(self, shuffle: ShuffleId, loss: Loss) -> bool:
        """Return whether a shuffle has no repairs left, and this loss has not been counted yet."""
        if self._in_a_row[shuffle] < self._retries:
            return False
        return self._in_a_row.is_new(shuffle, loss.culprits, loss.missing)

    def _count(self, shuffles: Iterable[ShuffleId], loss: Loss) -> None:
        """Count a repair; the count resets once all outputs that are unfinished now have been in memory."""
        for shuffle in shuffles:
            outputs = [task.key for task in self._runs.barrier(shuffle).dependents if is_unfinished(task)]
            self._in_a_row.loses(shuffle, outputs, loss.culprits, loss.missing)

    def _move(
        self, shuffle: ShuffleId, to: Mapping[int, str], gone: Collection[str], idle: Mapping[int, str]
    ) -> None:
        run = self._extension.active_shuffles[shuffle]
        self._runs.owners(shuffle).move(to, gone, idle)
        self._results.unread(shuffle, to)
        run.participating_workers.update(to.values())
        moved = {**to, **idle}
        for task, partition in outputs_of(self._runs.barrier(shuffle)):
            if partition is None or partition in moved:
                restrict_again(self._extension, task, None if partition is None else moved[partition])
        self._send_owners(shuffle, run.participating_workers)

    def _send_owners(self, shuffle: ShuffleId, workers: Collection[str]) -> None:
        """Send workers the current owners of a run."""
        run = self._extension.active_shuffles[shuffle]
        owners = ToPickle(self._runs.owners(shuffle).snapshot())
        message = {"op": NEW_OWNERS_OP, "id": shuffle, "run_id": run.run_id, "owners": owners}
        # Dask closes a worker that receives an unknown operation, as this is without the runtime.
        here = self._scheduler.stream_comms.keys() & set(workers) & self._workers.ready
        self._scheduler.send_all({}, {worker: [message] for worker in here})
