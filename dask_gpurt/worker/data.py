"""Replace a worker's ``data`` with the tiered buffer, and keep moves between tiers off the event loop.

Three of the worker's coroutines are wrapped on the instance. The wrappers make inputs live and free memory
for results on threads of the tiers, then call Dask's own coroutine.

Decisions and their figures: ``docs/decisions/memory.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from dask.typing import Key
from distributed.comm.core import Comm
from distributed.metrics import time
from distributed.spill import SpillBuffer
from distributed.worker_state_machine import (
    ExecuteFailureEvent,
    ExecuteSuccessEvent,
    FreeKeysEvent,
    GatherDepSuccessEvent,
    RescheduleEvent,
    StateMachineEvent,
)

from dask_gpurt.config import MemorySettings
from dask_gpurt.dask_hooks import PatchSet
from dask_gpurt.dask_hooks.types import WorkerServer, WorkerTask
from dask_gpurt.dask_hooks.worker import replace_data, wrap_data_access
from dask_gpurt.device.base import direct_comms
from dask_gpurt.memory.disk import CorruptFile
from dask_gpurt.memory.entries import Entry
from dask_gpurt.memory.peer_copies import PeerCopies
from dask_gpurt.memory.store import serving
from dask_gpurt.observe import Fallback, Metrics
from dask_gpurt.protocol import LOST_KEYS_OP
from dask_gpurt.worker import Layer
from dask_gpurt.worker.dependents_first import DependentsFirst
from dask_gpurt.worker.tasks import TaskRunner
from dask_gpurt.worker.tiers import WorkerTiers

#: Dask's default families of serializers.
_ALWAYS = ("dask", "pickle")

#: Results on a device up to this size go to the client through host memory, which takes a few milliseconds.
RESULT_BYTES = 16 << 20


class WorkerData:
    """Install the tiered buffer as a worker's data, and restore the original mapping.

    ``worker``: the Dask worker. It may be running tasks and hold data already.
    ``is_aside``: returns whether a task has left its slot for a read, which is not a ``secede`` by its own
    code.
    ``peer_copies``: copies what peers fetch from the device; not closed here.
    """

    def __init__(
        self,
        worker: WorkerServer,
        tiers: WorkerTiers,
        settings: MemorySettings,
        metrics: Metrics,
        is_aside: Callable[[Key], bool],
        peer_copies: PeerCopies,
    ):
        self.worker = worker
        self.tiers = tiers
        self.metrics = metrics
        self._tiered_buffer = tiers.tiered_buffer
        self._runner = TaskRunner(worker, tiers, settings, metrics, worker.execute, is_aside)
        self._dependents_first = DependentsFirst(worker, self._tiered_buffer, metrics)
        self._peer_copies = peer_copies
        self._patches = PatchSet(Layer.DATA)

    def install(self) -> None:
        """Take over the worker's data. Runs on the event loop without yielding, so it appears atomic."""
        worker = self.worker
        self._gather_dep, self._get_data = worker.gather_dep, worker.handlers["get_data"]
        wrap_data_access(
            self._patches,
            worker,
            execute=lambda original: self.execute,
            gather_dep=lambda original: self.gather_dep,
            get_data=lambda original: self.get_data,
        )
        self._before = worker.data
        live = _live_part(self._before)
        for key in list(self._before):
            if key in live:
                self._tiered_buffer[key] = live[key]
                del self._before[key]
            else:
                task = worker.state.tasks.get(key)
                nbytes = (task and task.nbytes) or 0
                let_go = partial(_forget, self._before, key)
                self._tiered_buffer.adopt_external(key, nbytes, partial(self._before.pop, key), let_go)
        replace_data(worker, self._tiered_buffer)

    async def uninstall(self) -> None:
        """Restore the worker's original mapping, with every key that can be read."""
        self._patches.restore()
        # Reading yields to the event loop, where keys may be added or released meanwhile.
        while missing := [key for key in self._tiered_buffer if key not in self._before]:
            for key in missing:
                await self._give_back(key)
        for key in [key for key in self._before if key not in self._tiered_buffer]:
            del self._before[key]  # released meanwhile
        replace_data(self.worker, self._before)

    async def _give_back(self, key: Key) -> None:
        """Copy a key into the worker's original mapping; if it cannot be read, report it lost."""
        try:
            self._before.update(await self._copies([key]))
        except Exception as error:
            self._lose([key], error)

    # ---- unreadable keys ---------------------------------------------------------------

    async def _copies(self, keys: list[Key]) -> dict[Key, Any]:
        """Return copies of the values of keys; report those lost whose spill file is corrupt."""
        return await self._read(keys, self._tiered_buffer.copies)

    async def _read(self, keys: list[Key], how: Callable[[list[Key]], dict[Key, Any]]) -> dict[Key, Any]:
        found: dict[Key, Any] = {}
        for key in keys:
            try:
                found |= await self._runner.with_retries(partial(self.tiers.offload, how, [key]))
            except CorruptFile as error:
                self._lose([key], error)
        return found

    def _lose(self, keys: list[Key], error: Exception) -> None:
        """Drop unreadable keys, and have the scheduler recompute them."""
        self.metrics.fallback(Fallback.MEMORY_SPILL_UNREADABLE, str(error))
        for key in keys:
            self._tiered_buffer.discard(key)
        # Sent before Dask's own message, which does not handle keys that cannot be recomputed.
        self.worker.batched_stream.send({"op": LOST_KEYS_OP, "keys": keys})
        self.worker.handle_stimulus(FreeKeysEvent(keys=keys, stimulus_id=f"gpurt-lost-{time()}"))

    # ---- replacements of the worker's coroutines ---------------------------------------
    #
    # execute and gather_dep must return an event whatever fails. Without one the task would keep its slot
    # forever, or the peer of the fetch would never be used again. (Dask's own coroutines close the worker
    # on an unexpected exception.)

    async def execute(self, key: Key, *, stimulus_id: str) -> StateMachineEvent:
        """Run a task once its memory is reserved and its inputs are live."""
        task = self.worker.state.tasks[key]
        try:
            event = await self._run(key, task, stimulus_id)
        except Exception as error:
            if self.tiers.closed:  # switched off while the task waited: Dask has its own mapping back
                return await self._runner.execute(key, stimulus_id=stimulus_id)
            # Fail the task, as Dask does if it cannot read its own spill files.
            return ExecuteFailureEvent.from_exception(
                error, key=key, run_id=task.run_id, stimulus_id=f"gpurt-unspill-{stimulus_id}"
            )
        if isinstance(event, ExecuteSuccessEvent):
            nbytes = sum(dependency.nbytes or 0 for dependency in task.dependencies)
            self._dependents_first.finished(key, event.nbytes, nbytes)
        return event

    async def _run(self, key: Key, task: WorkerTask, stimulus_id: str) -> StateMachineEvent:
        try:
            return await self._runner.run(key, stimulus_id)
        except CorruptFile as error:
            inputs = [dependency.key for dependency in task.dependencies]
            looking = partial(self.tiers.offload, self._tiered_buffer.unreadable, inputs)
            self._lose(await self._runner.with_retries(looking), error)
            return RescheduleEvent(key=key, stimulus_id=f"gpurt-lost-{stimulus_id}")

    async def gather_dep(
        self, worker: str, to_gather: Collection[Key], total_nbytes: int, *, stimulus_id: str
    ) -> StateMachineEvent:
        """Fetch from a peer once memory is reserved, and keep the reservation for the received values."""
        gather = partial(self._gather_dep, worker, to_gather, total_nbytes, stimulus_id=stimulus_id)
        event = None
        try:
            async with self._runner.receiving(total_nbytes) as reserved:
                event = await gather()
                if isinstance(event, GatherDepSuccessEvent):
                    await self._runner.make_room(event.data, reserved)
        except Exception as error:
            self.metrics.fallback(Fallback.MEMORY_FETCH_WITHOUT_ROOM, repr(error))
        return await gather() if event is None else event

    def __repr__(self) -> str:
        return f"<WorkerData, {self._runner.admission!r}, {self._dependents_first!r}>"

    async def get_data(
        self,
        comm: Comm,
        keys: Iterable[Key],
        who: str | None = None,
        serializers: Collection[str] | None = None,
    ) -> Any:
        """Serve a peer. Spilled values are sent from their tier without making them live.

        UCX would map the pool of this worker's GPU in the process that fetches. So small results go to the
        client (which does not say who it is) through host memory, and what workers fetch is copied first.
        """
        if who is not None and self._runner.admission.short:
            return {"status": "busy"}
        keys = list(keys)
        held, lower = self._tiered_buffer.hold_where_live(keys)
        with ExitStack() as sending:
            sending.enter_context(self._runner.admission.sending())
            sending.callback(self._tiered_buffer.release, held.values())
            sending.callback(serving.set, None)
            found: dict[Key, Any] = {}
            if _takes_frames(comm, serializers):
                if lower:
                    found = await self._read(lower, partial(self._tiered_buffer.messages, stack=sending))
                if who is None and not self.tiers.closed:
                    found |= await self._small_results(held)
            if who is not None and self._sends_from_device(comm, serializers):
                objects = self._tiered_buffer.device_objects(held.values())
                found |= await self._peer_copies.messages(objects, sending)
            serving.set(found | await self._copies([key for key in lower if key not in found]))
            return await self._get_data(comm, keys=keys, who=who, serializers=serializers)

    async def _small_results(self, held: Mapping[Key, Entry]) -> dict[Key, Any]:
        """Return Dask's messages of small held objects on a GPU, from copies in host memory."""
        small = self._tiered_buffer.device_objects(held.values(), RESULT_BYTES)
        if not small:
            return {}
        found: dict[Key, Any] = await self.tiers.offload(self._tiered_buffer.device_messages, small)
        return found

    def _sends_from_device(self, comm: Comm, serializers: Collection[str] | None) -> bool:
        """Return whether Dask would send objects to a peer from the device's memory."""
        protocol = comm.peer_address.partition("://")[0]
        direct = direct_comms(self.tiers.device, protocol)
        return direct is not None and (not serializers or direct.serializer in serializers)


def _takes_frames(comm: Comm, serializers: Collection[str] | None) -> bool:
    """Return whether spilled frames can be sent as they are to a peer."""
    # A peer in this process would receive the tier's own memory. Other peers get a copy of the bytes, and
    # must accept both families of serializers.
    return not comm.peer_address.startswith("inproc") and {"dask", "pickle"} <= set(serializers or _ALWAYS)


def _forget(mapping: MutableMapping[Key, object], key: Key) -> None:
    if key in mapping:
        del mapping[key]


def _live_part(data: Any) -> Mapping[Key, object]:
    """Return the part of a mapping of Dask or dask-cuda whose values are in memory."""
    if isinstance(data, SpillBuffer):
        return data.fast
    if hasattr(data, "device_buffer"):
        return {**data.others, **data.device}
    live: Mapping[Key, object] = data
    return live
