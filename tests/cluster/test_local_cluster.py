"""Interrupt a command that has started a cluster of its own."""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import Future
from typing import Any

import pytest
from distributed.protocol.pickle import dumps

from dask_gpurt.cli.cluster import local_cluster


def test_it_is_interrupted_while_the_scheduler_waits_for_a_worker(caplog: pytest.LogCaptureFixture) -> None:
    waiting: list[Future[Any]] = []

    def command() -> None:
        with local_cluster("pandas", 1) as cluster:
            cluster.wait_for_workers(1)
            call = {"op": "run", "function": dumps(time.sleep), "args": dumps((60,))}
            broadcast = cluster.scheduler.broadcast(msg=call, on_error="return")
            waiting.append(asyncio.run_coroutine_threadsafe(broadcast, cluster.loop.asyncio_loop))
            raise KeyboardInterrupt

    try:
        with pytest.raises(KeyboardInterrupt):
            command()
        waiting[0].result(10)
    finally:
        logging.disable(logging.NOTSET)
    assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == []
