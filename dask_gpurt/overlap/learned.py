"""The file in which what was learnt of kernels outlives a worker: of one kind of device and libraries."""

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

from dask_gpurt.overlap.knowledge import Knowledge

#: The layout of the file, as this version of the package writes it.
FORMAT = 3


class LearnedError(ValueError):
    """A file of what was learnt that is of no use here; the message says why, and what would be right."""


@dataclass(frozen=True)
class Ground:
    """What must be the same for what was learnt to hold.

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
    """Where files lie for which no path is set."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "dask-gpurt")


def default_path(ground: Ground) -> Path:
    """The file for a device and its libraries."""
    name = re.sub(r"[^\w.]+", "-", str(ground)).strip("-")
    return directory() / f"overlap-{name}.json"


def read(path: Path, ground: Ground) -> Knowledge:
    """Read what was learnt; nothing as long as there is no file.

    Raises
    ------
    LearnedError
        When the file can not be read, or is of another device or other libraries.
    """
    if not path.exists():
        return Knowledge()
    found, known = load(path)
    if found != ground:
        raise LearnedError(
            f"{path} was learnt on {found}, and here is {ground}: "
            "remove it, or set 'gpurt.overlap.learned' to another path"
        )
    return known


def load(path: Path) -> tuple[Ground, Knowledge]:
    """Read a file, whatever it was learnt on.

    Raises
    ------
    LearnedError
        When it can not be read.
    """
    try:
        values = json.loads(path.read_bytes())
        if values["format"] != FORMAT:
            raise ValueError(f"its format is {values['format']}, expected {FORMAT}")
        ground = Ground(str(values["device"]), {str(k): str(v) for k, v in values["libraries"].items()})
        return ground, Knowledge.of(values["known"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise LearnedError(
            f"{path} can not be read as what was learnt of kernels ({type(error).__name__}: {error}): "
            "remove it, or set 'gpurt.overlap.learned' to another path"
        ) from error


def write(path: Path, ground: Ground, known: Knowledge) -> None:
    """Write what was learnt, and keep of the file what others have learnt better.

    Raises
    ------
    LearnedError
        When the file that is there is of no use here; it stays as it is.
    OSError
        When it can not be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _alone(path):
        values = {
            "format": FORMAT,
            "device": ground.device,
            "libraries": dict(ground.libraries),
            "known": merged(read(path, ground), known).plain(),
        }
        _replace(path, values)


def merged(one: Knowledge, other: Knowledge) -> Knowledge:
    """Of each kernel what there are more samples for; on a tie, the other's."""
    found = Knowledge()
    latest = other if other.steps else one
    found.moved, found.steps = latest.moved, latest.steps
    found.kernels = {**one.kernels}
    for name, kernel in other.kernels.items():
        if name not in found.kernels or kernel.samples >= found.kernels[name].samples:
            found.kernels[name] = kernel
    return found


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Between reading and replacing the file no other worker does."""
    import fcntl  # which not every system has, and `dask gpurt doctor` says so of them

    with open(path.with_name(f".{path.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # which goes as the file is closed
        yield


def _replace(path: Path, values: Mapping[str, Any]) -> None:
    """Workers share the file: whoever reads it finds one that is whole."""
    handle, name = tempfile.mkstemp(prefix=path.name, dir=path.parent)
    try:
        with open(handle, "w") as file:
            json.dump(values, file)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
