"""Test what keeps the time between the last transfer and the first output short, and its benchmark."""

from __future__ import annotations

import threading
from typing import Any

import dask.dataframe as dd
import pandas as pd
from distributed.diagnostics.plugin import SchedulerPlugin

from tests.helpers.in_process import on_cluster


class Threads(SchedulerPlugin):  # type: ignore[misc]
    """Note the threads that have run barriers."""

    def __init__(self) -> None:
        self.of_barriers: list[int] = []

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        if str(key).startswith("shuffle-barrier") and finish == "memory":
            self.of_barriers.append(kwargs["thread"])


@on_cluster(workers=2)
async def test_a_barrier_runs_on_the_event_loop(client: Any, scheduler: Any, *workers: Any) -> None:
    scheduler.add_plugin(noted := Threads(), name="threads")
    frame = dd.from_pandas(pd.DataFrame({"key": range(60)}), npartitions=4)
    joined = frame.merge(frame, on="key", shuffle_method="gpurt", broadcast=False)
    with client.as_current():
        assert len(await client.compute(joined)) == 60
        assert len(await client.compute(frame.shuffle("key", shuffle_method="gpurt"))) == 60
    assert noted.of_barriers == [threading.get_ident()] * 2  # both sides are the same shuffle
