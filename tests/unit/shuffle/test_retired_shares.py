"""Have former owners release shares that have been replaced."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any

import pytest

from dask_gpurt.exchange import PeerLost
from dask_gpurt.exchange.outgoing import Reading
from dask_gpurt.shuffle import offers
from dask_gpurt.shuffle.messages import Retire
from dask_gpurt.shuffle.offers import RetiredShares

A, B = "tcp://a:1", "tcp://b:1"


class Producer:
    """Fake a worker that has published shares 0 to 3 in pools, of which share 0 is still valid."""

    def __init__(self) -> None:
        self.published = {0: A, 1: A, 2: B, 3: A}
        self.asked: list[tuple[str, Retire]] = []
        self.errors: list[Exception] = []
        self.answers: list[Exception] = []
        self.is_open = True
        self.left: set[str] = set()
        self.started: list[Any] = []
        self._ongoing_background_tasks = SimpleNamespace(call_soon=self._start)
        pools = SimpleNamespace(readings=self._readings, drop_shares=self._drop)
        exchange: Any = SimpleNamespace(pools=pools, calls=SimpleNamespace(has_left=self._has_left))
        worker: Any = self
        self.retired = RetiredShares(
            ("one", 7),
            worker,
            exchange,
            lambda share: share == 0,
            self._deliver,
            lambda: self.is_open,
            self.errors.append,
        )

    def _start(self, function: Callable[..., Any], *args: Any) -> None:
        self.started.append(function(*args))

    def finish(self) -> None:
        """Run what has been started."""

        async def run() -> None:
            started, self.started = self.started, []
            await asyncio.gather(*started)

        asyncio.run(run())

    def _readings(self, run: tuple[str, int]) -> list[tuple[None, Reading]]:
        return [(None, Reading(run, share, share, owner)) for share, owner in self.published.items()]

    def _drop(self, run: tuple[str, int], shares: Collection[int]) -> None:
        assert run == ("one", 7)
        for share in shares:
            del self.published[share]

    async def _has_left(self, worker: str) -> bool:
        return worker in self.left

    async def _deliver(self, owner: str, message: Retire) -> None:
        self.asked.append((owner, message))
        if self.answers:
            raise self.answers.pop(0)


def test_each_former_owner_is_asked_once_for_its_shares() -> None:
    producer = Producer()
    producer.retired.ask_all()
    producer.retired.ask_all()
    assert producer.retired.asked == {1, 2, 3}
    producer.finish()
    assert producer.asked == [(A, Retire(frozenset({1, 3}))), (B, Retire(frozenset({2})))]
    assert producer.published == {0: A}
    assert not producer.retired.asked


def test_an_owner_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may still read, so it is asked again."""
    monkeypatch.setattr(offers, "LONGEST_PAUSE_S", 0.0)
    producer = Producer()
    producer.answers = [PeerLost("no reply")]
    asyncio.run(producer.retired.ask(B, frozenset({2})))
    assert producer.asked == [(B, Retire(frozenset({2})))] * 2
    assert 2 not in producer.published


def test_an_owner_has_left() -> None:
    producer = Producer()
    producer.answers, producer.left = [PeerLost("no reply")], {B}
    asyncio.run(producer.retired.ask(B, frozenset({2})))
    assert len(producer.asked) == 1
    assert 2 not in producer.published


def test_an_owner_fails() -> None:
    """The share can be asked for again, and the run fails, since its blocks would fill the pool."""
    producer = Producer()
    error = MemoryError("no memory")
    producer.answers = [error]
    producer.retired.ask_all()
    producer.finish()
    assert producer.errors == [error]
    assert producer.published == {0: A, 1: A, 3: A}
    assert not producer.retired.asked


def test_the_run_is_over() -> None:
    producer = Producer()
    producer.retired.ask_all()
    producer.is_open = False
    producer.finish()
    assert not producer.asked
    assert not producer.errors
