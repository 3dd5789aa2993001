"""Run ``dask gpurt doctor``: print the state of the runtime, paths, fallbacks, and wrong settings."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click
import dask
from dask.utils import format_bytes
from rich.console import Console
from rich.table import Table

from dask_gpurt.cli.cluster import connected
from dask_gpurt.cli.examine import as_yaml, examine
from dask_gpurt.dask_hooks import State
from dask_gpurt.device.host import SHM
from dask_gpurt.observe import MethodChoice
from dask_gpurt.observe.shown_tiers import SHOWN_POOLS

#: What is printed for the state of a part of Dask that the runtime replaces or relies on.
SEAM_STATES: Mapping[str, str] = {
    State.KNOWN: "work as the runtime expects",
    State.DIFFERS: "differ",
    State.UNUSED: "are not needed with these settings",
}


@click.command(short_help="Show what is on, falls back, or is set wrong.")
@click.option(
    "--scheduler", metavar="ADDRESS", help="The cluster to examine. [default: scheduler-address of Dask]"
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(scheduler: str | None, as_json: bool) -> None:
    """Show whether the runtime is on, what falls back and why, and which settings are wrong.

    Without a scheduler, the command examines this machine and its configuration. The exit code is 1 when a
    setting is wrong.
    """
    address = scheduler or dask.config.get("scheduler-address", None)
    facts = examine_at(address) if address else examine()
    if as_json:
        click.echo(json.dumps(facts, indent=2))
    else:
        print_facts(facts)
    sys.exit(0 if facts["ok"] else 1)


def examine_at(address: str) -> dict[str, Any]:
    """Examine this machine and the cluster of a scheduler, without changing the cluster."""
    with connected(address) as client:
        return examine(client)


# ---- printing ------------------------------------------------------------------------


def print_facts(facts: Mapping[str, Any]) -> None:
    """Print the result of :func:`examine`."""
    console = Console(highlight=False)
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _lines(facts):
        table.add_row(name, value)
    console.print(table)
    for mark, style, kind in (("✗", "red", "problems"), ("!", "yellow", "ignored"), ("·", "dim", "notes")):
        for sentence in facts[kind]:
            console.print(f"{mark} {sentence}", style=style, markup=False)
    if facts["ok"]:
        console.print("✓ no setting is wrong", style="green")


def _several(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _seam_lines(seams: Sequence[Mapping[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield lines that count the seams by state, and name those that differ."""
    states = Counter(seam["state"] for seam in seams)
    yield "Dask's parts", ", ".join(f"{count} {SEAM_STATES[state]}" for state, count in states.items())
    for seam in seams:
        if seam["difference"]:
            yield "Differs", f"{seam['part']}, {seam['difference']}"


def _method_lines(counters: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """Yield lines that count the shuffles that went through the runtime or were left to Dask, by reason."""
    if runs := counters.get("shuffle.taken-over"):
        yield "Served", f"{_several(int(runs), 'run')} of p2p shuffles"
    for choice in MethodChoice:
        if count := choice.counted(counters):
            line = "Served" if choice.taken else "Left to Dask"
            yield line, f"{_several(count, 'shuffle')}: {choice.text}"


def _path_lines(paths: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield lines that count the connections by path; that of a worker to itself goes without saying."""
    for link in paths:
        if link["path"] != "local":
            why = f", because {link['reason']}" if link["reason"] else ""
            yield "Path", f"{link['path']}: {_several(link['count'], 'connection')} between workers{why}"


def _lines(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    settings, machine, cluster = facts["settings"], facts["machine"], facts["cluster"]
    yield "Versions", ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    stays_off = settings["configured"] and not settings["valid"]
    but = ", but a setting is wrong and keeps the runtime off" if stays_off else ""
    yield "gpurt.enabled", f"{as_yaml(settings['configured'])} in this configuration{but}"
    if cluster:
        state = f"on, with takeover {as_yaml(cluster['takeover'])}" if cluster["enabled"] else "off"
        workers = _several(cluster["workers"], "worker")
        yield "Cluster", f"{cluster['address']}, {workers}: the runtime is {state}"
    yield from _seam_lines(facts["seams"])
    yield "Method", f"{settings['method'] or 'not set'}: shuffles go {settings['shuffles']}"
    missing = [f"no {what}: {reason}" for what, reason in machine["missing"].items()]
    yield "Devices", "; ".join([*machine["devices"], *missing])
    yield "Tables", ", ".join(machine["tables"])
    shm = machine["shm"]
    yield SHM, f"{format_bytes(shm['free'])} free of {format_bytes(shm['total'])}"
    if cluster is None or not cluster["enabled"]:
        if "cuda" in machine["devices"]:
            yield "Overlap", machine["interposer"]["reason"] or "caps are possible: the interposer is built"
        yield "Paths", f"{', '.join(machine['paths'])} where both workers can"
        return
    yield from _method_lines(cluster["counters"])
    yield from _path_lines(cluster["paths"])
    for sentence in cluster["departed"]:
        yield "Left", sentence
    for found in cluster["overlap"] if "cuda" in cluster["devices"] else ():
        why = f", because {found['reason']}" if found["reason"] else ""
        yield "Overlap", f"{found['mode']} on {_several(found['count'], 'worker')}{why}"
    for kind in sorted({kind for pools in cluster["pools"].values() for kind in pools}):
        pools = [found[kind] for found in cluster["pools"].values() if kind in found]
        used, capacity = (sum(pool[what] for pool in pools) for what in ("used", "capacity"))
        used_of = f"{format_bytes(used)} of {format_bytes(capacity)} used"
        yield "Pools", f"{SHOWN_POOLS.get(kind, kind)}: {used_of}, on {_several(len(pools), 'worker')}"
    for fallback in cluster["fallbacks"]:
        what = f"{fallback['what']} ({fallback['id']})"
        yield "Fell back", f"{_several(fallback['count'], 'time')}, {what}: {fallback['reason']}"
    if not cluster["fallbacks"]:
        yield "Fell back", "nothing"
