"""Declare the settings: a dataclass for each section, with the parser that judges each key."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dask_gpurt.config import values
from dask_gpurt.config.values import Size, wrong


def _setting(parse: Callable[[str, object], object]) -> Any:
    return field(metadata={"parse": parse})


def _section(settings: type) -> Any:
    return field(metadata={"section": settings})


def _deprecated(key: str, instead: str) -> None:
    warnings.warn(f"{key!r} is deprecated: register {instead}", DeprecationWarning, stacklevel=3)


@dataclass(frozen=True)
class ExchangeSettings:
    """Set how bytes get from worker to worker.

    Parameters
    ----------
    pool
        The most memory for shards that wait for their owners; None leaves the choice to the worker.
    inflight
        The most bytes that one worker pulls at once.
    paths
        The ways that a shard may take; ``"comms"`` is always one.
    compression
        Whether shards may be compressed on their way to another host: ``"auto"``, ``"gpu"`` for those of a
        GPU on that too, or ``"off"``.
    """

    pool: Size | None = _setting(values.size_or_auto)
    inflight: int = _setting(values.nbytes)
    paths: frozenset[str] = _setting(values.paths)
    compression: str = _setting(values.compression)


@dataclass(frozen=True)
class ShuffleSettings:
    """Set how a shuffle runs.

    Parameters
    ----------
    retries
        Runs after the first, before the shuffle fails.
    balance
        Whether outputs may get other owners once their sizes are known.
    """

    retries: int = _setting(values.count)
    balance: bool = _setting(values.boolean)


@dataclass(frozen=True)
class ComputeSettings:
    """Set how many tasks run beside each other.

    Parameters
    ----------
    concurrency
        Workers in place of each one that is started, which share its GPU; None leaves it to what the GPU is.
    """

    concurrency: int | None = _setting(values.positive_or_auto)


@dataclass(frozen=True)
class ReadSettings:
    """Set how files are read beside computing. None leaves a number to the worker.

    Parameters
    ----------
    threads
        The threads with which libcudf reads on a worker with a GPU.
    beside
        The most tasks that are begun beyond the worker's threads.
    """

    threads: int | None = _setting(values.positive_or_auto)
    beside: int | None = _setting(values.count_or_auto)


@dataclass(frozen=True)
class TopologySettings:
    """Set how the links between workers are known.

    Parameters
    ----------
    file
        The file that describes it, read by the scheduler; None to find it out.
    """

    file: str | None = _setting(values.file_name)


@dataclass(frozen=True)
class MemorySettings:
    """Set where a worker keeps its data. None leaves a size to the worker.

    Parameters
    ----------
    tiers
        Whether the runtime keeps it, in tiers; otherwise Dask does.
    device
        The most bytes of live objects on the device.
    pinned
        Bytes of pinned host memory for what is spilled first.
    host
        The most bytes in ordinary host memory, on a worker with a GPU also of its host objects.
    disk
        The most bytes of files.
    retries
        How often a task that ran out of memory is run again.
    failures
        Deprecated: ``dask_gpurt.testing.Instruments`` takes its place. One of so many allocations fails.
    """

    tiers: bool = _setting(values.boolean)
    device: Size | None = _setting(values.size_or_auto)
    pinned: Size | int | None = _setting(values.size_or_none)
    host: Size | int | None = _setting(values.size_or_none)
    disk: Size | None = _setting(values.size_or_auto)
    retries: int = _setting(values.count)
    failures: int = _setting(values.count)

    def __post_init__(self) -> None:
        if self.failures:
            _deprecated("gpurt.memory.failures", "dask_gpurt.testing.Instruments(failures=...)")


@dataclass(frozen=True)
class FixedSettings:
    """Set how compute is confined in the mode ``fixed``. None leaves it free.

    Parameters
    ----------
    residency
        The most blocks of a kernel on an SM.
    sms
        The SMs that compute may use.
    """

    residency: int | None = _setting(values.limit)
    sms: int | None = _setting(values.limit)


@dataclass(frozen=True)
class AdaptiveSettings:
    """Set what else the mode ``adaptive`` may try. None adds nothing.

    Parameters
    ----------
    sms
        The SMs that compute may be confined to.
    """

    sms: int | None = _setting(values.limit)


@dataclass(frozen=True)
class OverlapSettings:
    """Set what runs beside what on one GPU.

    Parameters
    ----------
    residency
        Whether caps are possible: ``"off"``, ``"auto"``, or a cap that counts always, for every kernel.
    mode
        One of :data:`MODES`.
    fixed
        What confines compute in the mode ``fixed``.
    adaptive
        What the mode ``adaptive`` may try besides caps.
    learned
        The file for what is learnt in the mode ``adaptive``; None leaves it to the worker.
    check
        Deprecated: ``dask_gpurt.testing.Instruments`` takes its place. Whether memory that changes hands is
        checked.

    Raises
    ------
    ConfigError
        When the mode is ``fixed``, and nothing is, or a cap counts always besides.
    """

    residency: int | str = _setting(values.residency)
    mode: str = _setting(values.mode)
    fixed: FixedSettings = _section(FixedSettings)
    adaptive: AdaptiveSettings = _section(AdaptiveSettings)
    learned: str | None = _setting(values.path_or_auto)
    check: bool = _setting(values.boolean)

    @property
    def intercepts(self) -> bool:
        """Return whether the settings need the interposer in the processes of workers."""
        asked = {"fixed": self.fixed.sms, "adaptive": self.adaptive.sms}
        return self.residency != "off" or asked.get(self.mode) is not None

    def __post_init__(self) -> None:
        if self.check:
            _deprecated("gpurt.overlap.check", "dask_gpurt.testing.Instruments(handovers=True)")
        if self.mode == "fixed" and self.fixed == FixedSettings(None, None):
            keys = "'gpurt.overlap.fixed.residency' or 'gpurt.overlap.fixed.sms'"
            raise wrong("gpurt.overlap.mode", self.mode, f"another mode, or a number for {keys}")
        if self.mode == "fixed" and isinstance(self.residency, int):
            raise wrong("gpurt.overlap.residency", self.residency, f"'auto' in the mode {self.mode!r}")


@dataclass(frozen=True)
class PlacementSettings:
    """Set which worker runs which task.

    Parameters
    ----------
    enabled
        Whether the runtime chooses; otherwise Dask does.
    always
        Whether it chooses also where workers do not differ enough for that to matter.
    """

    enabled: bool = _setting(values.boolean)
    always: bool = _setting(values.boolean)


@dataclass(frozen=True)
class PlanningSettings:
    """Set how a client plans.

    Parameters
    ----------
    cache
        Whether it keeps expressions, their metadata and plans from one query to the next.
    fuse
        Whether it fuses the tasks of a computation that run one after the other on one partition.
    """

    cache: bool = _setting(values.boolean)
    fuse: bool = _setting(values.boolean)


@dataclass(frozen=True)
class Settings:
    """Hold all settings of the runtime, judged and with their units resolved.

    Parameters
    ----------
    enabled
        Whether the runtime is on.
    takeover
        Whether it serves ``p2p`` shuffles, and those for which ``tasks`` is configured; ``"all"`` for those
        with the argument ``tasks`` too.
    exchange
        How bytes get from worker to worker.
    shuffle
        How a shuffle runs.
    memory
        Where a worker keeps its data.
    compute
        How many tasks run beside each other.
    reads
        How files are read.
    topology
        What joins the workers.
    overlap
        What runs beside what on one GPU.
    placement
        Which worker runs which task.
    planning
        How a client plans.
    """

    enabled: bool = _setting(values.boolean)
    takeover: bool | str = _setting(values.takeover)
    exchange: ExchangeSettings = _section(ExchangeSettings)
    shuffle: ShuffleSettings = _section(ShuffleSettings)
    memory: MemorySettings = _section(MemorySettings)
    compute: ComputeSettings = _section(ComputeSettings)
    reads: ReadSettings = _section(ReadSettings)
    topology: TopologySettings = _section(TopologySettings)
    overlap: OverlapSettings = _section(OverlapSettings)
    placement: PlacementSettings = _section(PlacementSettings)
    planning: PlanningSettings = _section(PlanningSettings)
