"""Inject faults and checks into the runtime of a test's workers.

Register :class:`Instruments` with a client, to wrap the runtime of each worker when it is switched on::

    client.register_plugin(Instruments(handovers=True))
    dask_gpurt.enable(client)

Importing this module adds to the instruments of the process's workers. Wrappers replace methods.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, TypeVar

from distributed import WorkerPlugin
from distributed.worker_state_machine import ExecuteFailureEvent

from benchmarks.common.faults import FailingCalls, allocations
from dask_gpurt.dask_hooks.types import WorkerServer
from dask_gpurt.device import Device, Pool
from dask_gpurt.device.base import Fence, no_fence
from dask_gpurt.device.copies import address
from dask_gpurt.frames import ChunkTable, Packed, Part, Piece, Table
from dask_gpurt.observe import Fallback
from dask_gpurt.worker.plugin import INSTRUMENTS, GpurtWorkerPlugin

AnyTable = TypeVar("AnyTable", Table, ChunkTable)

#: The first address, and the end, exclusive.
AddressRange = tuple[int, int]
#: Stands for the stream of user code, which all threads share.
COMPUTE = "compute"


# ---- on the workers of a cluster -------------------------------------------------------------


class Instruments(WorkerPlugin):
    """Wrap the runtime of each worker, now or when it is switched on later.

    ``failures``: make one in this many allocations, and one in this many tasks, fail at random; 0 for none.
    ``handovers``: whether to detect premature handovers of memory with :class:`HandoverChecker`. Violations
    are counted as the fallback ``overlap.handed-over-early``, which the doctor shows.
    """

    name = "gpurt-instruments"
    idempotent = True

    def __init__(self, failures: int = 0, *, handovers: bool = False):
        self.failures = failures
        self.handovers = handovers

    def setup(self, worker: WorkerServer) -> None:
        _INSTRUMENTS[worker.address] = self
        runtime = worker.plugins.get("gpurt")
        if runtime is not None and runtime.is_on:
            self.wrap(runtime)

    def teardown(self, worker: WorkerServer) -> None:
        _INSTRUMENTS.pop(worker.address, None)

    def wrap(self, runtime: Any) -> None:
        """Wrap the runtime of a worker, its :class:`~dask_gpurt.worker.plugin.GpurtWorkerPlugin`."""
        if self.handovers:
            too_early = partial(runtime.metrics.fallback, Fallback.OVERLAP_HANDED_OVER_EARLY)
            checker = HandoverChecker(too_early, partial(runtime.metrics.add, "overlap.handovers"))
            checker.watch_exchange(runtime.exchange)
            checker.watch_frees(runtime.tiers.pinned, list)
        if self.failures:
            faults = FailingCalls(allocations(runtime.exchange), self.failures)
            _fail_tables(runtime.exchange, faults)
            if runtime.data is not None:
                runner = runtime.data._runner
                runner.execute = _failing_tasks(runtime.worker, faults, runner.execute)


#: By the address of the worker, since a process may have several workers.
_INSTRUMENTS: dict[str, Instruments] = {}


def _instrument(runtime: GpurtWorkerPlugin) -> None:
    """Wrap a runtime that has been switched on, if its worker has :class:`Instruments`."""
    if (instruments := _INSTRUMENTS.get(runtime.worker.address)) is not None:
        instruments.wrap(runtime)


INSTRUMENTS.append(_instrument)


def _fail_tables(exchange: Any, faults: FailingCalls) -> None:
    """Make splitting and packing in an exchange fail too."""
    table = exchange.table

    def failing_table(frame: Any) -> Table:
        found: Table = table(frame)
        for name in ("split", "pack"):
            setattr(found, name, faults.failing(getattr(found, name)))
        return found

    faults.replace(exchange, "table", failing_table)


def _failing_tasks(worker: WorkerServer, faults: FailingCalls, execute: Callable[..., Any]) -> Any:
    """Make tasks of a worker fail with MemoryError at the same rate as allocations."""

    async def failing(key: Any, *, stimulus_id: str) -> Any:
        try:
            faults.draw()
        except MemoryError as error:
            return ExecuteFailureEvent.from_exception(
                error,
                key=key,
                run_id=worker.state.tasks[key].run_id,
                stimulus_id=f"gpurt-failure-{stimulus_id}",
            )
        return await execute(key, stimulus_id=stimulus_id)

    return failing


# ---- handover of memory ----------------------------------------------------------------------


@dataclass(frozen=True)
class _AsyncAccess:
    """Describe an asynchronous access: the memory it reads and writes, and the stream that orders it."""

    name: str
    stream: Hashable
    reads: list[AddressRange]
    writes: list[AddressRange]

    def conflicts_with(self, other: _AsyncAccess) -> bool:
        """Return whether the order of two accesses matters."""
        return (
            overlap(self.writes, other.writes)
            or overlap(self.writes, other.reads)
            or overlap(self.reads, other.writes)
        )


class HandoverChecker:
    """Detect buffers published, freed or reused while an asynchronous copy on them is pending. Thread-safe.

    Copies continue after the call that has started them. Before their memory is freed, published or reused,
    their fence has to be waited for, or the next access has to be on the same stream. Only explicit waits
    count, even if the device happens to be fast enough.

    ``report``: called with a description of each premature handover.
    ``count``: called for each check.
    """

    def __init__(self, report: Callable[[str], None], count: Callable[[], None] = no_fence):
        self._report = report
        self._count = count
        self._pending: dict[int, _AsyncAccess] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def begin(
        self,
        name: str,
        *,
        reads: Iterable[Any] = (),
        writes: Iterable[Any] = (),
        stream: Hashable | None = None,
    ) -> Fence:
        """Note the start of an access; return a function to call after waiting for it, which is idempotent.

        ``name``: a description for messages.
        ``reads``, ``writes``: buffers or arrays.
        ``stream``: the stream that orders it; by default this thread's communication stream.
        """
        begun = _AsyncAccess(name, stream or threading.get_ident(), spans(reads), spans(writes))
        with self._lock:
            number = next(self._numbers)
            others = [other for other in self._pending.values() if other.stream != begun.stream]
            self._pending[number] = begun
        self._check(begun, others, f"{name} begins")
        return partial(self._end, number, begun.stream)

    def hand_over(self, name: str, buffers: Iterable[Any], *, readable: bool = False) -> None:
        """Note that memory passes to another user.

        ``name``: a description for messages.
        ``readable``: whether it may still be read, so that only pending writes are premature.
        """
        found = spans(buffers)
        next_use = _AsyncAccess(name, None, found if readable else [], [] if readable else found)
        with self._lock:
            others = list(self._pending.values())
        self._check(next_use, others, name)

    def _check(self, mine: _AsyncAccess, others: Iterable[_AsyncAccess], how: str) -> None:
        self._count()
        for other in others:
            if mine.conflicts_with(other):
                self._report(f"{how} before {other.name} has been waited for, which accesses the same memory")

    def _end(self, number: int, stream: Hashable) -> None:
        """End all accesses on a stream up to a number, since they complete in order."""
        with self._lock:
            for each in [n for n, begun in self._pending.items() if n <= number and begun.stream == stream]:
                del self._pending[each]

    # ---- wrappers ----------------------------------------------------------------------

    def watch_exchange(self, exchange: Any) -> None:
        """Watch the devices, pools and tables of an exchange, and the shards it publishes and releases."""
        for device in exchange.pools.devices.values():
            self.watch_device(device)
        for kind in exchange.pools.devices:
            outbox = exchange.pools.known(kind)
            self.watch_frees(outbox.pool, lambda block: [block.buffer])
            self._watch_publishing(outbox)
        table, chunk_table = exchange.table, exchange.chunk_table
        exchange.table = lambda frame: watch_table(table(frame), self)
        exchange.chunk_table = lambda library: watch_table(chunk_table(library), self)
        _call_before(exchange, "_release_soon", self._on_release)

    def _on_release(self, path: Any, shard: Any) -> None:
        if path.mapping is not None:
            blocks = [path.mapping.view(each.offset, each.nbytes) for each in shard.sections]
            self.hand_over("a shard is released", blocks)

    def _watch_publishing(self, outbox: Any) -> None:
        publish = outbox.publish

        def watched(run: Any, share: int, owner: str, blocks: Iterable[Any]) -> Any:
            shown = tuple(blocks)
            self.hand_over("a shard is published", [block.buffer for block in shown], readable=True)
            return publish(run, share, owner, shown)

        outbox.publish = watched

    def watch_device(self, device: Device) -> None:
        """Watch the copies of a device, and the blocks of pools that it creates from now on."""
        create_pool = device.create_pool

        def watched_pool(nbytes: int) -> Pool:
            pool = create_pool(nbytes)
            self.watch_frees(pool, lambda block: [block.buffer])
            return pool

        watched = {
            "create_pool": watched_pool,
            "scatter": self._watched_scatter(device.scatter),
            "gather": self._watched_gather(device.gather),
            "gather_all": self._watched_gather(device.gather_all),
            "land": self._watched_land(device.land),
        }
        for name, method in watched.items():
            setattr(device, name, method)

    def watch_frees(self, pool: Any, buffers: Callable[[Any], Iterable[Any]]) -> None:
        """Watch calls of a pool's ``free``; ``buffers`` returns the memory of its argument."""
        _call_before(pool, "free", lambda given: self.hand_over("memory is freed", buffers(given)))

    def _watched_scatter(self, scatter: Callable[..., Fence]) -> Callable[..., Fence]:
        @wraps(scatter)
        def watched(sources: Sequence[Any], into: Sequence[list[Any]], **options: Any) -> Fence:
            pieces = itertools.chain.from_iterable(into)
            with _ending(self.begin("a copy to host memory", reads=sources, writes=pieces)) as end:
                return _before(end, scatter(sources, into, **options))

        return watched

    def _watched_gather(self, gather: Callable[..., tuple[Any, Fence]]) -> Callable[..., tuple[Any, Fence]]:
        @wraps(gather)
        def watched(pieces: Sequence[Any]) -> tuple[Any, Fence]:
            each = (piece if isinstance(piece, list) else [piece] for piece in pieces)
            sources = itertools.chain.from_iterable(each)
            with _ending(self.begin("a copy from host memory", reads=sources)) as end:
                buffer, fence = gather(pieces)
                return buffer, _before(end, fence)

        return watched

    def _watched_land(self, land: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        @wraps(land)
        def watched(sources: Sequence[Any]) -> list[Any]:
            with _ending(self.begin("a pull", reads=sources)) as end:
                found = land(sources)
                end()  # a pull is synchronous
                return found

        return watched


def _call_before(owner: Any, name: str, note: Callable[..., None]) -> None:
    """Call a function with the arguments of each call of a method, before it."""
    method = getattr(owner, name)

    @wraps(method)
    def watched(*args: Any) -> Any:
        note(*args)
        return method(*args)

    setattr(owner, name, watched)


def watch_table(table: AnyTable, checker: HandoverChecker) -> AnyTable:
    """Watch the blocks that a table packs until it settles, and the buffers that it reads until its fence."""
    pack, settle, assemble, fence = table.pack, table.settle, table.assemble, table.fence
    stream = None if table.device.on_host else COMPUTE
    packing: list[Fence] = []
    reading: list[Fence] = []

    def watched_pack(piece: Piece, room: Any) -> Packed:
        packed = pack(piece, room)
        packing.append(checker.begin("packing", writes=[packed.block.buffer]))
        return packed

    def watched_settle() -> None:
        settle()
        _end_all(packing)

    def watched_assemble(parts: Sequence[Part], *args: Any, **options: Any) -> Any:
        buffers = {id(part.buffer): part.buffer for part in parts}
        with _ending(checker.begin("assembling an output", reads=buffers.values(), stream=stream)) as end:
            output = assemble(parts, *args, **options)
        reading.append(end)
        return output

    def watched_fence() -> Callable[[], None] | None:
        read, found = list(reading), fence()
        reading.clear()
        waited = _before(partial(_end_all, read), found)
        return waited if found is not None else None

    for method in (watched_pack, watched_settle, watched_assemble, watched_fence):
        setattr(table, method.__name__.removeprefix("watched_"), method)
    return table


@contextmanager
def _ending(end: Fence) -> Iterator[Fence]:
    """Note the end of an access if the body fails to start it."""
    try:
        yield end
    except BaseException:
        end()
        raise


def _before(end: Fence, fence: Fence | None) -> Fence:
    """Return a fence that also notes the end of its access; note it immediately if there is no fence."""
    if fence is None or fence is no_fence:
        end()
        return no_fence

    def wait() -> None:
        fence()
        end()

    return wait


def _end_all(ends: list[Fence]) -> None:
    for end in ends:
        end()
    ends.clear()


def spans(buffers: Iterable[Any]) -> list[AddressRange]:
    """Return the sorted address ranges of non-empty buffers."""
    return sorted((at := address(each), at + each.nbytes) for each in buffers if each.nbytes)


def overlap(some: Sequence[AddressRange], others: Sequence[AddressRange]) -> bool:
    """Return whether two sorted sequences of address ranges overlap."""
    mine, theirs = iter(some), iter(others)
    one, other = next(mine, None), next(theirs, None)
    while one and other:
        if one[0] < other[1] and other[0] < one[1]:
            return True
        if one[1] <= other[1]:
            one = next(mine, None)
        else:
            other = next(theirs, None)
    return False
