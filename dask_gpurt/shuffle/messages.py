"""Define the messages of a run from worker to worker, and the errors that they end with.

Dask's ``shuffle_receive`` carries them. docs/design/exactly-once.md says when each is sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, cast

from distributed.core import ErrorMessage, OKMessage, clean_exception
from distributed.exceptions import Reschedule

from dask_gpurt.dask_hooks.shuffle import P2PConsistencyError, ShuffleClosedError
from dask_gpurt.exchange import Attempt, Commit, ExchangeClosed, PeerLost, Shard


class Seal(NamedTuple):
    """Ask a worker to deliver what it still has to offer, then to close its lists of shards.

    Attributes
    ----------
    succeeded
        The attempt that counts at each input.
    """

    succeeded: Mapping[int, Attempt]


class Retire(NamedTuple):
    """Ask an owner to let go of shares that have been given to others."""

    shares: frozenset[int]


#: Messages from worker to worker.
Message = list[Shard | Commit] | Seal | Retire
#: The errors with which messages to a worker end that has left, closes, or has ended its part of the run.
GONE = (PeerLost, ExchangeClosed, P2PConsistencyError)


class RunInterrupted(ShuffleClosedError, Reschedule):
    """Tell the tasks of a run that begins again that they are to be scheduled again.

    Dask's transfer and unpack tasks take a ShuffleClosedError for that, its barrier task only a Reschedule.
    """


class Stale(Exception):
    """The barrier was begun with other owners than there are now."""


def error_of(reply: OKMessage | ErrorMessage) -> Exception | None:
    """Return the error of an answer, None of one that is a success."""
    if reply["status"] == "OK":
        return None
    _, exception, _ = clean_exception(**cast(ErrorMessage, reply))
    assert isinstance(exception, Exception)
    return exception
