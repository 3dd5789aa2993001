"""Run several workers in place of one, which share its memory, its threads, and its GPU.

A task of a dataframe library spends most of its time in Python, whose lock two threads can not hold at the
same time: two processes keep a GPU busy where two threads do not (docs/decisions/overlap.md has figures).
"""

from __future__ import annotations

import asyncio
import copy
import logging
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from dask.utils import parse_bytes
from distributed import Nanny
from distributed.core import Status

from dask_gpurt import config
from dask_gpurt.dask_hooks import UnsupportedError
from dask_gpurt.dask_hooks.nanny import another_nanny, require_free_address
from dask_gpurt.device.base import COLOCATED
from dask_gpurt.device.mps import MpsError, MultiProcessService
from dask_gpurt.topology.detect import memory_of, nvml_library

logger = logging.getLogger(__name__)

#: The workers that ``auto`` starts on a GPU, and the memory that the GPU needs for that: 32 GiB for each.
AUTO, ROOMY_BYTES = 2, 64 * 2**30
#: Tells a worker why it is alone although the settings want more.
ALONE = "GPURT_ALONE"
#: Sizes that dask-cuda gives to the pool of a worker, or takes for its limits.
_POOL_SIZES = ("initial_pool_size", "maximum_pool_size", "release_threshold")

_service = MultiProcessService()
#: Those that were started beside a nanny, each with the task that starts it.
_colocated: WeakKeyDictionary[Any, dict[Nanny, asyncio.Task[None]]] = WeakKeyDictionary()
#: Those that were started beside others, which start none themselves.
_beside: WeakSet[Nanny] = WeakSet()


async def colocate(nanny: Any) -> None:
    """Start further nannies beside one that is starting, as ``gpurt.compute.concurrency`` says.

    Each has an equal part of the memory, of the threads, and of the GPU's memory that the first was given.
    Where workers have a GPU and MPS is not to be had, the first stays alone: they would take turns.

    Parameters
    ----------
    nanny
        Of dask-cuda or of Dask; its worker has not been started yet.
    """
    if nanny in _beside or (count := await _count(nanny)) == 1:
        return
    try:
        require_free_address(nanny)
        environment = await asyncio.to_thread(_service.join) if has_gpu(nanny) else {}
    except (MpsError, UnsupportedError) as error:
        logger.warning("one worker runs in place of %d: %s", count, error)
        nanny.env[ALONE] = str(error)
        return
    divide(nanny, count)
    for changed in (nanny.env, nanny.pre_spawn_env):
        changed |= environment | {COLOCATED: str(count)}
    others = [another_nanny(nanny, number) for number in range(1, count)]
    _beside.update(others)
    for other in others:
        other.pre_spawn_env |= nanny.pre_spawn_env
    _colocated[nanny] = {other: asyncio.create_task(_start(other)) for other in others}


async def _count(nanny: Any) -> int:
    """Return how many workers there are to be in place of one."""
    given = config.load().compute.concurrency
    if given is not None:
        return given
    if not has_gpu(nanny):
        return 1
    device = nanny.env["CUDA_VISIBLE_DEVICES"].partition(",")[0].strip()
    return default_count(await asyncio.to_thread(lambda: memory_of(device, nvml_library())))


def default_count(memory: int | None) -> int:
    """Return what ``auto`` starts on a GPU.

    Parameters
    ----------
    memory
        Bytes of the GPU; None where it has none of its own, or is not known.

    Examples
    --------
    >>> default_count(141 * 2**30), default_count(24 * 2**30), default_count(None)
    (2, 1, 1)
    """
    return AUTO if memory is not None and memory >= ROOMY_BYTES else 1


async def _start(nanny: Nanny) -> None:
    try:
        await nanny
    except Exception:  # which has no caller
        if nanny.status not in (Status.closing, Status.closed):
            logger.exception("a worker that was to run beside another could not be started")


async def separate(nanny: Any) -> None:
    """Close the nannies that were started beside one that is closing."""
    await asyncio.gather(*(other.close() for other in _colocated.pop(nanny, ())))


def has_gpu(nanny: Any) -> bool:
    """Return whether the worker of a nanny is for a GPU: dask-cuda names it in its environment."""
    named = nanny.env.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return any(name.strip() not in ("", "-1") for name in named)


def divide(nanny: Any, count: int) -> None:
    """Leave to a worker its part of what it was to have."""
    memory = nanny.memory_manager
    if memory.memory_limit is not None:
        memory.memory_limit //= count
    nanny.nthreads = max(1, nanny.nthreads // count)
    if (plugins := nanny.worker_kwargs.get("plugins")) is not None:
        nanny.worker_kwargs["plugins"] = type(plugins)(_divided(plugin, count) for plugin in plugins)


def _divided(plugin: Any, count: int) -> Any:
    """Return a worker plugin of dask-cuda whose memory pool is a part of what it was; any other as it is."""
    if not any(hasattr(plugin, name) for name in _POOL_SIZES):
        return plugin
    part = copy.copy(plugin)
    for name in _POOL_SIZES:
        if (size := getattr(plugin, name, None)) is not None:
            setattr(part, name, divided_size(size, count))
    return part


def divided_size(size: str | float, count: int) -> float:
    """Return a part of a size as dask-cuda reads it: a number up to 1 is a share of the GPU.

    Examples
    --------
    >>> divided_size(0.6, 2), divided_size("0.6", 2), divided_size("30 GB", 2), divided_size(2**30, 4)
    (0.3, 0.3, 15000000000, 268435456)
    """
    try:
        number = float(size)
    except ValueError:
        return parse_bytes(size) // count
    return number / count if number <= 1 else int(number) // count
