"""Go on without silent workers: on request, and when a barrier has been sent to one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from dask_gpurt.scheduler.unresponsive import Abandoning

A, B, C = "tcp://a:1", "tcp://b:1", "tcp://c:1"
SHUFFLE, RUN, BARRIER = "one", 7, "shuffle-barrier-one"
#: The other side of a join, which shares the outputs.
OTHER = "other"


class Silent(set[str]):
    """Fake the silent workers: these are held, and ``found`` would be found silent."""

    def __init__(self, found: Iterable[str], held: Iterable[str] = ()):
        super().__init__(held)
        self.found = set(found)

    def is_silent(self, worker: str) -> bool:
        return worker in self.found | self

    def hold(self, worker: str) -> None:
        self.add(worker)


class Cluster:
    """Fake a scheduler with one shuffle, whose barrier runs on worker A."""

    def __init__(self, silent: Silent, able: Iterable[str] = (A, B)):
        self.able, self.active, self.state = list(able), True, "processing"
        self.on: str | None = A
        self.workers: Any = SimpleNamespace(silent=silent, ready={A, B, C})
        self.later: list[Callable[[], None]] = []
        self.rerun: list[Any] = []
        self.loop = SimpleNamespace(call_later=self._call_later)
        self.abandoning = self._abandoning()

    def _abandoning(self) -> Abandoning:
        scheduler: Any = self
        return Abandoning(scheduler, self.workers, scheduler, lambda keys, *states: self._rerun(keys, states))

    def _call_later(self, delay: float, call: Callable[..., None], *args: Any) -> None:
        self.later.append(lambda: call(*args))

    def _rerun(self, keys: Iterable[Any], states: Iterable[str]) -> None:
        self.rerun += [(key, *states) for key in keys]

    def wait(self) -> int:
        """Take what is due after a while; return the number of calls that are due later."""
        due, self.later = self.later, []
        for call in due:
            call()
        return len(self.later)

    # ---- its active runs ---------------------------------------------------------------

    def is_active(self, shuffle: str) -> bool:
        return self.active and shuffle == SHUFFLE

    def is_current(self, shuffle: str, run_id: int) -> bool:
        return self.is_active(shuffle) and run_id == RUN

    def is_task(self, key: str, *states: str) -> bool:
        return key == BARRIER and self.state in states

    def barrier(self, shuffle: str) -> Any:
        return SimpleNamespace(processing_on=None if self.on is None else SimpleNamespace(address=self.on))

    def sharing(self, shuffle: str) -> set[str]:
        return {shuffle, OTHER}

    def candidates(self, *shuffles: str) -> list[str]:
        """Return the workers that may own outputs of both sides; C may of one alone."""
        return self.able if set(shuffles) == {SHUFFLE, OTHER} else [*self.able, C]


def test_a_run_goes_on_without_a_silent_worker_which_gets_no_tasks() -> None:
    cluster = Cluster(Silent(found=[A]))
    assert cluster.abandoning.continues_without(SHUFFLE, RUN, A)
    assert cluster.workers.silent == {A}


@pytest.mark.parametrize(
    ("cluster", "run", "worker"),
    [
        pytest.param(Cluster(Silent(found=[])), RUN, A, id="it has sent a heartbeat"),
        pytest.param(Cluster(Silent(found=[A])), RUN - 1, A, id="the run is over"),
        pytest.param(Cluster(Silent(found=["tcp://d:1"])), RUN, "tcp://d:1", id="it has no runtime"),
        pytest.param(Cluster(Silent(found=[A]), able=[A]), RUN, A, id="no other worker is left"),
        pytest.param(Cluster(Silent(found=[A], held=[B])), RUN, A, id="all others are silent too"),
    ],
)
def test_a_run_waits_for_a_worker(cluster: Cluster, run: int, worker: str) -> None:
    assert not cluster.abandoning.continues_without(SHUFFLE, run, worker)
    assert worker not in cluster.workers.silent


def test_the_worker_of_a_barrier_falls_silent() -> None:
    cluster = Cluster(Silent(found=[]))
    cluster.abandoning.transition(BARRIER, "processing")
    assert cluster.wait() == 1, "it is looked at again"
    assert not cluster.rerun
    cluster.workers.silent.found.add(A)
    assert cluster.wait() == 0
    assert cluster.rerun == [(BARRIER, "processing")]
    cluster.on = B
    cluster.abandoning.transition(BARRIER, "processing")
    assert cluster.wait() == 1, "so is the barrier that runs again"


def test_a_barrier_is_sent_twice() -> None:
    cluster = Cluster(Silent(found=[]))
    for _ in range(2):
        cluster.abandoning.transition(BARRIER, "processing")
    assert len(cluster.later) == 1


@pytest.mark.parametrize("end", ["the barrier", "the run"])
def test_a_watch_ends(end: str) -> None:
    cluster = Cluster(Silent(found=[A]))
    cluster.abandoning.transition(BARRIER, "processing")
    if end == "the run":
        cluster.active = False
    else:
        cluster.state = "memory"
    assert cluster.wait() == 0
    assert not cluster.rerun
    assert not cluster.workers.silent


@pytest.mark.parametrize(("key", "finish"), [("work", "processing"), (BARRIER, "waiting")])
def test_other_transitions_begin_no_watch(key: str, finish: str) -> None:
    cluster = Cluster(Silent(found=[A]))
    cluster.abandoning.transition(key, finish)
    assert not cluster.later


def test_shuffles_of_dask_are_not_watched() -> None:
    cluster = Cluster(Silent(found=[A]))
    cluster.abandoning.transition("shuffle-barrier-another", "processing")
    assert not cluster.later
