"""Switch the runtime on and off from a client, and read its reports."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from distributed import Client

from dask_gpurt import config
from dask_gpurt.client import session
from dask_gpurt.client.addresses import require_scheduler
from dask_gpurt.client.session import is_enabled
from dask_gpurt.observe.report import RuntimeReport
from dask_gpurt.observe.tables import MemoryUsage

if TYPE_CHECKING:
    from dask_gpurt.client.explain.plan import Explanation
    from dask_gpurt.client.explain.run import Analysis

__all__ = ["disable", "enable", "explain", "is_enabled", "memory_usage", "report"]

#: Timeout for closing a client that could not switch the runtime on, in seconds.
CLOSE_TIMEOUT_S = 2.0


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
        If the text is not the address of a scheduler, or there is no client.
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
    try:
        chosen = session.open_client(client)
    except ValueError as error:  # Dask's own says nothing of the address
        raise ValueError(
            "there is no client: connect one before, or name the scheduler, as in "
            "dask_gpurt.enable('tcp://10.0.0.1:8786')"
        ) from error
    # With an asynchronous client this is awaitable, as a client is; no type tells the two kinds apart.
    enabled: Client = chosen.sync(session.activate, chosen)
    return enabled


def _enable_at(address: str) -> Client:
    """Connect a new client, which becomes the current one, and switch the runtime on."""
    require_scheduler(address)
    client = Client(address)
    try:
        client.sync(session.activate, client)
    except BaseException:
        with contextlib.suppress(TimeoutError):  # the first error says more
            client.close(timeout=CLOSE_TIMEOUT_S)
        raise
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
    client = session.given_client(client)
    session.SESSIONS.close_cluster(client)
    if client.status == "closed" and not client.asynchronous:
        return client  # its loop has ended
    disabled: Client = client.sync(session.deactivate, client)
    return disabled


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
    client = session.open_client(client)
    found: RuntimeReport = client.sync(session.ask_report, client, connect)
    return found


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
        and ``reservations``; ``headroom`` is the rest, in which files are ``cached`` until it is
        needed. In addition to these there are ``published``, the shards in the exchange pools, ``cudf``, the
        bytes that cudf has spilled itself, and ``unmanaged``, the other memory of the process. On workers
        without a GPU the tiers are ``memory``, ``shared memory`` (that of the pools), and ``disk``.

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
    if by not in session.MEMORY_COLUMNS:
        raise ValueError(f"by={by!r}: expected one of {', '.join(map(repr, session.MEMORY_COLUMNS))}")
    client = session.open_client(client)
    found: MemoryUsage = client.sync(session.ask_memory, client, by)
    return found


def explain(collection: Any, *, analyze: bool = False) -> Explanation | Analysis:
    """Explain how a dataframe would be computed, or compute it and say where the time went.

    Parameters
    ----------
    collection
        A collection of Dask, usually a dataframe. It is computed by the current client, which must not be
        asynchronous.
    analyze
        Whether to compute it, as ``collection.compute()`` would, and drop the result.

    Returns
    -------
    Explanation or Analysis
        Readable in a console and a notebook. The plan: each read with its files, partitions and estimated
        bytes, and why it has as many partitions; each join, and whether it broadcasts; each shuffle; what
        each rule of the planner changed, and why it left what it left; the number of tasks. With ``analyze``
        also the time of each step, over all threads, and the changes of the program that would help most.

    Raises
    ------
    TypeError
        If it is no collection of Dask.
    RuntimeError
        If the runtime is off for the current client, or leaves planning to Dask.
    """
    from dask_gpurt.client.explain import watching

    return watching.explain(collection, analyze=analyze)
