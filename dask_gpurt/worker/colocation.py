"""Run several workers in place of one, which share its memory, threads and GPU.

Tasks of dataframe libraries spend most of their time holding the GIL, so two processes keep a GPU busy where
two threads do not (see docs/decisions/overlap.md for figures).
"""

from __future__ import annotations

import asyncio
import copy
import logging
from weakref import WeakKeyDictionary, WeakSet

from dask.utils import parse_bytes
from distributed import Nanny
from distributed.core import Status

from dask_gpurt import config
from dask_gpurt.dask_hooks import UnsupportedError
from dask_gpurt.dask_hooks.worker import another_nanny, require_free_address
from dask_gpurt.device.base import COLOCATED
from dask_gpurt.device.discover import gpu_library, memory_of, visible_gpus
from dask_gpurt.device.mps import MpsError, MultiProcessService

logger = logging.getLogger(__name__)

#: The number of workers that ``auto`` starts on a GPU, and the GPU memory that it requires: 32 GiB for each.
AUTO, ROOMY_BYTES = 2, 64 * 2**30
#: The environment variable with the reason why a worker runs alone although the settings want more workers.
ALONE_VARIABLE = "GPURT_ALONE"
#: Attributes of dask-cuda's worker plugin with sizes and limits of a worker's memory pool.
_POOL_SIZES = ("initial_pool_size", "maximum_pool_size", "release_threshold")

_service = MultiProcessService()
#: The additional nannies of each original nanny, with the tasks that start them.
_colocated: WeakKeyDictionary[Nanny, dict[Nanny, asyncio.Task[None]]] = WeakKeyDictionary()
#: All additional nannies. These start no further ones.
_beside: WeakSet[Nanny] = WeakSet()


async def colocate(nanny: Nanny) -> None:
    """Start additional nannies beside one that is starting, as many as ``gpurt.compute.concurrency`` says.

    All of them get equal parts of the first nanny's memory, threads and GPU memory. If workers have a GPU and
    MPS is not available, the first nanny stays alone: without MPS processes only time-slice the GPU.

    ``nanny``: a nanny of dask-cuda or Dask whose worker has not been started yet.
    """
    if nanny in _beside or (count := await _count(nanny)) == 1:
        return
    try:
        require_free_address(nanny)
        environment = await asyncio.to_thread(_service.join) if has_gpu(nanny) else {}
    except (MpsError, UnsupportedError) as error:
        logger.warning("starting one worker instead of %d: %s", count, error)
        nanny.env[ALONE_VARIABLE] = str(error)
        return
    divide(nanny, count)
    for changed in (nanny.env, nanny.pre_spawn_env):
        changed |= environment | {COLOCATED: str(count)}
    others = [another_nanny(nanny, number) for number in range(1, count)]
    _beside.update(others)
    for other in others:
        other.pre_spawn_env |= nanny.pre_spawn_env
    _colocated[nanny] = {other: asyncio.create_task(_start(other)) for other in others}


async def _count(nanny: Nanny) -> int:
    """Return how many workers to run in place of one."""
    given = config.load().compute.concurrency
    if given is not None:
        return given
    if not has_gpu(nanny):
        return 1
    device = (visible_gpus(nanny.env) or [""])[0]
    return default_count(await asyncio.to_thread(lambda: memory_of(device, gpu_library())))


def default_count(memory: int | None) -> int:
    """Return how many workers ``auto`` starts on a GPU.

    ``memory``: the GPU's memory in bytes; None if it has no memory of its own or its size is unknown.

    Examples
    --------
    >>> default_count(141 * 2**30), default_count(24 * 2**30), default_count(None)
    (2, 1, 1)
    """
    return AUTO if memory is not None and memory >= ROOMY_BYTES else 1


async def _start(nanny: Nanny) -> None:
    try:
        await nanny
    except Exception:  # nothing awaits this task
        if nanny.status not in (Status.closing, Status.closed):
            logger.exception("could not start an additional worker for gpurt.compute.concurrency")


async def separate(nanny: Nanny) -> None:
    """Close the additional nannies of a nanny that is closing."""
    await asyncio.gather(*(other.close() for other in _colocated.pop(nanny, ())))


def has_gpu(nanny: Nanny) -> bool:
    """Return whether a nanny's worker uses a GPU, which dask-cuda names in the nanny's environment."""
    return bool(visible_gpus(nanny.env))


def divide(nanny: Nanny, count: int) -> None:
    """Reduce a worker's memory limit, threads and GPU memory pool to its share."""
    memory = nanny.memory_manager
    if memory.memory_limit is not None:
        memory.memory_limit //= count
    nanny.nthreads = max(1, nanny.nthreads // count)
    if (plugins := nanny.worker_kwargs.get("plugins")) is not None:
        nanny.worker_kwargs["plugins"] = type(plugins)(_divided(plugin, count) for plugin in plugins)


def _divided(plugin: object, count: int) -> object:
    """Return a copy of dask-cuda's plugin with its memory pool divided; any other plugin unchanged."""
    if not any(hasattr(plugin, name) for name in _POOL_SIZES):
        return plugin
    part = copy.copy(plugin)
    for name in _POOL_SIZES:
        if (size := getattr(plugin, name, None)) is not None:
            setattr(part, name, divided_size(size, count))
    return part


def divided_size(size: str | float, count: int) -> float:
    """Divide a size in dask-cuda's format, in which a number up to 1 is a fraction of the GPU's memory.

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
