"""Collect facts about this machine, its configuration and a cluster."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import dask
from distributed import Client
from distributed.system import MEMORY_LIMIT

import dask_gpurt
from dask_gpurt import config, dask_hooks
from dask_gpurt.cli.environment import versions
from dask_gpurt.cli.verdicts import HOOK, HOOKED, ignored, notes, preloads, problems
from dask_gpurt.device.discover import cuda_missing, discover
from dask_gpurt.observe.report import Fallbacks, WorkerReport
from dask_gpurt.overlap import NotLoadedError
from dask_gpurt.overlap.interposer import library

#: Values of ``gpurt.enabled`` that count as false if the settings are invalid and cannot be parsed.
NOT_ENABLED = (False, None, 0, "", "false", "off", "no", "0")
#: Timeout for all workers to report their versions, in seconds.
VERSIONS_TIMEOUT_S = 2.0
PACKAGES = ("dask", "distributed", "pandas", "pyarrow", "cudf", "rmm", "dask-cuda", "distributed-ucxx")


def examine(client: Client | None = None) -> dict[str, Any]:
    """Collect facts about this machine, its configuration and a cluster.

    Parameters
    ----------
    client
        A synchronous client of the cluster; without one only the machine is examined.

    Returns
    -------
    dict
        JSON-serialisable values: ``ok``, ``settings``, ``versions``, ``machine``, ``cluster`` (None without a
        client), ``seams`` (the state of each private part of Dask), and lists of sentences: ``problems``
        (wrong settings), ``ignored`` (settings without effect) and ``notes``.
    """
    cluster = None if client is None else _examine_cluster(client)
    settings, machine = _examine_settings(client), _examine_machine()
    installed = versions(PACKAGES, own="dask_gpurt")
    runs = cluster["enabled"] if cluster else settings["enabled"]
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
        "seams": [row._asdict() for row in dask_hooks.table(_unused_parts())],
        "machine": machine,
        "cluster": cluster,
    }


def shuffles_go(method: str | None, runs: bool, enabled: bool, takeover: bool | str) -> str:
    """Return how shuffles of a client with this configuration run, as the end of a sentence.

    Parameters
    ----------
    method
        The setting ``dataframe.shuffle.method``.
    runs
        Whether the cluster has the runtime.
    enabled
        Whether the client has it.
    takeover
        Whether Dask's own ``p2p`` and ``tasks`` are taken over.
    """
    if runs and enabled and method in (None, "gpurt"):
        return "through the runtime"
    if runs and enabled and takeover and method == "tasks":
        return "through the runtime, in place of the configured tasks"
    if runs and takeover and method in (None, "gpurt", "p2p"):
        return "by p2p, which the runtime takes over"
    return f"by Dask's own {'default' if method in (None, 'gpurt') else method}"


def _unused_parts() -> tuple[dask_hooks.SeamGroup, ...]:
    """Return the parts of Dask that are not needed with the current settings."""
    if config.problems() or config.load().placement.enabled:
        return ()
    return dask_hooks.CHOICES


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
