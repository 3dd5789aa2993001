"""Run ``dask gpurt topology``: print the GPUs of a host, the links between them, and their speeds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import click
from dask.utils import format_time
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from dask_gpurt.cli.cluster import connected
from dask_gpurt.topology import SHIPPED, Link
from dask_gpurt.topology.description import Description
from dask_gpurt.topology.detect import discover, nvml_missing, visible_devices
from dask_gpurt.topology.hosts import Gpu, Host, Nic


@click.command(short_help="Show devices, the links between them, their speeds.")
@click.option(
    "--scheduler", metavar="ADDRESS", help="Show the topology that the scheduler of a cluster uses."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def topology(scheduler: str | None, as_json: bool) -> None:
    """Show the devices of this host or of a cluster, the links between them, and their speeds.

    With --scheduler, speeds are those measured from transfers.
    """
    if scheduler is None:
        host = discover()
        description = Description(hosts={host.name: host})
    else:
        description = _of_cluster(scheduler)
    if as_json:
        click.echo(json.dumps(description.to_dict(), indent=2))
    else:
        print_description(description, here=scheduler is None)


def _of_cluster(address: str) -> Description:
    with connected(address) as client:
        remote: Any = client.scheduler
        values = client.sync(remote.gpurt_topology)
    if values is None:
        raise click.ClickException(
            f"the runtime is off at {address}: dask_gpurt.enable(client) switches it on"
        )
    return Description.of(values)


# ---- printing ------------------------------------------------------------------------


def print_description(description: Description, here: bool) -> None:
    """Print a table of links for each host, and a table of speeds.

    Parameters
    ----------
    here
        Whether it is that of this host, so that the GPU of this process can be marked.
    """
    console = Console(highlight=False)
    for name, host in description.hosts.items():
        own = host.find(visible_devices()) if here else None
        console.print(f"[bold]{name}[/]: {', '.join(_parts(host))}")
        if host.gpus:
            console.print(_matrix(host, own))
        elif here and (reason := nvml_missing()):
            console.print(f"GPUs are detected with NVML: {reason}", style="dim")
    console.print(_speeds(description))
    if description.workers:
        console.print(_workers(description))


def _parts(host: Host) -> Iterator[str]:
    yield f"{len(host.gpus) or 'no'} GPU{'s' if len(host.gpus) != 1 else ''}"
    yield from map(_nic, host.nics)


def _nic(nic: Nic) -> str:
    speed = f" {nic.speed * 8 / 1e9:g} Gbit/s" if nic.speed else ""
    return f"{nic.name}{speed}{' RDMA' if nic.rdma else ''}"


def _matrix(host: Host, own: Gpu | None) -> Table:
    table = Table(box=SIMPLE_HEAD)
    for heading in ("", "GPU", *(str(gpu.index) for gpu in host.gpus)):
        table.add_column(heading)
    for gpu, row in zip(host.gpus, host.matrix(), strict=True):
        joins = ("·" if link == Link.SAME_DEVICE else link for link in row)
        mark = "→" if gpu is own else " "
        table.add_row(f"{mark}{gpu.index}", f"{gpu.name} {gpu.id[:12]}", *joins)
    return table


def _speeds(description: Description) -> Table:
    table = Table("link", "bandwidth", "latency", "known", box=SIMPLE_HEAD)
    for link in description.links():
        speed = description.speeds.get(link, SHIPPED[link])
        source = "by measurement" if link in description.speeds else "by default"
        table.add_row(
            link, f"{_three_digits(speed.bandwidth / 1e9)} GB/s", format_time(speed.latency), source
        )
    return table


def _three_digits(number: float) -> str:
    return f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"


def _workers(description: Description) -> Table:
    table = Table("worker", "host", "GPU", box=SIMPLE_HEAD)
    for worker, (host, gpu) in description.workers.items():
        table.add_row(worker, host, gpu or "")
    return table
