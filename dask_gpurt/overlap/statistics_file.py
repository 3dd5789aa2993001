"""Persist the statistics of kernels in a file for each device and set of library versions.

Workers share the file. Each merges its statistics under a lock and replaces the file atomically.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dask_gpurt.config.cache_files import alone, directory, replace
from dask_gpurt.overlap.statistics import OverlapStatistics

#: The version of the file's format.
FILE_FORMAT = 3
#: How long to wait for another process that writes the file, in seconds. A worker that closes waits for it.
WRITING_TIMEOUT_S = 5.0


class StatisticsFileError(ValueError):
    """A file of statistics cannot be used; the message says why and what to do."""


@dataclass(frozen=True)
class CacheKey:
    """Identify the device and the library versions to which statistics apply.

    Parameters
    ----------
    device
        The name of the device.
    libraries
        The versions of libraries that launch kernels, by name.
    """

    device: str
    libraries: Mapping[str, str]

    def __str__(self) -> str:
        return ", ".join([self.device, *(f"{name} {number}" for name, number in self.libraries.items())])


def default_path(cache_key: CacheKey) -> Path:
    """Return the default path of the file for a device and its libraries."""
    name = re.sub(r"[^\w.]+", "-", str(cache_key)).strip("-")
    return directory() / f"overlap-{name}.json"


def read(path: Path, cache_key: CacheKey) -> OverlapStatistics:
    """Read statistics; empty if the file does not exist.

    Raises
    ------
    StatisticsFileError
        If the file cannot be read, or belongs to another device or other library versions.
    """
    if not path.exists():
        return OverlapStatistics()
    found, known = load(path)
    if found != cache_key:
        raise StatisticsFileError(
            f"{path} was measured on {found}, but this process runs on {cache_key}: "
            "remove it, or set 'gpurt.overlap.learned' to another path"
        )
    return known


def load(path: Path) -> tuple[CacheKey, OverlapStatistics]:
    """Read a statistics file of any device.

    Raises
    ------
    StatisticsFileError
        If it cannot be read.
    """
    try:
        values = json.loads(path.read_bytes())
        if values["format"] != FILE_FORMAT:
            raise ValueError(f"its format is {values['format']}, expected {FILE_FORMAT}")
        cache_key = CacheKey(str(values["device"]), {str(k): str(v) for k, v in values["libraries"].items()})
        return cache_key, OverlapStatistics.of(values["known"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StatisticsFileError(
            f"{path} cannot be read as statistics of kernels ({type(error).__name__}: {error}): "
            "remove it, or set 'gpurt.overlap.learned' to another path"
        ) from error


def write(path: Path, cache_key: CacheKey, known: OverlapStatistics) -> None:
    """Write statistics, merged with those of the file; for each kernel the one with more samples is kept.

    Raises
    ------
    StatisticsFileError
        If the existing file cannot be used; it is not changed.
    OSError
        If the file cannot be written, or another process does not end writing it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with alone(path, WRITING_TIMEOUT_S):
        values = {
            "format": FILE_FORMAT,
            "device": cache_key.device,
            "libraries": dict(cache_key.libraries),
            "known": merged(read(path, cache_key), known).plain(),
        }
        replace(path, lambda file: file.write(json.dumps(values).encode()))


def merged(one: OverlapStatistics, other: OverlapStatistics) -> OverlapStatistics:
    """Return the statistics with more samples for each kernel; on a tie, those of ``other``."""
    found = OverlapStatistics()
    latest = other if other.steps else one
    found.moved, found.steps = latest.moved, latest.steps
    found.kernels = {**one.kernels}
    for name, kernel in other.kernels.items():
        if name not in found.kernels or kernel.samples >= found.kernels[name].samples:
            found.kernels[name] = kernel
    return found
