"""Bring the partitions of a result straight from workers to the client, and put them together there.

At the end of a computation Dask sends all partitions to one worker, which puts them together; the result goes
through the scheduler to the client. So most bytes are sent three times, and half of them a fourth time. Here
the client asks for the partitions instead of that last task, fetches them from their workers, and calls what
the task would have called. The graph is the same, with one task that nobody asks for.

Whatever a worker does not give, because it has left, is busy or cannot be reached from the client, Dask
gathers through the scheduler, and has it computed again if it is lost.

Decisions and their figures: ``docs/decisions/planning.md``.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import pandas as pd
from dask.core import flatten
from dask.typing import Key
from distributed import Client, Future

from dask_gpurt.dask_hooks import PatchSet, UnsupportedError, computing
from dask_gpurt.dask_hooks.planning import Expr, keys_of, metadata
from dask_gpurt.dask_hooks.types import concat
from dask_gpurt.frames.pickled import own_rest
from dask_gpurt.observe import Fallback, Metrics

#: Partitions beyond this number are put together by a task of a worker if they have fewer bytes than this.
FEW_PARTITIONS, SMALL_BYTES = 64, 4 * 2**20
#: Bytes that a worker sends in one message.
MESSAGE_BYTES = 64 * 2**20
#: Seconds for a worker to accept a connection, and between looks whether one that sends is still there.
CONNECT_S, WATCH_S = 5.0, 5.0


class Results:
    """Get the results of clients for which the runtime is on.

    ``is_on``: returns whether the runtime is on for a client.
    """

    def __init__(self, is_on: Callable[[Client], bool], metrics: Metrics):
        self._is_on = is_on
        self._metrics = metrics
        self._patches = PatchSet()
        #: By client, the workers to which it cannot connect.
        self._unreachable: WeakKeyDictionary[Client, set[str]] = WeakKeyDictionary()

    def install(self) -> None:
        """Replace how clients get results, if this version of Dask is supported. Idempotent."""
        if self._patches:
            return
        try:
            computing.replace_get(self._patches, self.get)
        except UnsupportedError as error:
            self._metrics.fallback(Fallback.RESULTS_UNSUPPORTED, str(error))

    def remove(self) -> None:
        """Restore Dask's way."""
        self._patches.restore()

    def get(
        self, original: Callable[..., Any], client: Client, dsk: Any, keys: Any, *args: Any, **how: Any
    ) -> Any:
        """Compute results, and put together here those that are partitions of a dataframe."""
        wanted = None if args else self._wanted(client, dsk, keys, how)
        if wanted is None:
            return original(client, dsk, keys, *args, **how)
        futures = original(client, dsk, wanted, sync=False, **how)
        try:
            found = client.sync(self._gather, client, {each.key: each for each in flatten(futures)})
            if found is None:  # the partitions are still there
                return original(client, dsk, keys, **how)
        finally:
            for future in flatten(futures):
                future.release()
        self._metrics.add("results.partitions", len(found))
        return [_put_together(each, found) for each in wanted]

    def _wanted(self, client: Client, dsk: Any, keys: Any, how: Mapping[str, Any]) -> list[Any] | None:
        """Return the key of each result, a list of keys for one in partitions; None if Dask gets them all."""
        if (
            not isinstance(dsk, Expr)
            or not self._is_on(client)
            or client.asynchronous
            or computing.is_in_task()
        ):
            return None
        as_asked = how.get("sync", True) and how.keys().isdisjoint(("asynchronous", "direct"))
        if not as_asked or client.direct_to_workers is False:
            return None
        results = computing.results_of(dsk)
        if [list(flatten(keys_of(result))) for result in results] != [[key] for key in keys]:
            return None
        wanted = [_wanted(result, key) for result, key in zip(results, keys, strict=True)]
        return wanted if any(isinstance(each, list) for each in wanted) else None

    async def _gather(self, client: Client, futures: dict[Key, Future[Any]]) -> dict[Key, Any] | None:
        """Return results by key once all are there; None if a task had better put them together."""
        found: dict[Key, Any] = {}
        if await computing.last_ends(client, list(futures.values())):
            holders, nbytes = await computing.where_are(client, list(futures))
            if len(futures) > FEW_PARTITIONS and sum(nbytes.values()) < SMALL_BYTES:
                return None
            found = await self._fetch_all(client, holders, nbytes)
        left = [key for key in futures if key not in found]
        if left:  # or one of them has failed, which is raised here
            found.update(
                zip(left, await computing.gather(client, [futures[key] for key in left]), strict=True)
            )
        return found

    async def _fetch_all(
        self, client: Client, holders: Mapping[Key, Sequence[str]], nbytes: Mapping[Key, int]
    ) -> dict[Key, Any]:
        """Fetch results from workers in parallel; return those that they have sent."""
        unreachable = self._unreachable.setdefault(client, set())
        asked: defaultdict[str, list[Key]] = defaultdict(list)
        for key, workers in holders.items():
            if usable := [each for each in workers if each not in unreachable]:
                asked[min(usable, key=lambda each: len(asked[each]))].append(key)
        sent = await asyncio.gather(
            *(self._fetch(client, worker, keys, nbytes) for worker, keys in asked.items() if keys)
        )
        return {key: value for each in sent for key, value in each.items()}

    async def _fetch(
        self, client: Client, worker: str, keys: list[Key], nbytes: Mapping[Key, int]
    ) -> dict[Key, Any]:
        """Fetch results from a worker; return those that it has sent until it left."""
        found: dict[Key, Any] = {}
        try:
            for message in _messages(keys, nbytes):
                found |= await _watched(client, worker, message)
        except ConnectionRefusedError as error:
            self._unreachable[client].add(worker)
            self._metrics.fallback(Fallback.RESULTS_THROUGH_SCHEDULER, str(error))
        except Exception as error:  # whatever it is, Dask raises it if it happens again
            self._metrics.fallback(Fallback.RESULTS_THROUGH_SCHEDULER, repr(error))
        return found


def _wanted(result: Expr, key: Key) -> Key | list[Key]:
    """Return the keys of a result's partitions, or its own key."""
    frame = computing.apart(result)
    # The partitions of a cudf frame would be twice on the client's GPU while they are put together.
    if frame is None or type(metadata(frame)).__module__.partition(".")[0] != "pandas":
        return key
    return list(flatten(keys_of(frame)))


def _put_together(wanted: Key | list[Key], found: dict[Key, Any]) -> Any:
    if not isinstance(wanted, list):
        return found[wanted]
    whole = concat([found[key] for key in wanted])  # as the task would
    return own_rest(whole) if isinstance(whole, (pd.DataFrame, pd.Series)) else whole


def _messages(keys: list[Key], nbytes: Mapping[Key, int]) -> Iterator[list[Key]]:
    """Yield keys of results in groups that a worker sends in one message each."""
    message: list[Key] = []
    total = 0
    for key in keys:
        total += nbytes[key]
        if message and total > MESSAGE_BYTES:
            yield message
            message, total = [], nbytes[key]
        message.append(key)
    yield message


async def _watched(client: Client, worker: str, keys: list[Key]) -> dict[Key, Any]:
    """Fetch results from a worker, as long as the scheduler knows the worker."""
    fetching = asyncio.ensure_future(computing.fetch(client, worker, keys, CONNECT_S))
    try:
        while not (await asyncio.wait({fetching}, timeout=WATCH_S))[0]:
            if not await computing.has_worker(client, worker):
                raise ConnectionError(f"worker {worker} has left")
        return fetching.result()
    finally:
        fetching.cancel()
