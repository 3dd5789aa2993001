"""Switch the runtime on and off from a client, and read its reports."""

from __future__ import annotations

import atexit
import contextlib
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
from dask_gpurt.addresses import require_scheduler
from dask_gpurt.dask_hooks.types import SchedulerServer
from dask_gpurt.memory.ledger import KINDS
from dask_gpurt.observe import Fallback, MethodChoice, Metrics
from dask_gpurt.observe.methods import METHOD_TOPIC, Choices
from dask_gpurt.observe.metrics import combine
from dask_gpurt.observe.report import RuntimeReport
from dask_gpurt.observe.tables import Explanation, MemoryUsage

if TYPE_CHECKING:
    from dask_gpurt.planning import PlanningCache
    from dask_gpurt.planning.partitions import PartitionSizes
    from dask_gpurt.planning.store import Store

# Modules that import private parts of Dask are imported only after these have been found to exist.

logger = logging.getLogger(__name__)

#: The name of the runtime's plugins, and of its extension on the scheduler.
NAME = "gpurt"

_enabled: WeakSet[Client] = WeakSet()
#: The planning settings of clients for which any planning feature is on.
_planning: WeakKeyDictionary[Client, config.PlanningSettings] = WeakKeyDictionary()
#: The counters of planning in this client process, which no worker reports.
_metrics = Metrics()
_lock = threading.Lock()
#: The choices of shuffle methods that have been sent to the scheduler, by client.
_reported_choices: WeakKeyDictionary[Client, set[tuple[str, MethodChoice]]] = WeakKeyDictionary()
#: Timeout for closing a client that could not switch the runtime on, in seconds.
CLOSE_TIMEOUT_S = 2.0
#: The partitions of a table's files that have room in GPU memory at least, where a client knows its limit.
PARTITIONS_IN_DEVICE = 16
#: The most choices remembered for a client; beyond that all are forgotten, and may be counted again.
MOST_CHOICES = 10_000


def enable(client: Client | str | None = None) -> Client:
    """Switch the runtime on for a client and its cluster, and return the client.

    The call is a transaction: either the runtime is on afterwards, on the scheduler and on all workers, or an
    error is raised and it is off. If another client is switching the same cluster on or off, the call waits
    for that first. It is a no-op if the runtime is on already.

    Parameters
    ----------
    client
        The client, by default the current one. With an asynchronous client, await the result. The address of
        a scheduler, as in ``enable("tcp://10.0.0.1:8786")``, connects a new client, which becomes the current
        one.

    Returns
    -------
    Client
        The client, whose shuffles go through the runtime from now on.

    Raises
    ------
    ConfigError
        If a setting under ``gpurt`` is invalid.
    ValueError
        If the text is not the address of a scheduler.
    ConnectionError
        If no scheduler answers at the address within six seconds.
    UnsupportedError
        If the platform is not Linux, or the Dask of a process of the cluster differs in a part that the
        runtime replaces.
    RuntimeError
        If the scheduler or a worker cannot load the package or does not answer, or another client switches
        the runtime off in the meantime.
    """
    config.load()  # validate before connecting a client
    if isinstance(client, str):
        return _enable_at(client)
    chosen = _open_client(client)
    # With an asynchronous client this is awaitable, as a client is; no type tells the two kinds apart.
    enabled: Client = chosen.sync(_enable, chosen)
    return enabled


def _enable_at(address: str) -> Client:
    """Connect a new client, which becomes the current one, and switch the runtime on."""
    require_scheduler(address)
    client = Client(address)
    try:
        client.sync(_enable, client)
    except BaseException:
        with contextlib.suppress(TimeoutError):  # the first error says more
            client.close(timeout=CLOSE_TIMEOUT_S)
        raise
    return client


async def _enable(client: Client) -> Client:
    await activate(client)
    return client


def _client(client: Client | None) -> Client:
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


def _open_client(client: Client | None) -> Client:
    """Return the given client, or the current one, as :func:`_client` does.

    Raises
    ------
    RuntimeError
        If the client is closed.
    """
    client = _client(client)
    if client.status == "closed":
        raise RuntimeError("this client is closed: connect another one with Client('tcp://HOST:PORT')")
    return client


def disable(client: Client | None = None) -> Client:
    """Switch the runtime off for a client and its cluster, restore Dask as shipped, and return the client.

    Running shuffles of clients with the runtime fail with an error that gives the reason. Shuffles of other
    clients, which the runtime has taken over, restart with Dask's own ``p2p``. Collections that were built
    while the runtime was on are computed with Dask's default method, unless their graphs were already made:
    by ``optimize()``, ``to_delayed()`` or ``__dask_graph__()``. These need the runtime, or a local scheduler.

    Parameters
    ----------
    client
        The client, by default the current one. With an asynchronous client, await the result.

    Returns
    -------
    Client
        The client, whose shuffles are Dask's own from now on.

    Raises
    ------
    RuntimeError
        If parts of the runtime could not be removed from some workers; the message lists them. The runtime is
        off nevertheless.
    """
    client = _client(client)
    _leave(client)
    if client.status == "closed" and not client.asynchronous:
        return client  # its loop has ended
    disabled: Client = client.sync(_deactivate, client)
    return disabled


def is_enabled(client: Client | None = None) -> bool:
    """Return whether shuffles of this client go through the runtime."""
    try:
        return _client(client) in _enabled
    except ValueError:
        return False


def report(client: Client | None = None, *, connect: bool = False) -> RuntimeReport:
    """Return the counters, fallbacks and state of the runtime on a cluster.

    Parameters
    ----------
    client
        The client, by default the current one. With an asynchronous client, await the result.
    connect
        Whether each worker first connects to all of its peers, so that the report has all paths.

    Returns
    -------
    RuntimeReport
        ``counters``, ``fallbacks`` and more for the cluster, and in ``workers`` for each worker. Fields can
        also be read as items: ``report(client)["counters"]``. ``to_pandas()`` returns a frame with a row for
        each worker and metric. The counters of planning are those of the calling process, since the runtime
        was first switched on there.
    """
    client = _open_client(client)
    found: RuntimeReport = client.sync(_report, client, connect)
    return found


#: The columns of the result of :func:`memory_usage`, by its argument ``by``.
_COLUMNS = {
    "tier": ("worker", "tier", "capacity", "headroom", *KINDS),
    "prefix": ("worker", "tier", "kind", "prefix", "bytes"),
}


def memory_usage(client: Client | None = None, *, by: str = "tier") -> MemoryUsage:
    """Return the bytes in the memory tiers of all workers.

    Parameters
    ----------
    client
        The client, by default the current one. With an asynchronous client, await the result.
    by
        ``"tier"`` for one row per worker and tier, ``"prefix"`` for one row per worker, tier and task prefix.

    Returns
    -------
    MemoryUsage
        A printable table. ``to_pandas()`` returns a frame with the same names of tiers.

        By tier, in bytes: ``capacity`` is the size of the tier. It holds ``partitions``, pulled ``shards``,
        and ``reservations``; ``headroom`` is the rest. In addition to these there are ``published``, the
        shards in the exchange pools, ``cudf``, the bytes that cudf has spilled itself, and ``unmanaged``,
        the other memory of the process. On workers without a GPU the tiers are ``memory``, ``shared memory``
        (that of the pools), and ``disk``.

        By prefix: ``bytes`` is the size of the ``partitions`` made by tasks with a ``prefix``. The ``kind``
        may also be ``shards`` or ``reservations``, which is then the prefix too. Memory shared by several
        keys is charged to the oldest remaining one. Rows without bytes are omitted. A worker reports at most
        50 prefixes; the others are summed up as ``(others)``.

        The table is empty if the runtime is off. If only ``gpurt.memory.tiers`` is off, Dask manages the
        partitions, and the tiers hold only shards.

    Raises
    ------
    ValueError
        If ``by`` is neither.
    """
    if by not in _COLUMNS:
        raise ValueError(f"by={by!r}: expected one of {', '.join(map(repr, _COLUMNS))}")
    client = _open_client(client)
    found: MemoryUsage = client.sync(_memory_usage, client, by)
    return found


def explain(client: Client | None, key: Key) -> Explanation:
    """Explain why placement chose the worker of a task.

    Parameters
    ----------
    client
        The client, or None for the current one. With an asynchronous client, await the result.
    key
        The key of the task. The last 20,000 decisions are kept.

    Returns
    -------
    Explanation
        A printable table; ``to_pandas()`` returns a frame.

        It has a row for each worker considered in the last decision about the task, best first: its address
        as ``worker``, whether it was ``chosen``, the ``seconds`` until the task was expected to be done
        there, and the bytes of inputs ``missing`` there. The terms of these seconds follow: ``waiting`` for
        earlier work, ``moving`` inputs, and ``running``; finally, whether the inputs and the result ``fits``
        there at all.

    Raises
    ------
    RuntimeError
        If placement is not enabled on this cluster.
    """
    client = _open_client(client)
    found: Explanation = client.sync(_explain, client, key)
    return found


async def activate(client: Client) -> None:
    """Switch the runtime on for a client and its cluster; preload hooks await this."""
    dask_hooks.require(expressions=True)
    from dask_gpurt import dashboard
    from dask_gpurt.dataframe import choose
    from dask_gpurt.plugins.scheduler.plugin import GpurtSchedulerPlugin

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
        _leave(client)
        raise RuntimeError("the runtime was switched off by another client during this call")


def register_method() -> None:
    """Make Dask know the shuffle method "gpurt", which without the runtime means Dask's default method."""
    from dask_gpurt.dataframe import register_shuffle_method

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


def _leave(client: Client) -> None:
    with _lock:
        # The whole cluster is switched off, which affects its other clients too.
        for other in list(_enabled):
            of_the_cluster = other is client or _address(other) == _address(client) is not None
            if of_the_cluster or other.status == "closed":
                _enabled.discard(other)
                _planning.pop(other, None)
        if not _planning and "dask_gpurt.planning" in sys.modules:
            _planning_cache().remove()
        if not _enabled and (method := sys.modules.get("dask_gpurt.dataframe.method")):
            method.leave()


@functools.cache
def _planning_cache() -> PlanningCache:
    from dask_gpurt.planning import PlanningCache

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
    from dask_gpurt.dask_hooks.computing import cluster_size
    from dask_gpurt.planning.partitions import PartitionSizes

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
    from dask_gpurt.planning.store import Store, default_path

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

    return chosen_client() or _client(None)


async def _deactivate(client: Client) -> Client:
    # Not a handler: another client may switch off meanwhile, which removes all handlers.
    async def stop(dask_scheduler: SchedulerServer) -> None:
        if (runtime := dask_scheduler.extensions.get("gpurt")) is not None:
            await runtime.stop()

    if client.status != "closed" and await _is_on(client):
        try:
            await client.run_on_scheduler(stop)
        finally:
            _leave(client)  # again, for clients that have enabled it in the meantime
    return client


async def _report(client: Client, connect: bool) -> RuntimeReport:
    if not await _is_on(client):
        return RuntimeReport()
    reply = await _scheduler(client).gpurt_report(connect=connect)
    here = _metrics.snapshot()
    counters = combine([reply["counters"], here["counters"]])
    return RuntimeReport.of(
        {**reply, "counters": counters, "fallbacks": {**here["fallbacks"], **reply["fallbacks"]}}
    )


async def _explain(client: Client, key: Key) -> Explanation:
    rows = await _scheduler(client).gpurt_explain(key=key) if await _is_on(client) else None
    if rows is None:
        raise RuntimeError(
            "placement is not enabled on this cluster, so there is no decision to explain: set "
            "'gpurt.placement.enabled' to true before switching the runtime on"
        )
    from dask_gpurt.placement import TERMS

    return Explanation(tuple(rows), ("worker", "chosen", "seconds", "missing", *TERMS, "fits"), key=key)


async def _memory_usage(client: Client, by: str) -> MemoryUsage:
    if not await _is_on(client):
        return MemoryUsage((), _COLUMNS[by], enabled=False)
    rows = await _scheduler(client).gpurt_memory(by=by)
    return MemoryUsage(tuple(rows), _COLUMNS[by], await _scheduler(client).gpurt_shared_memory())


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
