"""Run ``dask gpurt topology``: print the GPUs of a host, the links between them, and their speeds."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

import click
from dask.utils import format_time
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from dask_gpurt.cli.cluster import connected
from dask_gpurt.topology import SHIPPED, Link, Speed
from dask_gpurt.topology.hosts import Gpu, Host, discover, nvml_missing, visible_devices
from dask_gpurt.topology.model import OF_GPUS


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
        values = {"speeds": {}, "hosts": {host.name: host.to_dict()}, "workers": {}}
    else:
        values = _of_cluster(scheduler)
    if as_json:
        click.echo(json.dumps(values, indent=2))
    else:
        print_topology(values, here=scheduler is None)


def _of_cluster(address: str) -> dict[str, Any]:
    with connected(address) as client:
        remote: Any = client.scheduler
        values = client.sync(remote.gpurt_topology)
    if values is None:
        raise click.ClickException(
            f"the runtime is off at {address}: dask_gpurt.enable(client) switches it on"
        )
    found: dict[str, Any] = values
    return found


# ---- printing ------------------------------------------------------------------------


def print_topology(values: Mapping[str, Any], here: bool) -> None:
    """Print a table of links for each host, and a table of speeds.

    ``values``: as of the handler ``gpurt_topology``.
    ``here``: whether it is that of this host, so that the GPU of this process can be marked.
    """
    console = Console(highlight=False)
    hosts = [Host.of(name, host) for name, host in values["hosts"].items()]
    for host in hosts:
        own = host.find(visible_devices()) if here else None
        gpus = f"{len(host.gpus) or 'no'} GPU{'s' if len(host.gpus) != 1 else ''}"
        console.print(f"[bold]{host.name}[/]: {', '.join([gpus, *(f'{nic} RDMA' for nic in host.nics)])}")
        if host.gpus:
            console.print(_matrix(host, own))
        elif here and (reason := nvml_missing()):
            console.print(f"GPUs are detected with NVML: {reason}", style="dim")
    console.print(_speeds(hosts, values["speeds"]))
    if values["workers"]:
        console.print(_workers(values["workers"]))


def _matrix(host: Host, own: Gpu | None) -> Table:
    table = Table(box=SIMPLE_HEAD)
    for heading in ("", "GPU", *(str(gpu.index) for gpu in host.gpus)):
        table.add_column(heading)
    for gpu, row in zip(host.gpus, host.matrix(), strict=True):
        joins = ("·" if link == Link.SAME_DEVICE else link for link in row)
        mark = "→" if gpu is own else " "
        table.add_row(f"{mark}{gpu.index}", f"{gpu.name} {gpu.id[:12]}", *joins)
    return table


def _speeds(hosts: Collection[Host], measured: Mapping[str, Mapping[str, float]]) -> Table:
    """Return the speeds of the links that the hosts can have, and those that are measured."""
    absent = {
        *(() if any(host.gpus for host in hosts) else OF_GPUS),
        *(() if any(host.nics for host in hosts) else (Link.RDMA,)),
    }
    table = Table("link", "bandwidth", "latency", "known", box=SIMPLE_HEAD)
    for link in Link:
        if hosts and link in absent and link not in measured:
            continue
        speed = Speed(**measured[link]) if link in measured else SHIPPED[link]
        source = "by measurement" if link in measured else "by default"
        table.add_row(
            link, f"{_three_digits(speed.bandwidth / 1e9)} GB/s", format_time(speed.latency), source
        )
    return table


def _three_digits(number: float) -> str:
    return f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"


def _workers(workers: Mapping[str, Mapping[str, str | None]]) -> Table:
    table = Table("worker", "host", "GPU", box=SIMPLE_HEAD)
    for worker, place in workers.items():
        table.add_row(worker, place["host"], place["gpu"] or "")
    return table
