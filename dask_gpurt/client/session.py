"""Keep what the runtime knows of the clients of this process, and call their schedulers for them."""

from __future__ import annotations

import atexit
import functools
import logging
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import dask
from dask.typing import Key
from distributed import Client, default_client

from dask_gpurt import config, dask_hooks
from dask_gpurt._version import __version__
from dask_gpurt.dask_hooks.types import SchedulerServer
from dask_gpurt.memory.ledger import KINDS
from dask_gpurt.observe import Fallback, MethodChoice, Metrics
from dask_gpurt.observe.methods import METHOD_TOPIC, Choices
from dask_gpurt.observe.metrics import combine
from dask_gpurt.observe.report import RuntimeReport
from dask_gpurt.observe.tables import Explanation, MemoryUsage
from dask_gpurt.protocol import NAME

if TYPE_CHECKING:
    from dask_gpurt.client.planning import PlanningCache
    from dask_gpurt.client.planning.rules.partition_size import PartitionSizes
    from dask_gpurt.client.planning.store import Store

# Modules that import private parts of Dask are imported only after these have been found to exist.

logger = logging.getLogger(__name__)

_enabled: WeakSet[Client] = WeakSet()
#: The planning settings of clients for which any planning feature is on.
_planning: WeakKeyDictionary[Client, config.PlanningSettings] = WeakKeyDictionary()
#: The counters of planning in this client process, which no worker reports.
_metrics = Metrics()
_lock = threading.Lock()
#: The choices of shuffle methods that have been sent to the scheduler, by client.
_reported_choices: WeakKeyDictionary[Client, set[tuple[str, MethodChoice]]] = WeakKeyDictionary()
#: The partitions of a table's files that have room in GPU memory at least, where a client knows its limit.
PARTITIONS_IN_DEVICE = 16
#: The most choices remembered for a client; beyond that all are forgotten, and may be counted again.
MOST_CHOICES = 10_000


def given_client(client: Client | None) -> Client:
    """Return the given client, or the current one.

    Raises
    ------
    TypeError
        If the argument is not a client.
    """
    if client is None:
        current: Client = default_client()
        return current
    if not isinstance(client, Client):
        raise TypeError(
            f"expected a distributed.Client, not {client!r}: connect one with "
            "Client('tcp://HOST:PORT'), or leave it out for the current one"
        )
    return client


def open_client(client: Client | None) -> Client:
    """Return the given client, or the current one, as :func:`given_client` does.

    Raises
    ------
    RuntimeError
        If the client is closed.
    """
    client = given_client(client)
    if client.status == "closed":
        raise RuntimeError("this client is closed: connect another one with Client('tcp://HOST:PORT')")
    return client


def is_enabled(client: Client | None = None) -> bool:
    """Return whether shuffles of this client go through the runtime."""
    try:
        return given_client(client) in _enabled
    except ValueError:
        return False


#: The columns of the result of :func:`memory_usage`, by its argument ``by``.
MEMORY_COLUMNS = {
    "tier": ("worker", "tier", "capacity", "headroom", *KINDS),
    "prefix": ("worker", "tier", "kind", "prefix", "bytes"),
}


async def activate(client: Client) -> None:
    """Switch the runtime on for a client and its cluster; preload hooks await this."""
    dask_hooks.require(expressions=True)
    from dask_gpurt.client.lowering import choose
    from dask_gpurt.monitor import dashboard
    from dask_gpurt.scheduler.plugin import GpurtSchedulerPlugin

    register_method()
    plugin = GpurtSchedulerPlugin(dict(dask.config.get("gpurt", {})), dashboard.observe)
    try:
        await client.register_plugin(plugin, NAME)
    except ImportError as error:
        raise RuntimeError(
            f"the scheduler at {_address(client)} cannot load dask_gpurt ({error}): install "
            f"dask-gpurt {__version__} there and on all workers, with a Dask from {dask_hooks.OLDEST} to "
            f"{dask_hooks.NEWEST}"
        ) from error
    with _lock:
        _reported_choices.pop(client, None)  # the cluster starts new counters
        _enabled.add(client)
        choose(_is_usable)
        planning = config.load().planning
        if planning.cache or planning.fuse or (planning.partition_size, planning.broadcast_size) != (0, 0):
            _planning[client] = planning
            _planning_cache().install()
            _planning_cache().clear()  # count choices of methods anew too
    if not await _stays_on(client):
        leave_cluster(client)
        raise RuntimeError("the runtime was switched off by another client during this call")


def register_method() -> None:
    """Make Dask know the shuffle method "gpurt", which without the runtime means Dask's default method."""
    from dask_gpurt.client.lowering import register_shuffle_method

    register_shuffle_method(_is_usable, _choices)


def _is_usable() -> bool:
    """Return whether the computation that is being planned goes through the runtime."""
    try:
        return is_enabled(_planning_for())
    except ValueError:
        return False


def _report_choice(expression: str, choice: MethodChoice) -> None:
    """Send a choice of the shuffle method to the scheduler, which counts it. Does not block.

    Each expression counts once, although a join is lowered each time its divisions are accessed.
    """
    client = _planning_for()
    reported = _reported_choices.setdefault(client, set())
    if (expression, choice) in reported:
        return
    if len(reported) >= MOST_CHOICES:
        reported.clear()
    reported.add((expression, choice))

    async def tell() -> None:
        try:
            await _scheduler(client).log_event(topic=METHOD_TOPIC, msg=choice.name)
        except (OSError, RuntimeError) as error:  # the client is being closed
            logger.debug("the choice %s is not counted: %r", choice, error)

    # Expressions are lowered in any thread, including that of the event loop.
    client.loop.add_callback(tell)


_choices = Choices(_report_choice)


def leave_cluster(client: Client) -> None:
    with _lock:
        # The whole cluster is switched off, which affects its other clients too.
        for other in list(_enabled):
            of_the_cluster = other is client or _address(other) == _address(client) is not None
            if of_the_cluster or other.status == "closed":
                _enabled.discard(other)
                _planning.pop(other, None)
        if not _planning and "dask_gpurt.client.planning" in sys.modules:
            _planning_cache().remove()
        if not _enabled and (method := sys.modules.get("dask_gpurt.client.lowering")):
            method.leave()


@functools.cache
def _planning_cache() -> PlanningCache:
    from dask_gpurt.client.planning import PlanningCache

    return PlanningCache(_planning_client, _metrics, _fuses, _planning_store, _choices, _partition_sizes)


def _planning_client() -> str | None:
    """Return the id of the current client if its plans are cached."""
    client, settings = _current_planning()
    return str(client.id) if client and settings and settings.cache else None


def _fuses() -> bool:
    """Return whether the computations of the current client are fused."""
    _, settings = _current_planning()
    return settings is not None and settings.fuse


def _partition_sizes() -> PartitionSizes | None:
    """Return what the number of partitions of reads depends on; None to leave it to Dask."""
    from dask_gpurt.client.planning.rules.partition_size import PartitionSizes
    from dask_gpurt.dask_hooks.computing import cluster_size

    client, settings = _current_planning()
    if client is None or settings is None:
        return None
    sizes, local_groups = config.partition_sizes(), config.groups_locally()
    if sizes == (0, 0) and not local_groups:
        return None
    device = config.load().memory.device
    largest = (
        device.bytes // PARTITIONS_IN_DEVICE if device is not None and device.bytes is not None else None
    )
    return PartitionSizes(*cluster_size(client), *sizes, largest, local_groups)


def _planning_store() -> Store | None:
    """Return the store for what the current client plans; None if other processes are not to find it."""
    _, settings = _current_planning()
    return _store_of(settings.store) if settings is not None and settings.store is not None else None


@functools.cache
def _store_of(setting: str) -> Store | None:
    from dask_gpurt.client.planning.store import Store, default_path

    try:
        path = default_path() if setting == "auto" else Path(setting)
    except RuntimeError as error:  # the user has no home directory, as often in a container
        _metrics.fallback(Fallback.PLANNING_NOT_STORED, str(error))
        return None
    store = Store(path, _metrics)
    atexit.register(store.save)  # not earlier: it would take the time of a query, or of the event loop
    return store


def _current_planning() -> tuple[Client | None, config.PlanningSettings | None]:
    try:
        client = _planning_for()
    except ValueError:
        return None, None
    return client, _planning.get(client)


def _planning_for() -> Any:
    """Return the client of the computation that is being planned; raise ValueError if there is none."""
    from dask_gpurt.dask_hooks.computing import chosen_client

    return chosen_client() or given_client(None)


async def deactivate(client: Client) -> Client:
    # Not a handler: another client may switch off meanwhile, and then it would answer that it is off.
    async def stop(dask_scheduler: SchedulerServer) -> None:
        if (runtime := dask_scheduler.extensions.get("gpurt")) is not None:
            await runtime.stop()

    if client.status != "closed" and await _is_on(client):
        try:
            await client.run_on_scheduler(stop)
        finally:
            leave_cluster(client)  # again, for clients that have enabled it in the meantime
    return client


async def ask_report(client: Client, connect: bool) -> RuntimeReport:
    if not await _is_on(client):
        return RuntimeReport()
    reply = await _scheduler(client).gpurt_report(connect=connect)
    here = _metrics.snapshot()
    counters = combine([reply["counters"], here["counters"]])
    return RuntimeReport.of(
        {**reply, "counters": counters, "fallbacks": {**here["fallbacks"], **reply["fallbacks"]}}
    )


async def ask_explanation(client: Client, key: Key) -> Explanation:
    rows = await _scheduler(client).gpurt_explain(key=key) if await _is_on(client) else None
    if rows is None:
        raise RuntimeError(
            "placement is not enabled on this cluster, so there is no decision to explain: set "
            "'gpurt.placement.enabled' to true before switching the runtime on"
        )
    from dask_gpurt.placement import TERMS

    return Explanation(tuple(rows), ("worker", "chosen", "seconds", "missing", *TERMS, "fits"), key=key)


async def ask_memory(client: Client, by: str) -> MemoryUsage:
    if not await _is_on(client):
        return MemoryUsage((), MEMORY_COLUMNS[by], enabled=False)
    rows = await _scheduler(client).gpurt_memory(by=by)
    return MemoryUsage(tuple(rows), MEMORY_COLUMNS[by], await _scheduler(client).gpurt_shared_memory())


def _scheduler(client: Client) -> Any:
    return client.scheduler  # untyped, since the handlers are not Dask's


def _address(client: Client) -> str | None:
    return getattr(client.scheduler, "address", None)  # None once it is closed


async def _stays_on(client: Client) -> bool:
    """Wait for pending switching, and return whether the runtime is on."""

    async def settled(dask_scheduler: SchedulerServer) -> bool:
        runtime = dask_scheduler.extensions.get("gpurt")
        return runtime is not None and await runtime.switch.settled()

    return bool(await client.run_on_scheduler(settled))


async def _is_on(client: Client) -> bool:
    # A lambda is pickled by value, so this works on a scheduler without the package.
    return bool(await client.run_on_scheduler(lambda dask_scheduler: "gpurt" in dask_scheduler.extensions))
