"""Seal a run at its barrier, with workers that answer as the test says."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from dask_gpurt.dask_hooks.shuffle import P2PConsistencyError, ShuffleClosedError
from dask_gpurt.exchange import Attempt, ExchangeClosed, PeerLost
from dask_gpurt.observe import Metrics
from dask_gpurt.shuffle.messages import RunInterrupted, Seal, Stale, Transferred
from dask_gpurt.shuffle.offers import Sealing, inputs_lost
from dask_gpurt.shuffle.owners import Owners

A, B, C = "tcp://a:1", "tcp://b:1", "tcp://c:1"
#: Inputs 0 and 1, transferred on A and C; the outputs are owned by A and B.
RESULTS = [
    Transferred(7, 0, Attempt(3, 0), "transfer-0", A),
    Transferred(7, 1, Attempt(4, 0), "transfer-1", C),
]

Answer = Sequence[int] | Exception


class Run:
    """Fake the other workers, each with its answers to seals; by default nothing is missing."""

    def __init__(self, answers: dict[str, list[Answer]] | None = None):
        self.owners = Owners.begin({0: A, 1: B})
        self.answers = answers or {}
        self.asked: list[tuple[str, Seal]] = []
        self.recovered: list[tuple[str, dict[str, Any]]] = []
        self.caught_up, self.over = 0, False
        self.move_after: int | None = None
        self.metrics = Metrics()
        exchange: Any = SimpleNamespace(metrics=self.metrics)
        self.sealing = Sealing(
            "a run", exchange, lambda: self.owners, self._deliver, self._recover, self._catch_up, self._check
        )

    def __call__(self) -> int:
        """Run the barrier; return the epoch in which the shares are sealed."""
        return asyncio.run(self.sealing.seal(RESULTS))

    async def _deliver(self, worker: str, seal: Seal) -> Sequence[int]:
        self.asked.append((worker, seal))
        if len(self.asked) == self.move_after:
            self.owners.move({1: A})
        answers = self.answers.get(worker)
        answer = answers.pop(0) if answers else []
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def _recover(self, reason: str, **what: Any) -> None:
        self.recovered.append((reason, what))

    async def _catch_up(self) -> None:
        self.caught_up += 1

    def _check(self) -> None:
        if self.over:
            raise ShuffleClosedError("the run is over")

    @property
    def workers(self) -> list[str]:
        return [worker for worker, _ in self.asked]


def test_owners_and_producers_are_asked_once_if_nothing_is_missing() -> None:
    run = Run()
    run.owners.move({})
    assert run() == run.owners.epoch == 1
    assert run.workers == [A, B, C]
    assert all(seal.succeeded == {0: Attempt(3, 0), 1: Attempt(4, 0)} for _, seal in run.asked)
    assert not run.recovered


def test_owners_of_sealed_shares_are_not_asked() -> None:
    run = Run()
    run.owners.seal(0)
    run.owners.move({0: A})
    run()
    assert run.workers == [A, C], "the other share of B is sealed"


def test_an_owner_has_sealed_before_the_last_offers_arrived() -> None:
    """Once all workers have replied, these have: the owner is asked again, and no other one."""
    run = Run({B: [[1], []]})
    assert run() == 0
    assert run.workers == [A, B, C, B]
    assert not run.recovered


def test_inputs_are_missing() -> None:
    run = Run({A: [[1], [1]], B: [[1], [1]]})
    with pytest.raises(RunInterrupted, match=r"inputs \[1\] are transferred again"):
        run()
    assert run.recovered == [("1 input lost: 1", {"inputs": ["transfer-1"], "producers": [C]})]
    assert run.metrics.snapshot()["counters"]["shuffle.inputs.missing"] == 1


@pytest.mark.parametrize("gone", [PeerLost("it left"), ExchangeClosed("off"), P2PConsistencyError("closed")])
def test_an_owner_is_gone(gone: Exception) -> None:
    run = Run({B: [gone]})
    with pytest.raises(RunInterrupted, match=str(gone)):
        run()
    assert run.recovered == [(str(gone), {"unreachable": B})]


def test_a_producer_that_owns_nothing_is_gone() -> None:
    """What it has not delivered is reported missing by the owners; here nothing is."""
    run = Run({C: [PeerLost("it left")]})
    assert run() == 0
    assert not run.recovered


def test_an_owner_is_gone_since_the_run_is_over() -> None:
    run = Run({B: [P2PConsistencyError("no such run")]})
    run.over = True
    with pytest.raises(ShuffleClosedError, match="the run is over"):
        run()
    assert not run.recovered


def test_a_worker_knows_newer_owners() -> None:
    run = Run({B: [Stale("the owners have changed")]})
    with pytest.raises(RunInterrupted, match="have changed"):
        run()
    assert run.caught_up == 1


@pytest.mark.parametrize("asked", [1, 4])
def test_outputs_move_while_workers_are_asked(asked: int) -> None:
    """The attempts may be outdated: what is missing is not reported, in either round."""
    run = Run({B: [[1], [1]]})
    run.move_after = asked
    with pytest.raises(RunInterrupted, match="the owners of a run have changed"):
        run()
    assert len(run.asked) == max(3, asked)
    assert not run.recovered


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [([12, 0, 3], "3 inputs lost: 0, 3, 12"), (range(99), "99 inputs lost: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, …")],
)
def test_lost_inputs_are_counted_first(inputs: range | list[int], reason: str) -> None:
    """A narrow place shows what matters."""
    assert inputs_lost(inputs) == reason
