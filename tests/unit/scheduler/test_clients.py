"""Know which clients have the package, and name those that would gain by it."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from dask_gpurt._version import __version__
from dask_gpurt.observe import Fallback, Metrics
from dask_gpurt.protocol import CLIENTS_TOPIC, STATE_TOPIC
from dask_gpurt.scheduler.clients import Clients


class FakeScheduler:
    """Keep events as Dask's scheduler does, and the messages to clients."""

    def __init__(self, *clients: str) -> None:
        self.clients = dict.fromkeys(clients)
        self.events: dict[str, list[tuple[float, Any]]] = defaultdict(list)
        self.sent: dict[str, list[Any]] = defaultdict(list)

    def log_event(self, topic: str, msg: Any) -> None:
        self.events[topic].append((0.0, msg))

    def get_events(self, topic: str) -> list[tuple[float, Any]]:
        return self.events[topic]

    def send_all(self, clients: dict[str, list[Any]], workers: dict[str, Any]) -> None:
        for client, messages in clients.items():
            self.sent[client] += [message["event"][1] for message in messages]


def says(client: str, reason: str | None = None) -> dict[str, Any]:
    return {"client": client, "version": __version__, "reason": reason}


def test_those_that_were_there_before_and_come_later_are_told() -> None:
    scheduler = FakeScheduler("early", "late", "plain")
    for client in ("early", "gone"):
        scheduler.log_event(CLIENTS_TOPIC, says(client))
    clients = Clients(scheduler, Metrics())  # type: ignore[arg-type]
    clients.begin()
    clients.heard(says("late"))
    clients.tell(on=True)
    assert clients.planned() == 2
    clients.remove("late")
    clients.tell(on=False)
    on, off = (event for _, event in scheduler.events[STATE_TOPIC])
    assert (on["on"], off["on"], on["version"]) == (True, False, __version__)
    assert on["number"] < off["number"]
    assert scheduler.sent == {"early": [on, off], "late": [on]}


@pytest.mark.parametrize(
    ("said", "key", "counted"),
    [
        (None, ("shuffle-transfer-1", 0), 1),
        (None, ("hash-join-2", 0), 1),
        (None, "shuffle-barrier-3", 1),
        (None, ("read_parquet-fused-4", 0), 1),
        (None, "sum-5", 0),
        (says("client"), ("shuffle-transfer-6", 0), 0),
        (says("client", "of another Dask"), ("shuffle-transfer-7", 0), 1),
    ],
)
def test_a_client_that_would_gain_is_named_once(said: Any, key: Any, counted: int) -> None:
    metrics = Metrics()
    clients = Clients(FakeScheduler("client"), metrics)  # type: ignore[arg-type]
    if said is not None:
        clients.heard(said)
    for _ in range(2):
        clients.computes("client", [key])
    fallbacks = metrics.snapshot()["fallbacks"]
    assert len(fallbacks) == len(clients.unplanned) == counted
    if counted:
        assert fallbacks[Fallback.PLANNING_CLIENT.id]["count"] == 1
        assert "client" in clients.unplanned[0]
    clients.remove("client")
    assert clients.unplanned == []
