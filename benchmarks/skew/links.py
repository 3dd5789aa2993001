"""Run each worker on a host of its own with a link that can be slowed down."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from distributed import Client

from benchmarks.two_hosts.servers import servers
from benchmarks.two_hosts.star import Star

if TYPE_CHECKING:
    from benchmarks.skew.clusters import Plan

#: The port of the first scheduler, and the distance to the next: each serves HTTP on the port after its own.
PORT, PORTS_APART = 8786, 10


@contextlib.contextmanager
def cluster_on(star: Star, plan: Plan, number: int) -> Iterator[Client]:
    """Run a scheduler on the switch and a worker on each host, and yield a client.

    Parameters
    ----------
    number
        Number of the cluster on these hosts, which selects its ports.
    """
    port = PORT + PORTS_APART * number
    with (
        tempfile.TemporaryDirectory() as scratch,
        servers(star.switch, star.hosts, port, Path(scratch), plan.memory_limit, plan.threads) as client,
    ):
        yield client
