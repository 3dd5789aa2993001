"""Keep the statistics of kernels between clusters: a file for each kind of device and libraries.

Workers share it. Each adds its statistics under a lock, and replaces the file at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dask_gpurt.overlap.statistics import OverlapStatistics

#: The layout of the file, as this version of the package writes it.
FILE_FORMAT = 3


class StatisticsFileError(ValueError):
    """Refuse a file of statistics; the message says why, and what would be right."""


@dataclass(frozen=True)
class CacheKey:
    """Identify the device and the libraries that statistics hold for.

    Parameters
    ----------
    device
        The name of the device.
    libraries
        Versions by name of those that launch kernels.
    """

    device: str
    libraries: Mapping[str, str]

    def __str__(self) -> str:
        return ", ".join([self.device, *(f"{name} {number}" for name, number in self.libraries.items())])


def directory() -> Path:
    """Return the folder of the files whose path is not set."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "dask-gpurt")


def default_path(cache_key: CacheKey) -> Path:
    """Return the path of the file for a device and its libraries."""
    name = re.sub(r"[^\w.]+", "-", str(cache_key)).strip("-")
    return directory() / f"overlap-{name}.json"


def read(path: Path, cache_key: CacheKey) -> OverlapStatistics:
    """Read statistics; empty ones while there is no file.

    Raises
    ------
    StatisticsFileError
        When the file can not be read, or is of another device or other libraries.
    """
    if not path.exists():
        return OverlapStatistics()
    found, known = load(path)
    if found != cache_key:
        raise StatisticsFileError(
            f"{path} was learnt on {found}, and here is {cache_key}: "
            "remove it, or set 'gpurt.overlap.learned' to another path"
        )
    return known


def load(path: Path) -> tuple[CacheKey, OverlapStatistics]:
    """Read a file of any device.

    Raises
    ------
    StatisticsFileError
        When it can not be read.
    """
    try:
        values = json.loads(path.read_bytes())
        if values["format"] != FILE_FORMAT:
            raise ValueError(f"its format is {values['format']}, expected {FILE_FORMAT}")
        cache_key = CacheKey(str(values["device"]), {str(k): str(v) for k, v in values["libraries"].items()})
        return cache_key, OverlapStatistics.of(values["known"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StatisticsFileError(
            f"{path} can not be read as what was learnt of kernels ({type(error).__name__}: {error}): "
            "remove it, or set 'gpurt.overlap.learned' to another path"
        ) from error


def write(path: Path, cache_key: CacheKey, known: OverlapStatistics) -> None:
    """Write statistics, and keep the kernels that the file has more samples of.

    Raises
    ------
    StatisticsFileError
        When the file that is there is of no use here; it stays as it is.
    OSError
        When it can not be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _alone(path):
        values = {
            "format": FILE_FORMAT,
            "device": cache_key.device,
            "libraries": dict(cache_key.libraries),
            "known": merged(read(path, cache_key), known).plain(),
        }
        _replace(path, values)


def merged(one: OverlapStatistics, other: OverlapStatistics) -> OverlapStatistics:
    """Return for each kernel the statistics with more samples; on a tie, those of ``other``."""
    found = OverlapStatistics()
    latest = other if other.steps else one
    found.moved, found.steps = latest.moved, latest.steps
    found.kernels = {**one.kernels}
    for name, kernel in other.kernels.items():
        if name not in found.kernels or kernel.samples >= found.kernels[name].samples:
            found.kernels[name] = kernel
    return found


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Lock the file against other workers, from reading to replacing it."""
    import fcntl  # missing on some systems, which `dask gpurt doctor` refuses

    with open(path.with_name(f".{path.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed
        yield


def _replace(path: Path, values: Mapping[str, Any]) -> None:
    """Replace the file at once: workers share it, and a reader never finds half of it."""
    handle, name = tempfile.mkstemp(prefix=path.name, dir=path.parent)
    try:
        with open(handle, "w") as file:
            json.dump(values, file)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
