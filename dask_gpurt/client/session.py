"""Keep a session for each client of this process for which the runtime is on, and call their schedulers."""

from __future__ import annotations

import asyncio
import atexit
import logging
import sys
import threading
import weakref
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import dask
from distributed import Client, default_client

from dask_gpurt import config, dask_hooks
from dask_gpurt.client import following
from dask_gpurt.client.addresses import require_package
from dask_gpurt.client.following import address_of
from dask_gpurt.dask_hooks.types import SchedulerServer
from dask_gpurt.memory.ledger import KINDS, rows, rows_by_prefix, shared_memory
from dask_gpurt.observe import Fallback, MethodChoice, Metrics
from dask_gpurt.observe.counting import METHOD_TOPIC, Choices
from dask_gpurt.observe.metrics import combine
from dask_gpurt.observe.report import RuntimeReport
from dask_gpurt.observe.tables import MemoryUsage
from dask_gpurt.protocol import NAME, PLANS_TOPIC

if TYPE_CHECKING:
    from dask_gpurt.client.planning import PlanningCache
    from dask_gpurt.client.planning.rules import PartitionSizes
    from dask_gpurt.client.planning.store import Store
    from dask_gpurt.client.results import Results

# Modules that import private parts of Dask are imported only after these have been found to exist.

logger = logging.getLogger(__name__)

#: The partitions of a table's files that have room in GPU memory at least, where a client knows its limit.
PARTITIONS_IN_DEVICE = 16
#: The most choices remembered for a client; beyond that all are forgotten, and may be counted again.
MAX_REPORTED_CHOICES = 10_000
#: The columns of the result of :func:`memory_usage`, by its argument ``by``.
MEMORY_COLUMNS = {
    "tier": ("worker", "tier", "capacity", "headroom", *KINDS),
    "prefix": ("worker", "tier", "kind", "prefix", "bytes"),
}


def given_client(client: Client | None) -> Client:
    """Return the given client, or the current one.

    Raises TypeError if the argument is not a client.
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

    Raises RuntimeError if the client is closed.
    """
    client = given_client(client)
    if client.status == "closed":
        raise RuntimeError("this client is closed: connect another one with Client('tcp://HOST:PORT')")
    return client


class ClientSession:
    """Hold what the runtime knows of a client, from switching it on until the cluster is switched off.

    A session does not keep its client alive.

    ``client``: the client.
    ``planning``: the settings of planning with which it was switched on.
    ``sessions``: the registry that it is in.
    ``id``: identifies the client: what is planned for it is not used for another one.
    """

    def __init__(self, client: Client, planning: config.PlanningSettings, sessions: Sessions):
        self.id = str(client.id)
        self.planning = planning
        self._client = weakref.ref(client)
        self._sessions = sessions
        #: The choices of shuffle methods that have been sent to the scheduler.
        self._reported: set[tuple[str, MethodChoice]] = set()

    def report_choice(self, expression: str, choice: MethodChoice) -> None:
        """Send a choice of the shuffle method to the scheduler, which counts it. Does not block.

        Each expression counts once, although a join is lowered each time its divisions are accessed.
        """
        if (expression, choice) in self._reported:
            return
        if len(self._reported) >= MAX_REPORTED_CHOICES:
            self._reported.clear()
        self._reported.add((expression, choice))
        self._send(METHOD_TOPIC, choice.name)

    def tell_plan(self, plan: Mapping[str, Any]) -> None:
        """Tell the scheduler how a plan came about. Does not block."""
        self._send(PLANS_TOPIC, plan)

    def _send(self, topic: str, message: Any) -> None:
        client: Any = self._client()
        if client is None:
            return

        async def send() -> None:
            try:
                await _scheduler(client).log_event(topic=topic, msg=message)
            except (OSError, RuntimeError) as error:  # the client is being closed
                logger.debug("the scheduler does not hear of %s: %r", topic, error)

        # Expressions are planned in any thread, including that of the event loop.
        client.loop.add_callback(send)

    def partition_sizes(self) -> PartitionSizes:
        """Return what the number of partitions of reads depends on."""
        from dask_gpurt.client.planning.rules import PartitionSizes
        from dask_gpurt.dask_hooks.computing import cluster_size

        client = self._client()
        size = (0, 0) if client is None else cluster_size(client)
        settings = config.load()
        device, planning = settings.memory.device, settings.planning
        limit = None if device is None else device.bytes
        largest = None if limit is None else limit // PARTITIONS_IN_DEVICE
        return PartitionSizes(*size, planning.partition_size, planning.broadcast_size, largest)

    def store(self) -> Store | None:
        """Return the store for what is planned; None if other processes are not to find it."""
        setting = self.planning.store
        return None if setting is None else self._sessions.store_at(setting)


class Sessions:
    """Keep the sessions of all clients of this process, and what they share. Thread-safe.

    ``metrics``: the counters of planning in this process, which no worker reports.
    ``choices``: takes the choices of shuffle methods in the computation that is being planned.
    """

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.choices = Choices(self._report_choice)
        self._by_client: WeakKeyDictionary[Client, ClientSession] = WeakKeyDictionary()
        self._lock = threading.Lock()
        self._stores: dict[str, Store | None] = {}
        self._stores_lock = threading.Lock()

    def of(self, client: Client) -> ClientSession | None:
        """Return the session of a client; None if the runtime is off for it."""
        return self._by_client.get(client)

    def current(self) -> ClientSession | None:
        """Return the session of the client for which this thread plans; None if there is none."""
        from dask_gpurt.dask_hooks.computing import chosen_client

        try:
            return self.of(chosen_client() or given_client(None))
        except ValueError:
            return None

    def is_on(self) -> bool:
        """Return whether the computation that is being planned goes through the runtime."""
        return self.current() is not None

    def planner(self) -> ClientSession | None:
        """Return the session for which this thread plans, if the runtime optimises its plans."""
        session = self.current()
        return session if session is not None and session.planning.optimise else None

    @cached_property
    def planning(self) -> PlanningCache:
        """Return the cache of what is planned."""
        from dask_gpurt.client.planning import PlanningCache

        return PlanningCache(self.planner, self.metrics, self.choices)

    @cached_property
    def results(self) -> Results:
        """Return what gets the results of clients."""
        from dask_gpurt.client.results import Results

        return Results(lambda client: self.of(client) is not None, self.metrics)

    def open(self, client: Client) -> None:
        """Begin a session: from now on shuffles of the client go through the runtime."""
        from dask_gpurt.client.lowering import choose

        planning = config.load().planning
        with self._lock:
            self._by_client[client] = ClientSession(client, planning, self)
            choose(self.is_on)
            self.results.install()
            if planning.optimise:
                self.planning.install()
                self.planning.clear()  # count choices of methods anew too
                self.planning.ask_ahead()

    def close_cluster(self, client: Client) -> None:
        """End the sessions of all clients of a cluster, which is switched off as a whole."""
        with self._lock:
            for other in list(self._by_client):
                of_the_cluster = other is client or address_of(other) == address_of(client) is not None
                if of_the_cluster or other.status == "closed":
                    del self._by_client[other]
            left = list(self._by_client.values())
            if "planning" in vars(self) and not any(each.planning.optimise for each in left):
                self.planning.remove()
            if not left and (lowering := sys.modules.get("dask_gpurt.client.lowering")):
                lowering.leave()
                self.results.remove()

    def store_at(self, setting: str) -> Store | None:
        """Return the store of a setting ``gpurt.planning.store``; None if it has no place."""
        with self._stores_lock:
            if not self._stores:  # save not earlier: it would take the time of a query, or of the event loop
                atexit.register(self.save_stores)
            if setting not in self._stores:
                self._stores[setting] = self._open_store(setting)
            return self._stores[setting]

    def save_stores(self) -> None:
        """Save what was planned for other processes, as at the end of this one."""
        with self._stores_lock:
            stores, self._stores = self._stores, {}
        for store in filter(None, stores.values()):
            store.save()

    def _open_store(self, setting: str) -> Store | None:
        from dask_gpurt.client.planning.store import Store, default_path

        try:
            path = default_path() if setting == "auto" else Path(setting)
        except RuntimeError as error:  # the user has no home directory, as often in a container
            self.metrics.fallback(Fallback.PLANNING_NOT_STORED, str(error))
            return None
        return Store(path, self.metrics)

    def _report_choice(self, expression: str, choice: MethodChoice) -> None:
        if (session := self.current()) is not None:
            session.report_choice(expression, choice)


#: The sessions of this process.
SESSIONS = Sessions()


def is_enabled(client: Client | None = None) -> bool:
    """Return whether shuffles of this client go through the runtime."""
    try:
        chosen = given_client(client)
        return chosen.status != "closed" and SESSIONS.of(chosen) is not None
    except ValueError:
        return False


def register_method() -> None:
    """Make Dask know the shuffle method "gpurt", which without the runtime means Dask's default method."""
    from dask_gpurt.client.lowering import register_shuffle_method

    register_shuffle_method(SESSIONS.is_on, SESSIONS.choices)


async def activate(client: Client) -> Client:
    """Switch the runtime on for a client and its cluster, and return the client; preload hooks await this."""
    dask_hooks.require()
    await require_package(client.scheduler)
    from dask_gpurt.monitor import dashboard
    from dask_gpurt.scheduler.plugin import GpurtSchedulerPlugin

    plugin = GpurtSchedulerPlugin(dict(dask.config.get("gpurt", {})), dashboard.observe)
    await client.register_plugin(plugin, NAME)
    await asyncio.to_thread(following.prepare)
    register_method()
    SESSIONS.open(client)
    follower = await following.follow(client)
    await follower.admit()
    await follower.ask()
    if not await _stays_on(client):
        SESSIONS.close_cluster(client)
        raise RuntimeError("the runtime was switched off by another client during this call")
    return client


async def deactivate(client: Client) -> Client:
    """Switch the runtime off on the cluster of a client that :meth:`Sessions.close_cluster` has left."""

    # Not a handler: another client may switch off meanwhile, and then it would answer that it is off.
    async def stop(dask_scheduler: SchedulerServer) -> None:
        if (runtime := dask_scheduler.extensions.get("gpurt")) is not None:
            await runtime.stop()

    if client.status != "closed" and await is_on_cluster(client):
        try:
            await client.run_on_scheduler(stop)
        finally:
            SESSIONS.close_cluster(client)  # again, for clients that have enabled it in the meantime
            await following.relay_off(client)
    return client


async def ask_report(client: Client, connect: bool) -> RuntimeReport:
    """Ask the scheduler for a report; it is empty if the runtime is off."""
    if not await is_on_cluster(client):
        return RuntimeReport()
    if (reply := await _scheduler(client).gpurt_report(connect=connect)) is None:  # switched off meanwhile
        return RuntimeReport()
    here = SESSIONS.metrics.snapshot()
    counters = combine([reply["counters"], here["counters"]])
    return RuntimeReport.of(
        {
            **reply,
            "counters": counters,
            "fallbacks": {**here["fallbacks"], **reply["fallbacks"]},
        }
    )


async def ask_memory(client: Client, by: str) -> MemoryUsage:
    """Ask the scheduler for the bytes in memory tiers; none if the runtime is off."""
    known = await _scheduler(client).gpurt_memory() if await is_on_cluster(client) else None
    if known is None:  # or it was switched off meanwhile
        return MemoryUsage((), MEMORY_COLUMNS[by], enabled=False)
    found = rows_by_prefix(known) if by == "prefix" else rows(known)
    return MemoryUsage(tuple(found), MEMORY_COLUMNS[by], shared_memory(known))


def _scheduler(client: Client) -> Any:
    return client.scheduler  # untyped, since the handlers are not Dask's


async def _stays_on(client: Client) -> bool:
    """Wait for pending switching, and return whether the runtime is on."""

    async def settled(dask_scheduler: SchedulerServer) -> bool:
        runtime = dask_scheduler.extensions.get("gpurt")
        return runtime is not None and await runtime.switch.settled()

    return bool(await client.run_on_scheduler(settled))


async def is_on_cluster(client: Client) -> bool:
    """Ask the scheduler whether the runtime is on."""
    # A lambda is pickled by value, so this works on a scheduler without the package.
    return bool(await client.run_on_scheduler(lambda dask_scheduler: "gpurt" in dask_scheduler.extensions))
