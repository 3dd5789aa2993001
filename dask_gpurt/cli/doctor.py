"""``dask gpurt doctor``: what is on, which ways bytes take, what fell back, and which settings are wrong."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import dask
from dask.utils import format_bytes
from distributed import Client
from distributed.system import MEMORY_LIMIT
from packaging.version import Version
from rich.console import Console
from rich.table import Table

import dask_gpurt
from dask_gpurt import config
from dask_gpurt.cli.environment import installed_versions
from dask_gpurt.device.discover import cuda_missing, discover
from dask_gpurt.device.host import SHM
from dask_gpurt.overlap import NotLoadedError
from dask_gpurt.overlap.interposer import library
from dask_gpurt.topology.file import TopologyError, load

#: The versions of Dask that the tests run with.
OLDEST, NEWEST = Version("2026.7.1"), Version("2026.8.0")
PACKAGES = ("dask", "distributed", "pandas", "pyarrow", "cudf", "rmm", "dask-cuda", "distributed-ucxx")
HOOK = "dask_gpurt.preload"
#: The processes that may switch the runtime on when they start.
HOOKED = ("client", "scheduler", "worker", "nanny")
DEADLOCK = (
    "before Python 3.12 Dask's own set_index can deadlock where client and scheduler share a process, as "
    "with LocalCluster: functools.cached_property has one lock for a whole class there. Python 3.12 has none"
)


@click.command()
@click.option(
    "--scheduler", metavar="ADDRESS", help="The cluster to examine. [default: scheduler-address of Dask]"
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(scheduler: str | None, as_json: bool) -> None:
    """Say what is on, what falls back and why, and which settings are wrong.

    Without a scheduler this machine and its configuration are examined. Exits with 1 when a setting is wrong.
    """
    address = scheduler or dask.config.get("scheduler-address", None)
    facts = examine_at(address) if address else examine()
    if as_json:
        click.echo(json.dumps(facts, indent=2))
    else:
        print_facts(facts)
    sys.exit(0 if facts["ok"] else 1)


def examine_at(address: str) -> dict[str, Any]:
    """Examine this machine and the cluster of a scheduler, which stays as it is.

    Parameters
    ----------
    address
        Of the scheduler.
    """
    with connected(address) as client:
        return examine(client)


def connected(address: str) -> Client:
    """A client of a cluster, which stays as it is.

    Parameters
    ----------
    address
        Of the scheduler.

    Raises
    ------
    click.ClickException
        When no scheduler answers.
    """
    # A client that ran our hook would switch the runtime on, and so change what it looks at.
    with dask.config.set({"distributed.client.preload": []}):
        try:
            return Client(address, set_as_default=False)
        except (OSError, ValueError) as error:
            raise click.ClickException(f"no scheduler answers at {address}: {error}") from error


def examine(client: Client | None = None) -> dict[str, Any]:
    """Gather what there is to know of this machine, of its configuration and of a cluster.

    Parameters
    ----------
    client
        Of the cluster, not asynchronous; without one the machine is examined alone.

    Returns
    -------
    dict
        Values that JSON holds: ``ok``, ``settings``, ``versions``, ``machine``, ``cluster`` (None without a
        client), and lists of sentences: ``problems``, settings that are wrong; ``ignored``, settings without
        effect; ``notes``.
    """
    cluster = None if client is None else _examine_cluster(client)
    settings, machine, versions = _examine_settings(client), _examine_machine(), _installed()
    runs = cluster["enabled"] if cluster else settings["enabled"]
    takeover = cluster["takeover"] if cluster and runs else settings["takeover"]
    settings["shuffles"] = shuffles_go(settings["method"], runs, settings["enabled"], takeover)
    problems = [*_problems(settings, machine), *_problems_of_workers(cluster)]
    return {
        "ok": not problems,
        "problems": problems,
        "ignored": list(_ignored(settings, cluster)),
        "notes": list(_notes(versions, cluster)),
        "settings": settings,
        "versions": versions,
        "machine": machine,
        "cluster": cluster,
    }


def shuffles_go(method: str | None, runs: bool, enabled: bool, takeover: bool) -> str:
    """Say which way a shuffle takes that a client with this configuration asks for.

    Parameters
    ----------
    method
        The setting ``dataframe.shuffle.method``.
    runs
        Whether the cluster has the runtime.
    enabled
        Whether the client has it.
    takeover
        Whether the cluster serves Dask's own ``p2p`` shuffles too.
    """
    if runs and enabled and method in (None, "gpurt"):
        return "through the runtime"
    if runs and takeover and method in (None, "gpurt", "p2p"):
        return "by p2p, which the runtime takes over"
    return f"by Dask's own {'default' if method in (None, 'gpurt') else method}"


# ---- this machine --------------------------------------------------------------------


def _examine_settings(client: Client | None) -> dict[str, Any]:
    try:
        settings = config.load()
        configured, takeover = settings.enabled, settings.takeover
    except config.ConfigError:
        configured = takeover = False
    return {
        "configured": configured,
        "enabled": configured or dask_gpurt.is_enabled(client) or dask_gpurt.is_enabled(),
        "takeover": takeover,
        "method": dask.config.get("dataframe.shuffle.method", None),
        "changed": dict(_flat(config.set_here(), "gpurt")),
        "hooks": {where: HOOK in _preloads(where) for where in HOOKED},
    }


def _flat(section: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        key = f"{prefix}.{name}"
        if isinstance(value, Mapping):
            yield from _flat(value, key)
        else:
            yield key, value


def _preloads(where: str) -> list[str]:
    names = dask.config.get(f"distributed.{where}.preload", None) or []
    return [names] if isinstance(names, str) else list(names)


def _examine_machine() -> dict[str, Any]:
    devices = discover(MEMORY_LIMIT)
    missing = cuda_missing()
    allowed: Iterable[str] = config.PATHS
    if not config.problems():
        allowed = config.load().exchange.paths
    free, total = devices["host"].memory()
    return {
        "devices": {kind: device.describe() for kind, device in devices.items()},
        "memory": {kind: device.memory() for kind, device in devices.items()},
        "tables": ["pandas"] if missing else ["pandas", "cudf"],
        "missing": {"cuda": missing} if missing else {},
        "paths": sorted(
            {*(device.shared_path for device in devices.values()), "comms"}.intersection(allowed)
        ),
        "shm": {"free": free, "total": total},
        "interposer": _examine_interposer(),
    }


def _examine_interposer() -> dict[str, str | None]:
    try:
        return {"path": str(library()), "reason": None}
    except NotLoadedError as error:
        return {"path": None, "reason": str(error)}


def _installed() -> dict[str, str]:
    python = ".".join(map(str, sys.version_info[:3]))
    return {"python": python, "dask_gpurt": dask_gpurt.__version__, **installed_versions(PACKAGES)}


# ---- a cluster -----------------------------------------------------------------------


def _examine_cluster(client: Client) -> dict[str, Any]:
    scheduler: Any = client.scheduler
    found = dask_gpurt.report(client, connect=True)
    workers: dict[str, Any] = found["workers"]
    return {
        "address": scheduler.address,
        "enabled": found["enabled"],
        "takeover": found.get("takeover", False),
        "workers": len(client.nthreads()),
        "versions": _cluster_versions(client),
        "devices": dict(Counter(kind for reply in workers.values() for kind in reply.get("devices", {}))),
        "paths": _count_paths(workers.values()),
        "residency": _count_residency(workers.values()),
        "pools": {address: reply["pools"] for address, reply in workers.items() if "pools" in reply},
        "fallbacks": _count_fallbacks([found, *workers.values()]),
        "counters": found["counters"],
        "problems": {
            address: reply["problems"] for address, reply in workers.items() if reply.get("problems")
        },
        "errors": {address: reply["error"] for address, reply in workers.items() if "error" in reply},
    }


def _cluster_versions(client: Client) -> dict[str, dict[str, str | None]]:
    """The versions of Dask and of this package: of the scheduler, of each worker."""
    found: Any = client.get_versions(packages=["dask_gpurt"])
    nodes = {"scheduler": found["scheduler"], **found["workers"]}
    packages = ("dask", "dask_gpurt")
    return {node: {name: reply["packages"].get(name) for name in packages} for node, reply in nodes.items()}


def _count_paths(replies: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """How many pairs of workers take which path, and why it is not a better one."""
    links = [link for reply in replies for link in reply.get("paths", {}).values()]
    counts = Counter((link["path"], link.get("reason")) for link in links)
    return [{"path": path, "reason": reason, "count": n} for (path, reason), n in counts.most_common()]


def _count_residency(replies: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """How many workers have which residency caps, or why they have none."""
    counts = Counter(tuple(reply["residency"].values()) for reply in replies if "residency" in reply)
    return [
        {"setting": setting, "ready": ready, "reason": reason, "count": n}
        for (setting, ready, reason), n in counts.most_common()
    ]


def _count_fallbacks(replies: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    counts: Counter[tuple[str, str]] = Counter()
    for reply in replies:
        for what, known in reply.get("fallbacks", {}).items():
            counts[what, known["reason"]] += known["count"]
    return [{"what": what, "reason": reason, "count": n} for (what, reason), n in counts.most_common()]


# ---- what to make of it --------------------------------------------------------------


def _problems(settings: Mapping[str, Any], machine: Mapping[str, Any]) -> Iterator[str]:
    yield from config.problems()
    if settings["configured"]:
        if not any(settings["hooks"].values()):
            yield (
                f"'gpurt.enabled' is true, but no preload list of Dask has {HOOK!r}, so nothing reads it: "
                "install the package with pip, which brings etc/dask/gpurt.yaml, or add it to "
                "'distributed.client.preload'"
            )
        if not dask.config.get("distributed.scheduler.pickle", True):
            yield "'distributed.scheduler.pickle' is false: without it the runtime can not be switched on"
    elif settings["method"] == "gpurt" and not settings["enabled"]:
        yield (
            "'dataframe.shuffle.method' is 'gpurt' while 'gpurt.enabled' is false: leave it out, the runtime "
            "chooses it by itself; without a client Dask does not know the method"
        )
    if not config.problems() and (file := config.load().topology.file):
        yield from _problems_of_file(file)
    if not config.problems() and (pool := config.load().exchange.pool) and pool.bytes is not None:
        for kind, (free, total) in machine["memory"].items():
            if pool.bytes > free:
                where = SHM if kind == "host" else "the device"
                yield (
                    f"'gpurt.exchange.pool' is {pool}, but {where} has {format_bytes(free)} free of "
                    f"{format_bytes(total)}: set it to less, or to 'auto'"
                )


def _problems_of_file(name: str) -> Iterator[str]:
    if Path(name).exists():  # elsewhere it may be on the scheduler's machine alone
        try:
            load(name)
        except TopologyError as error:
            yield str(error)


def _problems_of_workers(cluster: Mapping[str, Any] | None) -> Iterator[str]:
    if cluster:
        for kind in ("problems", "errors"):
            for address, found in cluster[kind].items():
                yield f"worker {address}: {'; '.join(found) if isinstance(found, list) else found}"


def _ignored(settings: Mapping[str, Any], cluster: Mapping[str, Any] | None) -> Iterator[str]:
    enabled, method, changed = settings["enabled"], settings["method"], settings["changed"]
    if (enabled or (cluster and cluster["enabled"])) and method not in (None, "gpurt"):
        yield (
            f"the runtime is on, but 'dataframe.shuffle.method' is {method!r}: "
            f"shuffles go {settings['shuffles']}"
        )
    if settings["configured"] and any(settings["hooks"].values()):
        for where, there in settings["hooks"].items():
            if not there:
                yield (
                    f"'distributed.{where}.preload' is {_preloads(where)}, which leaves {HOOK!r} out (Dask "
                    f"replaces such lists, it does not join them): a {where} does not read 'gpurt.enabled'"
                )
    if cluster and cluster["enabled"]:
        if settings["takeover"] != cluster["takeover"]:
            yield (
                f"'gpurt.takeover' is {_yaml(settings['takeover'])} here, but the cluster was switched on "
                f"with {_yaml(cluster['takeover'])}, which counts until it is switched off"
            )
    elif not enabled:
        for key, value in changed.items():
            if key != "gpurt.enabled":
                yield f"{key!r} is {_yaml(value)}, but 'gpurt.enabled' is false"


def _notes(versions: Mapping[str, str], cluster: Mapping[str, Any] | None) -> Iterator[str]:
    dasks = {versions["dask"]}
    if cluster:
        dasks.update(found["dask"] for found in cluster["versions"].values() if found["dask"])
        for node, found in cluster["versions"].items():
            if found["dask_gpurt"] != versions["dask_gpurt"]:
                has = f"has dask_gpurt {found['dask_gpurt']}" if found["dask_gpurt"] else "has no dask_gpurt"
                yield f"{node} {has}, this process has {versions['dask_gpurt']}: install the same everywhere"
    for number in sorted(dasks):
        if not OLDEST <= Version(number) <= NEWEST:
            yield f"Dask {number} is outside of what is tested, {OLDEST} to {NEWEST}"
    if "dask-cuda" in versions:
        yield (
            "workers of dask-cuda do not read 'distributed.worker.preload'; their nannies read "
            "'distributed.nanny.preload', and `--preload dask_gpurt` works"
        )
    if sys.version_info < (3, 12):
        yield DEADLOCK


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


# ---- for people ----------------------------------------------------------------------


def print_facts(facts: Mapping[str, Any]) -> None:
    """Print what :func:`examine` has found.

    Parameters
    ----------
    facts
        Its result.
    """
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


def _residency(found: Mapping[str, Any]) -> str:
    setting = found["setting"]
    if not found["ready"]:
        return found["reason"] or "off"
    return f"{setting} blocks of a kernel on an SM" if isinstance(setting, int) else "loaded, no caps set"


def _lines(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    settings, machine, cluster = facts["settings"], facts["machine"], facts["cluster"]
    yield "Versions", ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    yield "gpurt.enabled", f"{_yaml(settings['configured'])} in this configuration"
    if cluster:
        state = f"on, takeover {_yaml(cluster['takeover'])}" if cluster["enabled"] else "off"
        yield "Cluster", f"{cluster['address']}, {cluster['workers']} workers: the runtime is {state}"
    yield "Method", f"{settings['method'] or 'not set'}: shuffles go {settings['shuffles']}"
    missing = [f"no {what}: {reason}" for what, reason in machine["missing"].items()]
    yield "Devices", "; ".join([*machine["devices"], *missing])
    yield "Tables", ", ".join(machine["tables"])
    shm = machine["shm"]
    yield SHM, f"{format_bytes(shm['free'])} free of {format_bytes(shm['total'])}"
    if cluster is None or not cluster["enabled"]:
        reason = machine["interposer"]["reason"]
        yield "Residency", reason or "the interposer is built"
        yield "Paths", f"{', '.join(machine['paths'])} where both workers can"
        return
    for link in cluster["paths"]:
        yield (
            "Path",
            f"{link['count']} times {link['path']}" + (f": {link['reason']}" if link["reason"] else ""),
        )
    for found in cluster["residency"]:
        yield "Residency", f"{found['count']} workers: {_residency(found)}"
    for kind in sorted({kind for pools in cluster["pools"].values() for kind in pools}):
        pools = [found[kind] for found in cluster["pools"].values() if kind in found]
        used, capacity = (sum(pool[what] for pool in pools) for what in ("used", "capacity"))
        yield (
            "Pools",
            f"{kind}: {format_bytes(used)} of {format_bytes(capacity)} used, on {len(pools)} workers",
        )
    for fallback in cluster["fallbacks"]:
        yield "Fell back", f"{fallback['count']} times, {fallback['what']}: {fallback['reason']}"
    if not cluster["fallbacks"]:
        yield "Fell back", "nothing"
