"""Declare the settings: a dataclass for each section, with a parser for each key.

What a public setting does is described in ``gpurt-schema.yaml``. A value of None leaves it to the process.
"""

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
    """Configure transfers between workers."""

    pool: Size | None = _setting(values.size_or_auto)
    #: Maximum bytes that one worker pulls at a time.
    inflight: int = _knob(values.nbytes, "1 GiB")
    paths: frozenset[str] = _setting(values.paths)
    compression: str = _setting(values.compression)


@dataclass(frozen=True)
class ShuffleSettings:
    """Configure shuffles."""

    #: Runs after the first before the shuffle fails.
    retries: int = _knob(values.count, 10)
    balance: bool = _setting(values.boolean)


@dataclass(frozen=True)
class ComputeSettings:
    """Configure how many tasks run beside each other on one GPU."""

    concurrency: int | None = _setting(values.positive_or_auto)
    #: Whether fused tasks run on columns of cudf rather than through its frames.
    programs: bool = _knob(values.boolean, True)
    #: Of how many fused tasks one runs both ways, and is compared; 0 for none.
    check_programs: int = _knob(values.count, 0)


@dataclass(frozen=True)
class ReadSettings:
    """Configure reading files beside computing. None leaves a number to the worker."""

    threads: int | None = _setting(values.positive_or_auto)
    #: Maximum number of tasks started beyond the threads of a worker.
    beside: int | None = _knob(values.count_or_auto, "auto")


@dataclass(frozen=True)
class MemorySettings:
    """Configure the memory tiers of a worker. None leaves a size to the worker."""

    tiers: bool = _setting(values.boolean)
    device: Size | None = _setting(values.size_or_auto)
    pinned: Size | int | None = _setting(values.size_or_none)
    host: Size | int | None = _setting(values.size_or_none)
    disk: Size | None = _setting(values.size_or_auto)
    #: How often a task that ran out of memory is retried.
    retries: int = _knob(values.count, 3)


@dataclass(frozen=True)
class OverlapSettings:
    """Configure compute beside communication on one GPU."""

    mode: int | str = _setting(values.overlap_mode)

    @property
    def intercepts(self) -> bool:
        """Return whether the mode requires the interposer in worker processes."""
        return self.mode not in ("off", "priority")


@dataclass(frozen=True)
class PlacementSettings:
    """Configure the choice of a worker for each task."""

    enabled: bool = _setting(values.boolean)


@dataclass(frozen=True)
class PlanningSettings:
    """Configure planning on a client."""

    broadcast_size: int | None = _setting(values.bytes_or_auto)
    optimise: bool = _setting(values.boolean)
    partition_size: int | None = _setting(values.bytes_or_auto)
    store: str | None = _setting(values.path_auto_or_off)


@dataclass(frozen=True)
class Settings:
    """Hold all settings of the runtime, validated and parsed."""

    enabled: bool = _setting(values.boolean)
    client: bool = _setting(values.boolean)
    takeover: bool | str = _setting(values.takeover)
    #: 0 if nothing is kept.
    cache: Size | int | None = _setting(values.size_or_off)
    exchange: ExchangeSettings = _section(ExchangeSettings)
    shuffle: ShuffleSettings = _section(ShuffleSettings)
    memory: MemorySettings = _section(MemorySettings)
    compute: ComputeSettings = _section(ComputeSettings)
    reads: ReadSettings = _section(ReadSettings)
    overlap: OverlapSettings = _section(OverlapSettings)
    placement: PlacementSettings = _section(PlacementSettings)
    planning: PlanningSettings = _section(PlanningSettings)
