"""Have computations explained: one of a collection, or all that a program makes."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from dask.base import is_dask_collection
from distributed import Client, get_task_stream

from dask_gpurt.client.explain.plan import Explanation, explain_plan
from dask_gpurt.client.explain.run import Analysis, advise, measure
from dask_gpurt.client.planning.cache import Planned
from dask_gpurt.client.session import SESSIONS, open_client
from dask_gpurt.dask_hooks.planning import optimise

logger = logging.getLogger(__name__)


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
class _Tasks:
    """Record the tasks of a client; they are read before the program closes it, or at the end."""

    client: Client
    rows: list[Any] = field(default_factory=list)
    threads: int = 0

    def record(self) -> None:
        """Begin: the scheduler records tasks from the first call on."""
        self.client.get_task_stream(count=0)
        for name in ("close", "shutdown"):
            setattr(self.client, name, self._read_before(getattr(self.client, name)))

    def _read_before(self, closing: Callable[..., Any]) -> Callable[..., Any]:
        def read_and_close(*arguments: Any, **options: Any) -> Any:
            self.read()
            return closing(*arguments, **options)

        return read_and_close

    def read(self) -> bool:
        """Read what is recorded, if the client is open; return whether it is read."""
        if not self.threads and self.client.status == "running":
            try:
                self.rows, self.threads = self.client.get_task_stream(), _threads(self.client)
            except OSError as error:
                logger.warning("times of tasks are not known: %s", error)
        return self.threads > 0


@dataclass
class Watched:
    """Collect the computations of a program.

    ``plans``: the plan of each, with the time at which it was made, and the tasks of its client.
    """

    plans: list[tuple[float, Planned, _Tasks]] = field(default_factory=list)

    def add(self, planned: Planned) -> None:
        """Take a plan that is about to be computed."""
        client = open_client(None)
        tasks = next((tasks for _, _, tasks in self.plans if tasks.client is client), None)
        if tasks is None:
            tasks = _Tasks(client)
            tasks.record()
        self.plans.append((time.time() - planned.seconds, planned, tasks))

    def explanations(self, ended: float) -> list[Explanation | Analysis]:
        """Return what is known of each computation.

        ``ended``: when the program ended. A computation is taken to last until its last task.
        """
        found: list[Explanation | Analysis] = []
        ends = [*(began for began, _, _ in self.plans), ended][1:]
        for (began, planned, tasks), until in zip(self.plans, ends, strict=True):
            plan = explain_plan(planned, SESSIONS.planning.origins)
            if not tasks.read():  # the cluster was closed before the client
                found.append(plan)
                continue
            within = [row for row in tasks.rows if began <= row["startstops"][0]["start"] < until]
            last = max((span["stop"] for row in within for span in row["startstops"]), default=began)
            run = measure(within, plan, began=began, ended=last, threads=tasks.threads)
            found.append(Analysis(plan, run, advise(plan, run)))
        return found


@contextlib.contextmanager
def watched() -> Iterator[Watched]:
    """Collect the computations that this thread makes."""
    found = Watched()
    with SESSIONS.planning.watched(found.add):
        yield found
