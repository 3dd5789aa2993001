"""Have computations explained: one of a collection, or all that a program makes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from dask.base import is_dask_collection
from distributed import Client, get_task_stream

from dask_gpurt.client.explain.advice import advise
from dask_gpurt.client.explain.plan import Explanation, explain_plan
from dask_gpurt.client.explain.run import Analysis, measure
from dask_gpurt.client.planning.cache import Planned
from dask_gpurt.client.session import SESSIONS, open_client
from dask_gpurt.dask_hooks.planning import optimise


def explain(collection: Any, *, analyze: bool = False) -> Explanation | Analysis:
    """Explain how a collection would be computed; with ``analyze`` compute it, and say where the time went.

    See :func:`dask_gpurt.explain`.
    """
    if not is_dask_collection(collection):
        raise TypeError(f"expected a collection of Dask, such as a dataframe, not {collection!r}")
    client = open_client(None)
    require_planning(client)
    found: list[Planned] = []
    with SESSIONS.planning.watched(found.append):
        if not analyze:
            optimise(collection)
            return explain_plan(found[-1], SESSIONS.planning.origins)
        with get_task_stream(client) as stream:
            began = time.time()
            collection.compute()
            ended = time.time()
    plan = explain_plan(found[-1], SESSIONS.planning.origins)
    run = measure(stream.data, plan, began=began, ended=ended, threads=_threads(client))
    return Analysis(plan, run, advise(plan, run))


def require_planning(client: Client) -> None:
    """Check that plans of a client are those of the runtime.

    Raises RuntimeError if the runtime is off, leaves plans to Dask, or the client is asynchronous.
    """
    if client.asynchronous:
        raise RuntimeError("explaining needs a client that is not asynchronous")
    if (session := SESSIONS.of(client)) is None:
        raise RuntimeError("the runtime is off for this client: call dask_gpurt.enable() first")
    if not session.planning.optimise:
        raise RuntimeError("plans are Dask's own, since gpurt.planning.optimise is false")


def _threads(client: Client) -> int:
    return sum(client.nthreads().values())


@dataclass
class Watched:
    """Collect the computations of a program.

    ``plans``: the plan of each, with the time at which it was made.
    """

    plans: list[tuple[float, Planned]] = field(default_factory=list)
    _client: Client | None = None

    def add(self, planned: Planned) -> None:
        """Take a plan that is about to be computed."""
        if self._client is None:
            self._client = open_client(None)
            self._client.get_task_stream(count=0)  # the scheduler records tasks from the first call on
        self.plans.append((time.time() - planned.seconds, planned))

    def explanations(self, ended: float) -> list[Explanation | Analysis]:
        """Return what is known of each computation.

        ``ended``: when the program ended. A computation is taken to last until its last task.
        """
        client = self._client
        if client is None:
            return []
        plans = [explain_plan(planned, SESSIONS.planning.origins) for _, planned in self.plans]
        if client.status != "running":  # the program has closed it
            return list(plans)
        rows, threads = client.get_task_stream(), _threads(client)
        found: list[Explanation | Analysis] = []
        ends = [began for began, _ in self.plans[1:]] + [ended]
        for (began, _), plan, until in zip(self.plans, plans, ends, strict=True):
            within = [row for row in rows if began <= row["startstops"][0]["start"] < until]
            last = max((span["stop"] for row in within for span in row["startstops"]), default=began)
            run = measure(within, plan, began=began, ended=last, threads=threads)
            found.append(Analysis(plan, run, advise(plan, run)))
        return found


@contextlib.contextmanager
def watched() -> Iterator[Watched]:
    """Collect the computations that this thread makes."""
    found = Watched()
    with SESSIONS.planning.watched(found.add):
        yield found
