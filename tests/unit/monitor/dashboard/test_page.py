"""Make what the page of the runtime draws from given data."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from dask_gpurt.monitor.dashboard import page
from dask_gpurt.monitor.dashboard.page import MAX_WORKERS, drawn, reply
from dask_gpurt.monitor.dashboard.sampler import ALL, SPILLED, Level, Sampler, WorkerSample
from dask_gpurt.observe import Fallback, MethodChoice, Metrics


class Collected:
    """Stand for a collector, with workers at ``tcp://0``, ``tcp://1`` …"""

    def __init__(self, *workers: WorkerSample):
        self.sampler = Sampler()
        self.sampler.workers.update({f"tcp://{at}": worker for at, worker in enumerate(workers)})
        self.metrics = Metrics()
        self.runtime = SimpleNamespace(
            clients=SimpleNamespace(planned=lambda: 1, unplanned=["Client-1 would gain"]),
            computations=SimpleNamespace(rows=lambda most: [{"tasks": 1}, {"tasks": 2}]),
            reports=SimpleNamespace(known=self.known),
        )

    def known(self) -> dict[str, Any]:
        return {"workers": {}, "departed": [], **self.metrics.snapshot()}


def drawing(collected: Collected, worker: str = ALL) -> dict[str, Any]:
    """Return what is drawn as a browser has it."""
    given: Any = collected
    found: dict[str, Any] = json.loads(json.dumps(drawn(given, worker), allow_nan=False))
    return found


def test_the_head_says_for_whom_it_is_on_and_what_was_left() -> None:
    collected = Collected()
    MethodChoice.DEFAULT.count(collected.metrics)
    MethodChoice.OTHER_METHOD.count(collected.metrics)
    collected.metrics.fallback(Fallback.EXCHANGE_COMMS, "no shared memory")
    state = drawing(collected)["state"]
    assert (state["clients"], state["unplanned"]) == (1, ["Client-1 would gain"])
    assert (state["taken"], state["left"]) == (1, [[MethodChoice.OTHER_METHOD.text, 1]])
    (fallback,) = state["fallbacks"]
    assert fallback == {"text": Fallback.EXCHANGE_COMMS.text, "reason": "no shared memory", "count": 1}


def test_histories_are_of_the_chosen_worker_with_gaps_where_it_was_not_there() -> None:
    collected = Collected(WorkerSample("a", {"memory": Level(1, 10)}), WorkerSample("b"))
    for at in (1.0, 2.0):
        collected.sampler.used.add(
            at, {(ALL, "memory"): at, **({("tcp://0", "memory"): 7.0} if at > 1 else {})}
        )
        collected.sampler.rates.add(at, {(ALL, SPILLED): 10 * at})
    found = drawing(collected)
    assert found["memory"]["series"] == {"memory": [1, 2]}
    assert found["spilling"]["series"]["spilled"] == [10, 20]
    assert drawing(collected, "tcp://0")["memory"]["series"] == {"memory": [None, 7]}
    assert drawing(collected, "tcp://0")["memory"]["limits"]["memory"] == 10


def test_of_many_workers_the_fullest_have_a_row() -> None:
    crew = [WorkerSample(str(at), {"memory": Level(at, 300)}) for at in range(256)]
    found = drawing(Collected(*crew))["workers"]
    assert [name for name, _ in found["rows"]] == [str(at) for at in range(255, 255 - MAX_WORKERS, -1)]
    assert len(found["named"]) == 256


def test_workers_of_one_name_are_told_apart() -> None:
    crew = [WorkerSample("a"), WorkerSample("a"), WorkerSample("b")]
    assert list(drawing(Collected(*crew))["workers"]["named"].values()) == ["a 0", "a 1", "b"]


# ---- replies -------------------------------------------------------------------------------


def test_those_who_look_at_once_share_a_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(page.time, "monotonic", lambda: now[0])
    collected: Any = Collected(WorkerSample("a"))
    first = reply(collected, ALL)
    collected.sampler.workers.clear()
    assert reply(collected, ALL) == reply(collected, "tcp://nobody") == first
    now[0] += 100.0
    assert json.loads(reply(collected, ALL))["workers"]["rows"] == []
