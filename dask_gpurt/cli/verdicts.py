"""Check the collected facts for settings that are wrong or have no effect, and other noteworthy things."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import dask
from dask.utils import format_bytes
from packaging.version import Version

from dask_gpurt import config, dask_hooks
from dask_gpurt.device.host import SHM
from dask_gpurt.topology.file import TopologyError, load

#: The oldest and newest versions of Dask that are tested.
OLDEST, NEWEST = Version(dask_hooks.OLDEST), Version(dask_hooks.NEWEST)
HOOK = "dask_gpurt.preload"
#: The kinds of process that may switch the runtime on when they start.
HOOKED = ("client", "scheduler", "worker", "nanny")
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
        for kind in ("problems", "errors"):
            for address, found in cluster[kind].items():
                yield f"worker {address}: {'; '.join(found) if isinstance(found, list) else found}"


def _problems_here(settings: Mapping[str, Any], machine: Mapping[str, Any]) -> Iterator[str]:
    yield from config.problems()
    if (reason := dask_hooks.why_unsupported(expressions=True)) is not None:
        yield reason
    if settings["configured"]:
        if not any(settings["hooks"].values()):
            yield (
                f"'gpurt.enabled' is true, but no preload list of Dask has {HOOK!r}, so it has no effect: "
                "install the package with pip, which brings etc/dask/gpurt.yaml, or add it to "
                "'distributed.client.preload'"
            )
        if not dask.config.get("distributed.scheduler.pickle", True):
            yield "'distributed.scheduler.pickle' is false: without it the runtime cannot be switched on"
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
    if Path(name).exists():  # otherwise it may exist only on the scheduler's machine
        try:
            load(name)
        except TopologyError as error:
            yield str(error)


def ignored(settings: Mapping[str, Any], cluster: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield settings without effect."""
    enabled, method, changed = settings["enabled"], settings["method"], settings["changed"]
    gone = {key: hint for key in changed if (hint := _hint_if_retired(key)) is not None}
    for key, hint in gone.items():
        yield f"{key!r} is {as_yaml(changed[key])}, but this setting is gone: {hint}"
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
            if key != "gpurt.enabled" and key not in gone:
                yield f"{key!r} is {as_yaml(value)}, but 'gpurt.enabled' is false"


def _hint_if_retired(key: str) -> str | None:
    """Return what to do instead of a key that is gone, or that is in a section that is gone."""
    name = key.replace("_", "-") + "."  # an environment variable has underscores
    return next((hint for old, hint in config.RETIRED.items() if name.startswith(f"{old}.")), None)


def notes(versions: Mapping[str, str], cluster: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield notes on versions and their known bugs."""
    dasks = {versions["dask"]}
    if cluster:
        dasks.update(found["dask"] for found in cluster["versions"].values() if found["dask"])
        for node, found in cluster["versions"].items():
            if found["dask_gpurt"] != versions["dask_gpurt"]:
                has = f"has dask_gpurt {found['dask_gpurt']}" if found["dask_gpurt"] else "has no dask_gpurt"
                yield f"{node} {has}, this process has {versions['dask_gpurt']}: install the same everywhere"
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


def preloads(where: str) -> list[str]:
    """Return the modules that Dask preloads into a kind of process."""
    names = dask.config.get(f"distributed.{where}.preload", None) or []
    return [names] if isinstance(names, str) else list(names)


def as_yaml(value: object) -> str:
    """Format a value as in a yaml file."""
    return str(value).lower() if isinstance(value, bool) else repr(value)
