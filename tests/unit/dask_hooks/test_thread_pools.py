"""Add threads to the pool of a worker's tasks, and give it back."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from distributed.threadpoolexecutor import ThreadPoolExecutor, secede

from dask_gpurt.dask_hooks.worker import widen_pool
from tests.helpers.waiting import LIMIT_S, until


def test_a_pool_that_is_widened_twice_within_a_second_keeps_its_thread() -> None:
    """As by switching off and on: threads take up to a second to notice that they are to end."""
    pool, go_on, later = ThreadPoolExecutor(1), threading.Event(), list[Future[Any]]()
    worker: Any = SimpleNamespace(executors={"default": pool})
    restore = widen_pool(worker, 1)
    both = threading.Barrier(2)
    for each in [pool.submit(both.wait, LIMIT_S) for _ in range(2)]:
        each.result(LIMIT_S)
    restore()
    widen_pool(worker, 1)()
    first = pool.submit(go_on.wait, LIMIT_S)
    until(lambda: len(pool._threads) == 1)
    first.add_done_callback(lambda _: later.append(pool.submit(int, 7)))  # before its thread takes the next
    go_on.set()
    until(lambda: bool(later))
    assert later[0].result(10) == 7
    pool.shutdown()


def test_threads_that_secede_after_a_pool_is_narrowed_do_not_leave_it_empty() -> None:
    pool = ThreadPoolExecutor(1)
    worker: Any = SimpleNamespace(executors={"default": pool})
    restore = widen_pool(worker, 1)
    begun, go_on = threading.Barrier(3), [threading.Event(), threading.Event()]

    def task(number: int) -> None:
        begun.wait(LIMIT_S)
        go_on[number].wait(LIMIT_S)
        if number == 0:
            secede()

    tasks = [pool.submit(task, number) for number in range(2)]
    begun.wait(LIMIT_S)
    restore()
    waiting = pool.submit(int)
    go_on[0].set()
    tasks[0].result(LIMIT_S)
    go_on[1].set()
    assert waiting.result(LIMIT_S) == 0
    pool.shutdown()
