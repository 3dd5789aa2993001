"""Define the messages between the workers of a run, and their errors.

They are sent through Dask's ``shuffle_receive``. docs/design/exactly-once.md says when each is sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, cast

from distributed.core import ErrorMessage, OKMessage, clean_exception
from distributed.exceptions import Reschedule

from dask_gpurt.dask_hooks.shuffle import P2PConsistencyError, ShuffleClosedError
from dask_gpurt.exchange import Attempt, Commit, ExchangeClosed, PeerLost, Shard


class Seal(NamedTuple):
    """Ask a worker to deliver its queued offers, and then to seal its shares."""

    succeeded: Mapping[int, Attempt]


class Retire(NamedTuple):
    """Ask a former owner to release shares that have been replaced."""

    shares: frozenset[int]


#: The messages between workers.
Message = list[Shard | Commit] | Seal | Retire
#: The errors of sending to a worker that has left, is closing, or has ended its part of the run.
GONE = (PeerLost, ExchangeClosed, P2PConsistencyError)


class RunInterrupted(ShuffleClosedError, Reschedule):
    """Reschedule the calling task, because the run restarts or the barrier has to be repeated.

    Dask's transfer and unpack tasks reschedule themselves on ShuffleClosedError, its barrier task on
    Reschedule.
    """


class Stale(Exception):
    """The owners have changed since the barrier started."""


def error_of(reply: OKMessage | ErrorMessage) -> Exception | None:
    """Return the error of a reply; None if it succeeded."""
    if reply["status"] == "OK":
        return None
    _, exception, _ = clean_exception(**cast(ErrorMessage, reply))
    assert isinstance(exception, Exception)
    return exception
