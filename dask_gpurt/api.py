"""Switch the runtime on and off from a client, and ask it what it has done."""

from __future__ import annotations

import functools
import logging
import sys
import threading
import warnings
from types import ModuleType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import dask
from dask.typing import Key
from distributed import Client, default_client

from dask_gpurt import config, dask_hooks
from dask_gpurt._version import __version__
from dask_gpurt.memory.ledger import KINDS
from dask_gpurt.observe import MethodChoice, Metrics
from dask_gpurt.observe.methods import METHOD_TOPIC
from dask_gpurt.observe.metrics import combine
from dask_gpurt.observe.report import RuntimeReport
from dask_gpurt.observe.tables import Explanation, MemoryUsage

if TYPE_CHECKING:
    from dask_gpurt.planning import PlanningCache

# Modules that import private parts of Dask are imported where they are used, once these are known to exist.

logger = logging.getLogger(__name__)

#: The name of the runtime's plugins, and of its extension on the scheduler.
NAME = "gpurt"

_enabled: WeakSet[Client] = WeakSet()
#: The settings of planning of those for which anything of it is on.
_planning: WeakKeyDictionary[Client, config.PlanningSettings] = WeakKeyDictionary()
#: The counters of planning in this process, which has no worker to report them.
_metrics = Metrics()
_lock = threading.Lock()
#: By client, the choices of shuffle methods that its scheduler has been told of.
_told: WeakKeyDictionary[Client, set[tuple[str, MethodChoice]]] = WeakKeyDictionary()
#: Choices that are remembered of a client; then all are forgotten, and may count again.
MOST_CHOICES = 10_000


def enable(client: Client | str | None = None) -> Any:
    """Switch the runtime on for a client and its cluster, and return the client; again does nothing.

    Afterwards it is on, on the scheduler and on all workers, or an error was raised and it is off. Where
    another client is just switching the same cluster on or off, that is waited for.

    Parameters
    ----------
    client
        The current one if not given. With an asynchronous client, await the result. The address of a
        scheduler, as in ``enable("tcp://10.0.0.1:8786")``, connects a client, which becomes the current one.

    Returns
    -------
    Client
        Whose shuffles go through the runtime from now on.

    Raises
    ------
    ConfigError
        When a setting under ``gpurt`` makes no sense.
    UnsupportedError
        When this is not Linux, or a process of the cluster has a Dask that differs where the runtime replaces
        parts of it.
    RuntimeError
        When the scheduler or a worker can not load the package, or does not answer; and when another client
        has switched it off again meanwhile.
    """
    config.load()  # before a client is connected for it
    if not isinstance(client, str):
        chosen = _open_client(client)
        return chosen.sync(_enable, chosen)
    connected = Client(client)
    try:
        return connected.sync(_enable, connected)
    except BaseException:
        connected.close()
        raise


async def _enable(client: Client) -> Client:
    await activate(client)
    return client


def _client(client: Client | None) -> Client:
    """Return the client that is meant.

    Raises
    ------
    TypeError
        When something else was given.
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
    """Return the client that is meant, as :func:`_client`.

    Raises
    ------
    RuntimeError
        When it is closed.
    """
    client = _client(client)
    if client.status == "closed":
        raise RuntimeError("this client is closed: connect another one with Client('tcp://HOST:PORT')")
    return client


def disable(client: Client | None = None) -> Any:
    """Give Dask back, to this client and to its cluster.

    What runs through the runtime fails and says why; of clients that do not know the runtime it begins
    again by Dask's own p2p. Collections that were built while it was on are computed by Dask's default
    method.

    Parameters
    ----------
    client
        The current one if not given. With an asynchronous client, await the result.

    Raises
    ------
    RuntimeError
        When something is left on workers, with what and where. The cluster is off all the same.
    """
    client = _client(client)
    _leave(client)
    if client.status == "closed" and not client.asynchronous:
        return None  # its loop has ended
    return client.sync(_deactivate, client)


def is_enabled(client: Client | None = None) -> bool:
    """Tell whether shuffles of this client go through the runtime."""
    try:
        return _client(client) in _enabled
    except ValueError:
        return False


def report(client: Client | None = None, *, connect: bool = False) -> RuntimeReport:
    """Return what the runtime on the cluster has, did and fell back from.

    Parameters
    ----------
    client
        The current one if not given. With an asynchronous client, await the result.
    connect
        Whether the workers shall find out the paths to all their peers first.

    Returns
    -------
    RuntimeReport
        For the cluster, and in ``workers`` for each worker: ``counters``, ``fallbacks`` and more. Its fields
        can be read as items too: ``report(client)["counters"]``. ``to_pandas()`` gives a frame with a row for
        each worker and metric. What was planned counts for the process that asks, since it was switched on
        first.
    """
    client = _open_client(client)
    found: RuntimeReport = client.sync(_report, client, connect)
    return found


#: The columns of what :func:`memory_usage` returns, by what there is a row for.
_COLUMNS = {
    "tier": ("worker", "tier", "capacity", "headroom", *KINDS),
    "prefix": ("worker", "tier", "kind", "prefix", "bytes"),
}


def memory_usage(client: Client | None = None, *, by: str = "tier") -> MemoryUsage:
    """Return what the tiers of all workers hold.

    Parameters
    ----------
    client
        The current one if not given. With an asynchronous client, await the result.
    by
        What there is a row for in each tier of each worker: ``"tier"`` for one row, ``"prefix"``
        for one with each task prefix.

    Returns
    -------
    MemoryUsage
        Prints as a table. ``to_pandas()`` gives a frame, in which tiers have the names that are printed.

        By tier, in bytes: the tier's ``capacity``; in it ``partitions``, ``shards`` that were pulled and
        ``reservations``, which leave its ``headroom``; next to it ``published``, the shards in the exchange
        pools, ``cudf``, what cudf has spilled by itself, and ``unmanaged``, what the process has besides.
        On workers without a GPU the tiers are ``memory``, ``shared memory``, where the pools are, and
        ``disk``.

        By prefix: the ``bytes`` of the ``partitions`` that tasks with a ``prefix`` have made. The
        ``kind`` may also be ``shards`` or ``reservations``, which is their prefix too. Memory that
        keys share counts for the first of them that is still there. Rows without bytes are left
        out; of more than 50 prefixes on a worker, what comes later goes as ``(others)``.

        There are no rows where the runtime is off. Where only ``gpurt.memory.tiers`` is off,
        Dask keeps the partitions, and the tiers have nothing but shards.

    Raises
    ------
    ValueError
        When there is no such ``by``.
    """
    if by not in _COLUMNS:
        raise ValueError(f"by={by!r}: expected one of {', '.join(map(repr, _COLUMNS))}")
    client = _open_client(client)
    found: MemoryUsage = client.sync(_memory_usage, client, by)
    return found


def explain(client: Client | None, key: Key) -> Explanation:
    """Return why a task went where it went.

    Parameters
    ----------
    client
        The current one if None. With an asynchronous client, await the result.
    key
        Of the task. What is no key of the last 20,000 that were decided about has no reasons any more.

    Returns
    -------
    Explanation
        Prints as a table; ``to_pandas()`` gives a frame.

        A row for each worker that was looked at in the last decision about the task, the best first: its
        address as ``worker``, whether it was ``chosen``, the ``seconds`` that the task was expected to take
        until it had run there and the bytes of inputs ``missing`` there. Then the terms of these seconds:
        ``waiting`` for the work before it, ``running``, ``moving`` inputs and making ``room``; and whether
        its inputs and its result ``fits`` there at all.

    Raises
    ------
    RuntimeError
        When the runtime does not choose workers on this cluster.
    """
    client = _open_client(client)
    found: Explanation = client.sync(_explain, client, key)
    return found


class _CallableModule(ModuleType):
    """Keep ``dask_gpurt.memory(client)`` alive for one release; it goes with version 0.2.

    The import system binds the name to the package, so that only the package itself can answer the call.
    """

    def __call__(self, client: Client | None = None, *, by: str = "tier") -> MemoryUsage:
        warnings.warn(
            "dask_gpurt.memory(client) is called dask_gpurt.memory_usage(client) now",
            DeprecationWarning,
            stacklevel=2,
        )
        return memory_usage(client, by=by)


sys.modules["dask_gpurt.memory"].__class__ = _CallableModule


async def activate(client: Client) -> None:
    """Switch on; a coroutine, for preload hooks."""
    dask_hooks.require(expressions=True)
    from dask_gpurt import dashboard
    from dask_gpurt.dataframe import choose
    from dask_gpurt.plugins.scheduler import GpurtSchedulerPlugin

    teach_method()
    plugin = GpurtSchedulerPlugin(dict(dask.config.get("gpurt", {})), dashboard.observe)
    try:
        await client.register_plugin(plugin, NAME)
    except ImportError as error:
        raise RuntimeError(
            f"the scheduler at {_address(client)} can not load dask_gpurt ({error}): install "
            f"dask-gpurt {__version__} there and on all workers, with a Dask from {dask_hooks.OLDEST} to "
            f"{dask_hooks.NEWEST}"
        ) from error
    with _lock:
        _told.pop(client, None)  # the cluster counts anew
        _enabled.add(client)
        choose(is_enabled)
        planning = config.load().planning
        if planning.cache or planning.fuse:
            _planning[client] = planning
            _planning_cache().install()
            _planning_cache().clear()  # choices of methods count anew too
    if not await _stays_on(client):
        _leave(client)
        raise RuntimeError("the runtime was switched off by another client while it was switched on")


def teach_method() -> None:
    """Make "gpurt" a method that Dask knows; clients without the runtime get Dask's default by it."""
    from dask_gpurt.dataframe import teach

    teach(is_enabled, _tell_choice)


def _tell_choice(expression: str, choice: MethodChoice) -> None:
    """Have the scheduler count a choice of the shuffle method; do not wait for it.

    An expression counts once: a join is lowered whenever its divisions are asked for.
    """
    client = default_client()
    told = _told.setdefault(client, set())
    if (expression, choice) in told:
        return
    if len(told) >= MOST_CHOICES:
        told.clear()
    told.add((expression, choice))

    async def tell() -> None:
        try:
            await _scheduler(client).log_event(topic=METHOD_TOPIC, msg=choice.name)
        except (OSError, RuntimeError) as error:  # the client is being closed
            logger.debug("the choice %s is not counted: %r", choice, error)

    # Expressions are lowered on any thread, also on that of the event loop.
    client.loop.add_callback(tell)


def _leave(client: Client) -> None:
    with _lock:
        # The cluster is switched off, so other clients of it can not go on either.
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

    return PlanningCache(_planning_client, _metrics, _fuses)


def _planning_client() -> str | None:
    """Return the id of the current client if its planning is kept."""
    client, settings = _current_planning()
    return str(client.id) if client and settings and settings.cache else None


def _fuses() -> bool:
    """Return whether the computations of the current client are fused."""
    _, settings = _current_planning()
    return settings is not None and settings.fuse


def _current_planning() -> tuple[Client | None, config.PlanningSettings | None]:
    try:
        client = default_client()
    except ValueError:
        return None, None
    return client, _planning.get(client)


async def _deactivate(client: Client) -> None:
    if client.status != "closed" and await _is_on(client):
        try:
            await _scheduler(client).gpurt_disable()
        finally:
            _leave(client)  # once more, with those that have come in the middle


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
            "Dask chooses the workers of this cluster, and keeps no reasons: set 'gpurt.placement.enabled' "
            "to true before the runtime is switched on"
        )
    from dask_gpurt.placement import Terms

    return Explanation(tuple(rows), ("worker", "chosen", "seconds", "missing", *Terms._fields), key=key)


async def _memory_usage(client: Client, by: str) -> MemoryUsage:
    if not await _is_on(client):
        return MemoryUsage((), _COLUMNS[by], enabled=False)
    rows = await _scheduler(client).gpurt_memory(by=by)
    return MemoryUsage(tuple(rows), _COLUMNS[by], await _scheduler(client).gpurt_shared_memory())


def _scheduler(client: Client) -> Any:
    return client.scheduler  # untyped, since Dask does not know our handlers


def _address(client: Client) -> str | None:
    return getattr(client.scheduler, "address", None)  # None once it is closed


async def _stays_on(client: Client) -> bool:
    """Tell whether the cluster is on once everything under way has ended."""

    async def settled(dask_scheduler: Any) -> bool:
        runtime = dask_scheduler.extensions.get("gpurt")
        return runtime is not None and await runtime.switch.settled()

    return bool(await client.run_on_scheduler(settled))


async def _is_on(client: Client) -> bool:
    # By value, for a scheduler that does not have the package.
    return bool(await client.run_on_scheduler(lambda dask_scheduler: "gpurt" in dask_scheduler.extensions))
