"""Ask workers from the scheduler: none delays or fails the answers of the others."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from dask_gpurt.scheduler.worker_calls import ask_all


class FakeScheduler:
    """Call handlers of workers that answer, fail, or never answer."""

    def rpc(self, worker: str) -> Any:
        async def handler(**message: Any) -> Any:
            if worker == "fails":
                raise ValueError("its handler raised")
            if worker == "stopped":
                await asyncio.Event().wait()
            return message

        return SimpleNamespace(handler=handler)


def test_a_worker_that_fails_or_does_not_answer_leaves_the_answers_of_others() -> None:
    scheduler: Any = FakeScheduler()
    workers = ["stopped", "fails", "well"]
    replies = asyncio.run(ask_all(scheduler, workers, "handler", 0.01, token="t"))
    assert list(replies) == workers
    assert isinstance(replies["stopped"], TimeoutError)
    assert isinstance(replies["fails"], ValueError)
    assert replies["well"] == {"token": "t"}
