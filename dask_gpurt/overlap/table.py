"""Keep the residency caps that a calibration chose for the kernels of a device, in a file for each model.

A calibration times workloads beside a shuffle, without a cap and under each of some. A cap is chosen for a
workload only if it is faster beyond the noise; its kernels then get that cap, unless another workload, or the
shuffle itself, launches them as well and would rather not. Kernels are identified by a hash of their name,
since names of templates are too long to be kept whole.

Decisions and their figures: ``docs/decisions/overlap.md``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev

from dask_gpurt.config.cache_files import directory, replace
from dask_gpurt.overlap.interposer import MAX_KERNELS, Caps

#: The version of the file's format.
FILE_FORMAT = 1
#: A cap has to save at least this fraction of the time.
MIN_GAIN_SHARE = 0.01
#: How many standard errors a gain has to be above that: of 15 comparisons, hardly one is due to chance.
CONFIDENCE = 3.0


class TableError(ValueError):
    """There is no usable table for a device; the message says why and what to do."""


@dataclass(frozen=True)
class Measurement:
    """Compare a workload beside a shuffle under a cap with the same without.

    ``ratio``, ``error``: the mean over all rounds of the time under the cap as a share of the time without,
    and its standard error.
    """

    workload: str
    cap: int
    ratio: float
    error: float
    rounds: int

    @classmethod
    def of(cls, workload: str, cap: int, capped: Sequence[float], free: Sequence[float]) -> Measurement:
        """Compare the seconds of rounds, of which there are at least two."""
        ratios = [one / other for one, other in zip(capped, free, strict=True)]
        return cls(workload, cap, fmean(ratios), stdev(ratios) / len(ratios) ** 0.5, len(ratios))

    @property
    def pays(self) -> bool:
        """Return whether the cap saves time beyond the noise."""
        return self.ratio + CONFIDENCE * self.error < 1 - MIN_GAIN_SHARE


@dataclass(frozen=True)
class KernelCap:
    """Cap the blocks of a kernel on an SM; the name may be truncated, the id is a hash of the whole one."""

    id: int
    name: str
    cap: int


@dataclass(frozen=True)
class OverlapTable:
    """Hold the caps of a device's kernels, and the measurements behind them.

    ``device``: the model.
    ``versions``: versions of the libraries that launched the kernels, for people who read the table.
    """

    device: str
    versions: Mapping[str, str]
    measured: tuple[Measurement, ...]
    kernels: tuple[KernelCap, ...]

    def chosen(self) -> dict[str, int]:
        """Return the best cap of each workload that is faster under one."""
        return chosen(self.measured)

    def caps(self) -> Caps:
        """Return the caps as the interposer takes them; kernels that have none are left alone."""
        return Caps(None, {kernel.id: kernel.cap for kernel in self.kernels})


def chosen(measured: Iterable[Measurement]) -> dict[str, int]:
    """Return the cap under which each workload is fastest, of those that pay."""
    best: dict[str, Measurement] = {}
    for one in measured:
        if one.pays and (one.workload not in best or one.ratio < best[one.workload].ratio):
            best[one.workload] = one
    return {workload: one.cap for workload, one in best.items()}


def kernel_caps(
    caps: Mapping[str, int], launched: Mapping[str, Mapping[int, str]], shuffle: Iterable[int]
) -> tuple[KernelCap, ...]:
    """Return the caps of kernels.

    ``caps``: the cap of each workload that is faster under one.
    ``launched``: the names of the kernels that each workload launches, by id. One that several of them launch
    gets the mildest cap, and none if a workload has none.
    ``shuffle``: the kernels of shuffles, which get no cap.
    """
    names = {id: name for of in launched.values() for id, name in of.items()}
    found = []
    for id in sorted(names.keys() - set(shuffle)):
        wanted = [caps.get(workload) for workload, of in launched.items() if id in of]
        known = [cap for cap in wanted if cap is not None]
        if len(known) == len(wanted):
            found.append(KernelCap(id, names[id], max(known)))
    return tuple(found[:MAX_KERNELS])


# ---- the file --------------------------------------------------------------------------


def path_of(device: str) -> Path:
    """Return the path of the table of a device's model."""
    name = re.sub(r"[^\w.]+", "-", device).strip("-")
    return directory() / f"caps-{name}.json"


def read(path: Path) -> OverlapTable:
    """Read a table.

    Raises TableError if there is none, or it cannot be read.
    """
    try:
        values = json.loads(path.read_bytes())
        if values["format"] != FILE_FORMAT:
            raise ValueError(f"its format is {values['format']}, expected {FILE_FORMAT}")
        return OverlapTable(
            str(values["device"]),
            {str(name): str(version) for name, version in values["versions"].items()},
            tuple(Measurement(**one) for one in values["measured"]),
            tuple(KernelCap(int(one["id"]), str(one["name"]), int(one["cap"])) for one in values["kernels"]),
        )
    except FileNotFoundError:
        raise TableError(f"there is no {path}: run 'dask gpurt calibrate' on this host") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TableError(
            f"{path} cannot be read as a table of caps ({type(error).__name__}: {error}): "
            "run 'dask gpurt calibrate' again, which replaces it"
        ) from error


def write(table: OverlapTable) -> Path:
    """Write the table of a device atomically, in place of an earlier one; return its path."""
    path = path_of(table.device)
    path.parent.mkdir(parents=True, exist_ok=True)
    values = json.dumps({"format": FILE_FORMAT, **asdict(table)}, indent=1)
    replace(path, lambda file: file.write(values.encode()))
    return path
