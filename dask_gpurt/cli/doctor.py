"""Run ``dask gpurt doctor``: examine this machine, its configuration and a cluster, and say what is wrong."""

from __future__ import annotations

import asyncio
import json
import platform
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from importlib.metadata import PackageNotFoundError, version
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
from dask_gpurt import config, dask_hooks
from dask_gpurt.cli.cluster import connected
from dask_gpurt.config import HOOK, HOOKED, preloads
from dask_gpurt.device.discover import cuda_missing, discover
from dask_gpurt.device.host import SHM
from dask_gpurt.observe import MethodChoice
from dask_gpurt.observe.metrics import SHOWN_POOLS
from dask_gpurt.observe.report import Fallbacks, WorkerReport
from dask_gpurt.overlap import NotLoadedError
from dask_gpurt.overlap.interposer import library


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
    with connected(address) if address else nullcontext() as client:
        facts = examine(client)
    if as_json:
        click.echo(json.dumps(facts, indent=2))
    else:
        print_facts(facts)
    sys.exit(0 if facts["ok"] else 1)


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
    """Yield a line that counts the seams, and name those that differ."""
    differing = [seam for seam in seams if seam["difference"]]
    known = f"{len(seams) - len(differing)} work as the runtime expects"
    yield "Dask's parts", f"{known}, {len(differing)} differ" if differing else known
    for seam in differing:
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


# ---- facts ---------------------------------------------------------------------------------------


#: Values of ``gpurt.enabled`` that count as false if the settings are invalid and cannot be parsed.
NOT_ENABLED = (False, None, 0, "", "false", "off", "no", "0")
#: Timeout for all workers to report their versions, in seconds.
VERSIONS_TIMEOUT_S = 2.0
PACKAGES = ("dask", "distributed", "pandas", "pyarrow", "cudf", "rmm", "dask-cuda", "distributed-ucxx")


def examine(client: Client | None = None) -> dict[str, Any]:
    """Collect facts about this machine, its configuration and a cluster.

    ``client``: a synchronous client of the cluster; without one only the machine is examined.
    Returns JSON-serialisable values: ``ok``, ``settings``, ``versions``, ``machine``, ``cluster`` (None
    without a client), ``seams`` (how each private part of Dask differs), and lists of sentences:
    ``problems`` (wrong settings), ``ignored`` (settings without effect) and ``notes``.
    """
    cluster = None if client is None else _examine_cluster(client)
    settings, machine = _examine_settings(client), _examine_machine()
    installed = {
        "python": platform.python_version(),
        "dask_gpurt": dask_gpurt.__version__,
        **installed_versions(PACKAGES),
    }
    runs = cluster["enabled"] if cluster else settings["enabled"]
    settings["enabled"] |= bool(runs) and settings["follows"]
    # The cluster's setting decides on p2p, the client's on tasks.
    decides = cluster if cluster and runs and settings["method"] != "tasks" else settings
    takeover = decides["takeover"]
    settings["shuffles"] = shuffles_go(settings["method"], runs, settings["enabled"], takeover)
    wrong = list(problems(settings, machine, cluster))
    return {
        "ok": not wrong,
        "problems": wrong,
        "ignored": list(ignored(settings, cluster)),
        "notes": list(notes(installed, cluster)),
        "settings": settings,
        "versions": installed,
        "seams": [row._asdict() for row in dask_hooks.table()],
        "machine": machine,
        "cluster": cluster,
    }


def shuffles_go(method: str | None, runs: bool, enabled: bool, takeover: bool | str) -> str:
    """Return how shuffles of a client with this configuration run, as the end of a sentence.

    ``method``: the setting ``dataframe.shuffle.method``.
    ``runs``: whether the cluster has the runtime.
    ``enabled``: whether the client has it.
    ``takeover``: whether Dask's own ``p2p`` and ``tasks`` are taken over.
    """
    if runs and enabled and method in (None, "gpurt"):
        return "through the runtime"
    if runs and enabled and takeover and method == "tasks":
        return "through the runtime, in place of the configured tasks"
    if runs and takeover and method in (None, "gpurt", "p2p"):
        return "by p2p, which the runtime takes over"
    return f"by Dask's own {'default' if method in (None, 'gpurt') else method}"


# ---- this machine --------------------------------------------------------------------


def _examine_settings(client: Client | None) -> dict[str, Any]:
    valid = not config.problems()
    # A value from an environment variable may be a word such as "off".
    configured = (
        config.load().enabled if valid else dask.config.get("gpurt.enabled", False) not in NOT_ENABLED
    )
    return {
        "configured": configured,
        "valid": valid,
        "enabled": (configured and valid) or dask_gpurt.is_enabled(client) or dask_gpurt.is_enabled(),
        # Whether a client with this configuration uses the runtime of a cluster that has it on.
        "follows": valid and config.load().client and HOOK in preloads("client"),
        "takeover": config.load().takeover if valid else False,
        "method": dask.config.get("dataframe.shuffle.method", None),
        "changed": dict(_flat(config.set_here(), "gpurt")),
        "hooks": {where: HOOK in preloads(where) for where in HOOKED},
    }


def _flat(section: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        key = f"{prefix}.{name}"
        if isinstance(value, Mapping):
            yield from _flat(value, key)
        else:
            yield key, value


def _examine_machine() -> dict[str, Any]:
    devices = discover(MEMORY_LIMIT)
    missing = cuda_missing()
    allowed: Iterable[str] = config.PATHS if config.problems() else config.load().exchange.paths
    try:
        interposer = {"path": str(library()), "reason": None}
    except NotLoadedError as error:
        interposer = {"path": None, "reason": str(error)}
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
        "interposer": interposer,
    }


# ---- a cluster -----------------------------------------------------------------------


def _examine_cluster(client: Client) -> dict[str, Any]:
    scheduler: Any = client.scheduler
    found = dask_gpurt.report(client, connect=True)
    workers = found.workers
    return {
        "address": scheduler.address,
        "enabled": found.enabled,
        "takeover": found.takeover,
        "workers": len(client.nthreads()),
        "versions": _cluster_versions(client),
        "devices": dict(Counter(kind for reply in workers.values() for kind in reply.devices)),
        "paths": _count_paths(workers.values()),
        "overlap": _count_overlap(workers.values()),
        "pools": {address: reply.pools for address, reply in workers.items() if reply.error is None},
        "fallbacks": _count_fallbacks(
            [
                found.fallbacks,
                *(reply.fallbacks for reply in workers.values()),
                *(gone.fallbacks for gone in found.departed),
            ]
        ),
        "counters": dict(found.counters),
        "problems": {address: list(reply.problems) for address, reply in workers.items() if reply.problems},
        "departed": [str(gone) for gone in found.departed],
        "errors": {address: reply.error for address, reply in workers.items() if reply.error is not None},
    }


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of the installed ones of the given packages.

    ``packages``: names of packages, without the CUDA suffix of RAPIDS wheels.
    """
    found = {}
    for package in packages:
        # RAPIDS wheels have the CUDA version in their name.
        for name in (package, f"{package}-cu13", f"{package}-cu12"):
            try:
                found[package] = version(name)
                break
            except PackageNotFoundError:
                continue
    return found


def _cluster_versions(client: Client) -> dict[str, dict[str, str | None]]:
    """Return the versions of Dask and of this package on the scheduler and each worker."""

    async def ask() -> Any:
        async with asyncio.timeout(VERSIONS_TIMEOUT_S):
            found: Any = client.get_versions(packages=["dask_gpurt"])
            return await found

    try:
        found = client.sync(ask)
    except TimeoutError:  # a worker does not respond, which the report shows
        return {}
    nodes = {"scheduler": found["scheduler"], **found["workers"]}
    packages = ("dask", "dask_gpurt")
    return {node: {name: reply["packages"].get(name) for name in packages} for node, reply in nodes.items()}


def _count_paths(replies: Iterable[WorkerReport]) -> list[dict[str, Any]]:
    """Count pairs of workers by path and by the reason why it is not a better one."""
    links = [link for reply in replies for link in reply.paths.values()]
    counts = Counter((link["path"], link.get("reason")) for link in links)
    return [{"path": path, "reason": reason, "count": n} for (path, reason), n in counts.most_common()]


def _count_overlap(replies: Iterable[WorkerReport]) -> list[dict[str, Any]]:
    """Count workers by the mode of overlap in effect, and the reason why it is not the one asked for."""
    modes = [reply.overlap for reply in replies if reply.overlap]
    counts = Counter((mode["mode"], mode["reason"]) for mode in modes)
    return [{"mode": mode, "reason": reason, "count": n} for (mode, reason), n in counts.most_common()]


def _count_fallbacks(counted: Iterable[Fallbacks]) -> list[dict[str, Any]]:
    """Count fallbacks of all processes by id and reason."""
    counts: Counter[tuple[str, str, str]] = Counter()
    for fallbacks in counted:
        for id, known in fallbacks.items():
            counts[id, known.text, known.reason] += known.count
    return [
        {"id": id, "what": text, "reason": reason, "count": n}
        for (id, text, reason), n in counts.most_common()
    ]


#: The oldest and newest versions of Dask that are tested.
OLDEST, NEWEST = Version(dask_hooks.OLDEST), Version(dask_hooks.NEWEST)
DEADLOCK = (
    "before Python 3.12 and with the runtime off Dask's own sort_values and set_index can deadlock where "
    "client and scheduler share a process, as with LocalCluster: use Python 3.12, or run the scheduler in "
    "its own process"
)


def problems(
    settings: Mapping[str, Any], machine: Mapping[str, Any], cluster: Mapping[str, Any] | None
) -> Iterator[str]:
    """Yield wrong settings, here or on a worker, and workers that do not answer."""
    yield from _problems_here(settings, machine)
    if cluster:
        for node, found in cluster["versions"].items():
            if (there := found["dask_gpurt"]) != dask_gpurt.__version__:
                has = f"has dask_gpurt {there}" if there else "has no dask_gpurt"
                yield f"{node} {has}, this process has {dask_gpurt.__version__}: install the same everywhere"
        for kind in ("problems", "errors"):
            for address, found in cluster[kind].items():
                yield f"worker {address}: {'; '.join(found) if isinstance(found, list) else found}"


def _problems_here(settings: Mapping[str, Any], machine: Mapping[str, Any]) -> Iterator[str]:
    yield from config.problems()
    if (reason := dask_hooks.why_unsupported()) is not None:
        yield reason
    if settings["configured"]:
        if (reason := config.without_effect()) is not None:
            yield reason
        if not dask.config.get("distributed.scheduler.pickle", True):
            yield "'distributed.scheduler.pickle' is false: without it the runtime cannot be switched on"
    elif settings["method"] == "gpurt" and not settings["enabled"]:
        yield (
            "'dataframe.shuffle.method' is 'gpurt' while 'gpurt.enabled' is false: leave it out, the runtime "
            "chooses it by itself; without a client Dask does not know the method"
        )
    if not config.problems() and (pool := config.load().exchange.pool) and pool.bytes is not None:
        for kind, (free, total) in machine["memory"].items():
            if pool.bytes > free:
                where = SHM if kind == "host" else "the device"
                yield (
                    f"'gpurt.exchange.pool' is {pool}, but {where} has {format_bytes(free)} free of "
                    f"{format_bytes(total)}: set it to less, or to 'auto'"
                )


def ignored(settings: Mapping[str, Any], cluster: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield settings without effect."""
    enabled, method, changed = settings["enabled"], settings["method"], settings["changed"]
    served = settings["shuffles"].startswith("through the runtime")
    if (enabled or (cluster and cluster["enabled"])) and method is not None and not served:
        yield (
            f"the runtime is on, but 'dataframe.shuffle.method' is {method!r}: "
            f"shuffles go {settings['shuffles']}"
        )
    if settings["configured"] and any(settings["hooks"].values()):
        for where, there in settings["hooks"].items():
            if not there:
                yield (
                    f"'distributed.{where}.preload' is {preloads(where)}, which leaves {HOOK!r} out (Dask "
                    f"replaces such lists, it does not join them): a {where} does not read 'gpurt.enabled'"
                )
    if cluster and cluster["enabled"]:
        if bool(settings["takeover"]) != bool(cluster["takeover"]):
            yield (
                f"'gpurt.takeover' is {as_yaml(settings['takeover'])} here, but the cluster was switched on "
                f"with {as_yaml(cluster['takeover'])}, which applies to p2p until it is switched off"
            )
    elif not enabled and not settings["configured"]:
        for key, value in changed.items():
            if key != "gpurt.enabled":
                yield f"{key!r} is {as_yaml(value)}, but 'gpurt.enabled' is false"


def notes(versions: Mapping[str, str], cluster: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield notes on versions and their known bugs."""
    dasks = {versions["dask"]}
    if cluster:
        dasks.update(found["dask"] for found in cluster["versions"].values() if found["dask"])
    for number in sorted(dasks):
        if not OLDEST <= Version(number) <= NEWEST:
            yield f"Dask {number} is outside the tested range, {OLDEST} to {NEWEST}"
    if "dask-cuda" in versions:
        yield (
            "workers of dask-cuda do not read 'distributed.worker.preload'; their nannies read "
            "'distributed.nanny.preload', and `--preload dask_gpurt` works"
        )
    if sys.version_info < (3, 12) and not (cluster and cluster["enabled"]):
        yield DEADLOCK


def as_yaml(value: object) -> str:
    """Format a value as in a yaml file."""
    return str(value).lower() if isinstance(value, bool) else repr(value)
