"""The runtime on the scheduler.

Dask's p2p extension on the scheduler creates runs, chooses owners and restarts. Three of
its methods are replaced on that one instance; each replacement ends in the original.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from dask.typing import Key
from distributed import SchedulerPlugin
from distributed.core import clean_exception
from distributed.metrics import time
from distributed.protocol.pickle import dumps
from distributed.protocol.serialize import Serialize, Serialized, deserialize
from distributed.shuffle._core import barrier_key, id_from_key
from distributed.shuffle._exceptions import P2PConsistencyError
from distributed.shuffle._shuffle import DataFrameShuffleSpec

from dask_gpurt import config
from dask_gpurt._version import __version__
from dask_gpurt.memory.ledger import Picture
from dask_gpurt.observe import Metrics
from dask_gpurt.plugins.memory_reports import METRIC, OP
from dask_gpurt.plugins.placement import SchedulerPlacement
from dask_gpurt.plugins.sharing import HANDLER, CommonKnowledge
from dask_gpurt.plugins.topology import SchedulerTopology
from dask_gpurt.plugins.worker import NAME, GpurtWorkerPlugin
from dask_gpurt.plugins.worker_data import LOST
from dask_gpurt.shuffle.spec import ShuffleSpec, output_partition
from dask_gpurt.table import library

_HANDLERS = ("gpurt_report", "gpurt_gone", "gpurt_disable", "gpurt_memory", "gpurt_explain", HANDLER)
_REPLACED = ("_retrieve_spec", "_create", "_calculate_worker_for")


class GpurtSchedulerPlugin(SchedulerPlugin):
    """Switches the runtime on for a cluster: workers that are there, and that come.

    Parameters
    ----------
    settings
        The section ``gpurt`` of the process that switches on. What a scheduler or a worker
        has set itself comes first.
    """

    name = NAME
    idempotent = True

    def __init__(self, settings: Mapping[str, Any]):
        self.given = settings

    async def start(self, scheduler: Any) -> None:
        if NAME in scheduler.extensions:  # two workers preloaded us at once
            return
        settings = config.load_over(self.given)
        metrics = Metrics()
        places = SchedulerTopology(scheduler, settings.topology.file, metrics)
        scheduler.extensions[NAME] = self
        self.scheduler = scheduler
        self.settings = settings
        self.metrics = metrics
        self.picture = Picture()
        self.places = places
        self.places.install()
        self.learned = CommonKnowledge()
        self.placement: SchedulerPlacement | None = None
        self.place(settings.placement.enabled)
        self._replace(scheduler.extensions["shuffle"])
        scheduler.handlers["gpurt_report"] = self.report
        scheduler.handlers["gpurt_gone"] = self.gone
        scheduler.handlers["gpurt_disable"] = self.stop
        scheduler.handlers["gpurt_memory"] = self.memory
        scheduler.handlers["gpurt_explain"] = self.explain
        scheduler.handlers[HANDLER] = self.learned.learned
        scheduler.stream_handlers[OP] = self.memory_changed
        scheduler.stream_handlers[LOST] = self.lost
        replies = await scheduler.register_worker_plugin(
            None, dumps(GpurtWorkerPlugin(self.given)), NAME, idempotent=False
        )
        failed = [reply for reply in replies.values() if reply["status"] == "error"]
        if failed:
            await self.stop()
            raise _exception_of(failed[0])

    async def stop(self) -> None:
        """Handler: give Dask back as shipped, on the scheduler and on all workers."""
        scheduler = self.scheduler
        for name in _REPLACED:
            scheduler.extensions["shuffle"].__dict__.pop(name, None)
        scheduler.extensions.pop(NAME, None)
        self.place(False)
        for handler in _HANDLERS:
            scheduler.handlers.pop(handler, None)
        if NAME in scheduler.worker_plugins:
            await scheduler.unregister_worker_plugin(None, NAME)
        if NAME in scheduler.plugins:
            scheduler.remove_plugin(NAME)
        # Last: until they have switched off, workers send changes, and who sends what is unknown is closed.
        scheduler.stream_handlers.pop(OP, None)
        scheduler.stream_handlers.pop(LOST, None)
        self.places.uninstall()

    # ---- Dask's p2p extension ----------------------------------------------------------

    def _replace(self, extension: Any) -> None:
        retrieve_spec, create = extension._retrieve_spec, extension._create
        calculate_worker_for = extension._calculate_worker_for

        def _retrieve_spec(shuffle_id: Any) -> Any:
            spec = retrieve_spec(shuffle_id)
            if type(spec) is not DataFrameShuffleSpec or not self.settings.takeover:
                return spec
            if library(spec.meta) is None:
                reason = f"{type(spec.meta)} is no frame of pandas or cudf"
                self.metrics.fallback("shuffles stay with Dask", reason)
                return spec
            self.metrics.add("shuffle.taken-over")
            return ShuffleSpec.of(spec)

        def _create(shuffle_id: Any, key: Any, worker: str) -> Any:
            self._refuse_after_retries(extension, shuffle_id)
            run = create(shuffle_id, key, worker)
            if isinstance(run.spec, ShuffleSpec):
                self._send_outputs_to_owners(extension, shuffle_id, run.worker_for)
            return run

        def _calculate_worker_for(spec: Any) -> dict[Any, str]:
            chosen: dict[Any, str] = calculate_worker_for(spec)
            barrier = self.scheduler.tasks[barrier_key(spec.id)]
            if (
                self.placement is None
                or not isinstance(spec, ShuffleSpec)
                or _has_partner(barrier, extension.active_shuffles)
            ):
                return chosen
            return self.placement.owners(barrier, chosen)

        extension._retrieve_spec, extension._create = _retrieve_spec, _create
        extension._calculate_worker_for = _calculate_worker_for

    def _refuse_after_retries(self, extension: Any, shuffle_id: Any) -> None:
        runs = len(extension._shuffles.get(shuffle_id, ()))
        if runs > self.settings.shuffle.retries:
            raise P2PConsistencyError(
                f"shuffle {shuffle_id} is given up after {runs} runs: all lost a worker or disagreed, "
                f"the workers' logs say which. 'gpurt.shuffle.retries' is {self.settings.shuffle.retries}"
            )

    def _send_outputs_to_owners(self, extension: Any, shuffle_id: Any, worker_for: dict[int, str]) -> None:
        """Restrict output tasks before they start; Dask lets them start anywhere and moves them then."""
        for task in self.scheduler.tasks[barrier_key(shuffle_id)].dependents:
            partition = output_partition(task.run_spec)
            if partition in worker_for and task.state in ("released", "waiting"):
                extension._set_restriction(task, worker_for[partition])

    # ---- memory ------------------------------------------------------------------------

    def memory_changed(self, worker: str, **message: Any) -> None:
        """Handler: what has changed in the tiers of a worker."""
        if worker in self.scheduler.workers:
            self.picture.apply(worker, message)
            if self.placement is not None:
                self.placement.memory_changed(worker)

    def lost(self, worker: str, keys: list[Key]) -> None:
        """Handler: a worker has keys no more; as if it had died with them."""
        state = self.scheduler.workers.get(worker)
        recommendations = {}
        for task in map(self.scheduler.tasks.get, keys):
            if task is not None and state in (task.who_has or ()):
                self.scheduler.remove_replica(task, state)
                if not task.who_has:
                    recommendations[task.key] = "released" if task.run_spec else "forgotten"
        self.scheduler.transitions(recommendations, stimulus_id=f"gpurt-lost-{time()}")

    def remove_worker(self, scheduler: Any, worker: str, **_: Any) -> None:
        self.picture.forget(worker)
        self.places.remove(worker)
        self.learned.remove(worker)
        if self.placement is not None:
            self.placement.remove(worker)

    # ---- placement -----------------------------------------------------------------------

    def place(self, on: bool) -> None:
        """Choose the workers of tasks from now on, or have Dask choose."""
        if on and self.placement is None:
            topology = self.places.topology
            self.placement = SchedulerPlacement(self.scheduler, topology, self.picture, self.metrics)
            self.placement.install()
        elif not on and self.placement is not None:
            self.placement.uninstall()
            self.placement = None

    def update_graph(self, scheduler: Any, *, tasks: Iterable[Key], **_: Any) -> None:
        if self.placement is not None:
            self.placement.submitted(tasks)

    def transition(self, key: Key, start: str, finish: str, *_: Any, **told: Any) -> None:
        if self.placement is None or start != "processing":
            return
        if finish == "memory":
            self.placement.finished(key, told["worker"], told["startstops"])
        else:
            self.placement.stopped(key)

    def explain(self, key: Key) -> list[dict[str, Any]] | None:
        """Handler: the last decision about a key; None where Dask chooses."""
        return None if self.placement is None else self.placement.explain(key)

    def memory(self, by: str = "tier") -> list[dict[str, Any]]:
        """Handler: a row for each worker and tier, or also for each prefix."""
        for address, state in self.scheduler.workers.items():
            if (whole := state.metrics.get(METRIC)) is not None:
                self.picture.apply(address, whole)
        return self.picture.rows_by_prefix() if by == "prefix" else self.picture.rows()

    # ---- what workers and clients ask ------------------------------------------------

    def gone(self, peers: list[str]) -> list[str]:
        """Handler: which of these workers have left."""
        return [peer for peer in peers if peer not in self.scheduler.workers]

    async def report(self, connect: bool = False) -> dict[str, Any]:
        """Handler: the whole picture, for ``doctor`` and for people.

        Parameters
        ----------
        connect
            Whether the workers shall find out the paths to all their peers first.
        """
        replies = await self.scheduler.broadcast(
            msg={"op": "gpurt_report", "connect": connect}, on_error="return"
        )
        workers: dict[str, dict[str, Any]] = {
            worker: reply if isinstance(reply, dict) else {"error": str(reply)}
            for worker, reply in replies.items()
        }
        own = self.metrics.snapshot()
        counters: dict[str, float] = dict(own["counters"])
        for reply in workers.values():
            for name, value in reply.get("counters", {}).items():
                known = counters.get(name, 0)
                counters[name] = max(known, value) if name.endswith(".peak") else known + value
        return {
            "enabled": True,
            "version": __version__,
            "takeover": self.settings.takeover,
            "counters": counters,
            "fallbacks": own["fallbacks"],
            "workers": workers,
        }


def _has_partner(barrier: Any, active: Collection[Any]) -> bool:
    """Whether a shuffle with a barrier shares outputs with an active one, whose owners Dask has taken."""
    others = {other.key for output in barrier.dependents for other in output.dependencies} - {barrier.key}
    return any(id_from_key(key) in active for key in others)


def _exception_of(reply: Mapping[str, Any]) -> BaseException:
    """What a worker has raised; a scheduler does not unpack what passes through it."""
    packed = reply["exception"]
    if isinstance(packed, Serialize):  # of a worker in this process
        packed = packed.data
    elif isinstance(packed, Serialized):
        packed = deserialize(packed.header, packed.frames)
    _, error, _ = clean_exception(packed)
    return error or RuntimeError(reply["exception_text"])
