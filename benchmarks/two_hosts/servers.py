"""Run a scheduler and workers on hosts, and count the bytes on the hosts' links."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from distributed import Client

from benchmarks.two_hosts.hosts import LINK, PATIENCE_S, Host

DASK = (sys.executable, "-m", "dask")


@contextlib.contextmanager
def servers(
    scheduler: Host,
    hosts: Sequence[Host],
    port: int,
    scratch: Path,
    memory_limit: int | str,
    threads: int = 1,
) -> Iterator[Client]:
    """Run a scheduler and workers until the end of the block, and yield a client.

    Parameters
    ----------
    scheduler
        The host of the scheduler, from whose network the client connects.
    hosts
        The host of each worker.
    port
        The scheduler's port.
    scratch
        Folder of the workers' files.
    memory_limit
        Bytes of each worker.
    threads
        Task threads of each worker.
    """
    address = f"tcp://{scheduler.address}:{port}"
    with contextlib.ExitStack() as processes:
        where = ("--host", scheduler.address, "--port", str(port), "--no-dashboard")
        scheduler.start(*DASK, "scheduler", *where, stack=processes)
        for host in hosts:
            limits = ("--nthreads", str(threads), "--memory-limit", str(memory_limit))
            options = ("--host", host.address, "--no-nanny", "--no-dashboard", *limits)
            files = ("--local-directory", str(scratch))
            host.start(*DASK, "worker", address, *options, *files, stack=processes)
        with scheduler.network():
            client = Client(address, timeout=PATIENCE_S, set_as_default=False)
        with client:
            client.wait_for_workers(len(hosts), timeout=2 * PATIENCE_S)
            yield client


def link_bytes(client: Client, workers: list[str] | None = None) -> dict[str, tuple[int, int]]:
    """Return the bytes sent and received so far by the link of the host of each worker; 0 without links."""
    found: dict[str, tuple[int, int]] = client.run(_sent_and_received, workers=workers)
    return found


def _sent_and_received() -> tuple[int, int]:
    counts = Path(f"/sys/class/net/{LINK}/statistics")
    if not counts.exists():
        return 0, 0
    return int((counts / "tx_bytes").read_text()), int((counts / "rx_bytes").read_text())
