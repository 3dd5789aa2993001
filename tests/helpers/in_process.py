"""Run coroutines on clusters in this process, and snapshot all state that the runtime changes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any

import dask
from dask.dataframe.dask_expr import _collection, _merge, _shuffle
from dask.dataframe.dask_expr._merge import Merge
from dask.dataframe.dask_expr._shuffle import Shuffle
from distributed import LocalCluster, Nanny, Worker
from distributed.utils_test import gen_cluster

import dask_gpurt
from dask_gpurt.client.session import register_method
from tests.helpers.clusters import METHOD, QUICK
from tests.helpers.waiting import LIMIT_S

#: A test on a cluster, and what makes one a function whose other parameters are fixtures.
Test = Callable[..., Awaitable[None]]
Decorator = Callable[[Test], Callable[..., None]]

#: Dask's own limit of 30 s assumes an otherwise idle machine.
gen_client_cluster = partial(gen_cluster, client=True, timeout=240)


async def until(holds: Callable[[], bool], seconds: float = LIMIT_S) -> None:
    for _ in range(round(seconds / 0.02)):
        if holds():
            return
        await asyncio.sleep(0.02)
    assert holds()


def on_cluster(
    *,
    workers: int = 2,
    nthreads: Sequence[Any] = (),
    processes: bool = False,
    validate: bool = True,
    **settings: Any,
) -> Decorator:
    """Run a test with a client, a scheduler and workers, then its fixtures, with the runtime enabled.

    ``nthreads``: describes unlike workers, as for Dask's ``gen_cluster``.
    ``validate``: whether Dask validates the states of workers, which fails for one that has closed.
    """

    def decorate(test: Test) -> Callable[..., None]:
        @wraps(test)
        async def body(client: Any, *others: Any, **fixtures: Any) -> None:
            await dask_gpurt.enable(client)
            try:
                await test(client, *others, **fixtures)
            finally:
                await dask_gpurt.disable(client)

        kind = Nanny if processes else Worker
        config = {METHOD: QUICK[METHOD], **settings}
        return gen_client_cluster(
            nthreads=nthreads or [("127.0.0.1", 1)] * workers,
            Worker=kind,
            config=config,
            worker_kwargs={} if validate else {"validate": False},
        )(body)

    return decorate


def active(handlers: Mapping[str, Any]) -> set[str]:
    """Return the names of a server's handlers without those that only answer that the runtime is off."""
    return {name for name, one in handlers.items() if getattr(one, "__name__", None) not in ("is_off", "off")}


#: Attributes that Dask and copyreg cache on classes.
CACHES = ("_instances", "__slotnames__")


def state(local: LocalCluster) -> dict[str, Any]:
    """Snapshot all state that enabling the runtime changes."""
    scheduler: Any = local.scheduler
    workers: list[Any] = list(local.workers.values())
    return {
        "expressions": [
            {name: value for name, value in vars(cls).items() if name not in CACHES}
            for cls in (Shuffle, Merge)
        ],
        "default": [vars(module)["get_default_shuffle_method"] for module in (_collection, _merge, _shuffle)],
        "config": {name: dask.config.get(name, None) for name in ("dataframe", "gpurt", "distributed")},
        "extensions": dict(scheduler.extensions),
        "shuffle": {n: v for n, v in vars(scheduler.extensions["shuffle"]).items() if callable(v)},
        "plugins": set(scheduler.plugins),
        "worker plugins": set(scheduler.worker_plugins),
        "handlers": [active(server.handlers) for server in (scheduler, *workers)],
        "stream handlers": [active(server.stream_handlers) for server in (scheduler, *workers)],
        "on workers": [set(worker.plugins) for worker in workers],
    }


def on_plain_cluster(workers: int = 2, **settings: Any) -> Decorator:
    """Run a test like :func:`on_cluster`, with the runtime off; asserts that all is restored."""

    def decorate(test: Test) -> Callable[..., None]:
        @wraps(test)
        async def body(client: Any, scheduler: Any, *crew: Any, **fixtures: Any) -> None:
            register_method()  # which is permanent
            await dask_gpurt.disable(client)  # for clients that earlier tests closed while it was enabled
            before = whole_state(scheduler, *crew)
            await test(client, scheduler, *crew, **fixtures)
            await dask_gpurt.disable(client)
            if all(worker.address in scheduler.workers for worker in crew):
                assert whole_state(scheduler, *crew) == before

        return gen_client_cluster(nthreads=[("127.0.0.1", 1)] * workers, config=settings)(body)

    return decorate


def whole_state(scheduler: Any, *workers: Any) -> dict[str, Any]:
    return state(SimpleNamespace(scheduler=scheduler, workers={w.address: w for w in workers}))  # type: ignore
