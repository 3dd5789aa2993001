"""Declare the settings: a dataclass for each section, with a parser for each key."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dask_gpurt.config import values
from dask_gpurt.config.values import Size


def _setting(parse: Callable[[str, object], object]) -> Any:
    return field(metadata={"parse": parse})


def _knob(parse: Callable[[str, object], object], default: object) -> Any:
    """Declare a key for experiments and tests: users have no reason to change it, and it may go any time."""
    return field(metadata={"parse": parse, "default": default})


def _section(settings: type) -> Any:
    return field(metadata={"section": settings})


@dataclass(frozen=True)
class ExchangeSettings:
    """Configure transfers between workers.

    Parameters
    ----------
    pool
        Maximum memory for shards that wait for their owners; None leaves the choice to the worker.
    inflight
        Maximum bytes that one worker pulls at a time.
    paths
        The paths that a shard may take; always includes ``"comms"``.
    compression
        Whether to compress shards between hosts: ``"auto"`` or ``"off"``.
    """

    pool: Size | None = _setting(values.size_or_auto)
    inflight: int = _knob(values.nbytes, "1 GiB")
    paths: frozenset[str] = _setting(values.paths)
    compression: str = _setting(values.compression)


@dataclass(frozen=True)
class ShuffleSettings:
    """Configure shuffles.

    Parameters
    ----------
    retries
        Runs after the first before the shuffle fails.
    balance
        Whether outputs may move to other owners once their sizes are known.
    """

    retries: int = _knob(values.count, 10)
    balance: bool = _setting(values.boolean)


@dataclass(frozen=True)
class ComputeSettings:
    """Configure how many tasks run beside each other on one GPU.

    Parameters
    ----------
    concurrency
        Workers to start in place of each one, sharing its GPU; None chooses by the memory of the GPU.
    """

    concurrency: int | None = _setting(values.positive_or_auto)


@dataclass(frozen=True)
class ReadSettings:
    """Configure reading files beside computing. None leaves a number to the worker.

    Parameters
    ----------
    threads
        The number of threads with which libcudf reads on a worker with a GPU.
    beside
        Maximum number of tasks started beyond the worker's threads.
    """

    threads: int | None = _setting(values.positive_or_auto)
    beside: int | None = _knob(values.count_or_auto, "auto")


@dataclass(frozen=True)
class MemorySettings:
    """Configure the memory tiers of a worker. None leaves a size to the worker.

    Parameters
    ----------
    tiers
        Whether the runtime keeps the worker's data in tiers; otherwise Dask keeps them.
    device
        Maximum bytes of live objects on the device.
    pinned
        Bytes of pinned host memory, the first tier to spill to.
    host
        Maximum bytes in ordinary host memory; on a worker with a GPU this includes host objects.
    disk
        Maximum bytes in files.
    retries
        How often a task that ran out of memory is retried.
    """

    tiers: bool = _setting(values.boolean)
    device: Size | None = _setting(values.size_or_auto)
    pinned: Size | int | None = _setting(values.size_or_none)
    host: Size | int | None = _setting(values.size_or_none)
    disk: Size | None = _setting(values.size_or_auto)
    retries: int = _knob(values.count, 3)


@dataclass(frozen=True)
class OverlapSettings:
    """Configure compute beside communication on one GPU.

    Parameters
    ----------
    mode
        One of :data:`MODES`, or the most blocks of a kernel on an SM while a shuffle runs.
    """

    mode: int | str = _setting(values.overlap_mode)

    @property
    def intercepts(self) -> bool:
        """Return whether the mode requires the interposer in worker processes."""
        return self.mode not in ("off", "priority")


@dataclass(frozen=True)
class PlacementSettings:
    """Configure the choice of a worker for each task.

    Parameters
    ----------
    enabled
        Whether the runtime chooses; otherwise Dask does.
    """

    enabled: bool = _setting(values.boolean)


@dataclass(frozen=True)
class PlanningSettings:
    """Configure planning on a client.

    Parameters
    ----------
    broadcast_size
        The bytes of a table up to which it is read as a single partition; None for the default.
    optimise
        Whether to keep what is planned, fuse tasks, and change plans by rules; Dask's plans otherwise.
    partition_size
        The bytes of a partition up to which files of a table are put together; None for the default.
    store
        The file for what the cache keeps for other processes, ``"auto"`` for the default one; None for none.
    """

    broadcast_size: int | None = _setting(values.bytes_or_auto)
    optimise: bool = _setting(values.boolean)
    partition_size: int | None = _setting(values.bytes_or_auto)
    store: str | None = _setting(values.path_auto_or_off)


@dataclass(frozen=True)
class Settings:
    """Hold all settings of the runtime, validated and parsed.

    Parameters
    ----------
    enabled
        Whether to switch the runtime on when a client, scheduler or worker starts.
    client
        Whether clients use it wherever their cluster has it on.
    takeover
        Whether to serve ``p2p`` shuffles and shuffles configured as ``tasks``; ``"all"`` to also serve
        shuffles with the argument ``tasks``.
    exchange
        Transfers between workers.
    shuffle
        Shuffles.
    memory
        The memory tiers of a worker.
    compute
        The number of tasks that run beside each other on one GPU.
    reads
        Reading files.
    overlap
        Compute beside communication on one GPU.
    placement
        The choice of a worker for each task.
    planning
        Planning on a client.
    """

    enabled: bool = _setting(values.boolean)
    client: bool = _setting(values.boolean)
    takeover: bool | str = _setting(values.takeover)
    exchange: ExchangeSettings = _section(ExchangeSettings)
    shuffle: ShuffleSettings = _section(ShuffleSettings)
    memory: MemorySettings = _section(MemorySettings)
    compute: ComputeSettings = _section(ComputeSettings)
    reads: ReadSettings = _section(ReadSettings)
    overlap: OverlapSettings = _section(OverlapSettings)
    placement: PlacementSettings = _section(PlacementSettings)
    planning: PlanningSettings = _section(PlanningSettings)
