"""What is known of kernels beside communication: measured, remembered, forgotten once it changed. Pure.

What a setting is judged by is what each of the two costs the other: the time that a byte of communication
adds to the tasks beside it, and the time for which a second of compute holds communication up. Which of them
counts depends on what a program waits for. Both are taken over a whole step, from the begin of one run to
that of the next: a run first splits, then moves, then waits for others, and a single task beside it sees only
one of that.

Workers that take part in the same runs wait for the slowest of them: a setting pays once all use it. So they
decide from the same knowledge. It is kept in a file for each kind of device and libraries.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from dask_gpurt.observe.estimators import Estimate, mean_of
from dask_gpurt.overlap.samples import PRIORITY, Alone, Ran, Setting, Step

#: What the work of a step counts in the next one: so the last ten steps or so are remembered.
STEPS_KEPT = 0.9
#: Steps after which a setting that was not used meanwhile is forgotten: it may be better now.
STALE = 2000
#: The most kernels that are known; of more, those with the fewest samples are forgotten.
MOST_KERNELS = 500
#: The least share of its bytes that communication is taken to have moved beside tasks.
FEWEST = 0.2
#: Tasks alone from which it is known how fast that is, and steps of communication alone.
FEW, FEW_STEPS_ALONE = 5, 3
#: The share of all compute below which others need not know of a kernel.
LITTLE = 0.01
#: The layout of the file, as this version of the package writes it.
FORMAT = 3


class Costs(NamedTuple):
    """What compute and communication cost each other.

    Parameters
    ----------
    adds
        Seconds that a byte of communication adds to compute.
    delays
        Seconds that a second of compute delays communication; None until its pace alone is known.
    """

    adds: float
    delays: float | None


@dataclass
class Beside:
    """How it is under a setting: work a second of the kernel, and what both cost each other.

    ``at`` is how many steps of the kernel there had been at the last one of this setting.
    """

    compute: Estimate = field(default_factory=Estimate)
    adds: Estimate = field(default_factory=Estimate)
    delays: Estimate = field(default_factory=Estimate)
    at: int = 0

    def bounds(self, off: float) -> Costs:
        """The costs, so many times as far off as they may be."""
        adds, delays = (
            estimate.mean + off * estimate.uncertainty if estimate.count else None
            for estimate in (self.adds, self.delays)
        )
        return Costs(adds or 0.0, delays)


@dataclass
class Kernel:
    """What is known of a kernel.

    Its work a second ``alone``, how it was ``beside`` communication, in how many ``steps``, and its ``work``
    in the last ones. ``usual`` is the work a second that its costs are against as long as it is never alone.
    """

    alone: Estimate = field(default_factory=Estimate)
    beside: dict[Setting, Beside] = field(default_factory=dict)
    steps: int = 0
    work: float = 0.0
    usual: float = 0.0

    @property
    def samples(self) -> float:
        """Of anything."""
        return self.steps + self.alone.count

    def seconds(self) -> float:
        """What it did in the last steps, in seconds alone."""
        return self.work / speed if (speed := self.speed()) else 0.0

    def speed(self) -> float:
        """Work a second alone; until that is measured, that of its first steps with priority only.

        As long as no task is ever alone the value makes no difference between settings, if it stays.
        """
        if self.alone.count < FEW and PRIORITY in self.beside:
            return self.usual or self.beside[PRIORITY].compute.mean
        return self.alone.mean

    def add(self, ran: Ran, costs: Costs | None, seconds: float, work: float, moved: float) -> bool:
        """Take the part of this kernel in a step; whether something of it has changed.

        Parameters
        ----------
        costs
            Those of the step; None if they are not known.
        seconds, work, moved
            That the step took, those of its tasks alone, and its bytes.
        """
        self.steps += 1
        beside = self.beside.setdefault(ran.setting, Beside())
        beside.at = self.steps
        self.beside = {setting: of for setting, of in self.beside.items() if self.steps - of.at < STALE}
        beside.compute.add(ran.work / ran.seconds)
        if not self.usual and ran.setting == PRIORITY and beside.compute.count >= FEW:
            self.usual = beside.compute.mean
            if self.alone.count < FEW:
                self._begin_again()
                return False
        if costs is None:
            return False
        changed = beside.adds.add(costs.adds, seconds / moved)
        if costs.delays is not None:
            changed |= beside.delays.add(costs.delays, seconds / work)
        return changed

    def _begin_again(self) -> None:
        """Forget costs that are against another speed."""
        for beside in self.beside.values():
            beside.adds, beside.delays = Estimate(), Estimate()

    def forget(self) -> None:
        """Forget how it was beside communication."""
        self.beside.clear()
        self.usual = 0.0


class Knowledge:
    """All that is known on a device."""

    def __init__(self) -> None:
        self.kernels: dict[str, Kernel] = {}
        #: Bytes of communication of the last steps, and how many steps these were.
        self.moved = self.steps = 0.0
        #: Seconds that a byte takes alone.
        self.pace = Estimate()

    def compute(self) -> float:
        """What tasks did in the last steps, in seconds alone."""
        return sum(kernel.seconds() for kernel in self.kernels.values())

    def communication(self) -> float | None:
        """What communication did in the last steps, in seconds alone; None as long as that is not known."""
        return self.moved * self.pace.mean if self.pace.count >= FEW_STEPS_ALONE else None

    def total(self, costs: Costs) -> float:
        """Seconds of the last steps, if compute and communication had cost each other so much.

        As they run side by side until one is done, and the other then goes on alone: the longer of compute
        with what communication adds to it, and of communication with what compute delays it by.
        """
        alone = self.communication()
        total = self.compute() + self.moved * costs.adds
        if alone is None or costs.delays is None:
            return total
        return max(total, alone + self.compute() * costs.delays)

    def add(self, alone: Alone) -> str | None:
        """Take a task; what has changed, so that what was known of it was forgotten."""
        kernel = self._kernel(alone.kernel)
        kernel.work += alone.work
        if not kernel.alone.add(alone.work / alone.seconds):
            if kernel.alone.count == FEW:
                kernel.beside.clear()  # costs so far are against another speed
            return None
        self.kernels[alone.kernel] = Kernel(work=kernel.work)
        return alone.kernel

    def add_step(self, step: Step, of: str | None = None) -> str | None:
        """Take a step; what has changed, so that what was known of it was forgotten.

        Parameters
        ----------
        of
            The only kernel that the step says something of; None for all of it.
        """
        self.moved = self.moved * STEPS_KEPT + step.moved
        self.steps = self.steps * STEPS_KEPT + 1
        for kernel in self.kernels.values():
            kernel.work *= STEPS_KEPT
        for name, ran in step.ran.items():
            self._kernel(name).work += ran.work
        if not step.steady or not step.moved:
            return None
        if not step.ran:
            self._alone(step)
            return None
        costs, work = self.costs(step), self._work(step)
        changed = [
            name
            for name, ran in step.ran.items()
            if of in (None, name) and self.kernels[name].add(ran, costs, step.seconds, work, step.moved)
        ]
        for name in changed:
            self.kernels[name].forget()
        return ", ".join(changed) or None

    def _alone(self, step: Step) -> None:
        self.pace.add(step.idle / step.moved)
        if self.pace.count == FEW_STEPS_ALONE:
            for kernel in self.kernels.values():
                kernel.beside.clear()  # costs so far were told apart in another way

    def costs(self, step: Step) -> Costs | None:
        """What both have cost each other in a step; None until it is known how fast its kernels are."""
        if not (work := self._work(step)):
            return None
        if self.communication() is None:
            return Costs((step.seconds - work) / step.moved, None)
        pace = self.pace.mean
        # In idle seconds communication went on as it does alone.
        beside = max(step.moved - step.idle / pace, FEWEST * step.moved)
        return Costs((step.seconds - step.idle - work) / beside, (step.seconds - step.moved * pace) / work)

    def _work(self, step: Step) -> float:
        """Of the tasks of a step, in seconds alone; 0 until it is known how fast that is."""
        speeds = {name: self.kernels[name].speed() for name in step.ran}
        if not all(speeds.values()):
            return 0.0
        return sum(ran.work / speeds[name] for name, ran in step.ran.items())

    def _kernel(self, name: str) -> Kernel:
        if name not in self.kernels and len(self.kernels) >= MOST_KERNELS:
            del self.kernels[min(self.kernels, key=lambda other: self.kernels[other].samples)]
        return self.kernels.setdefault(name, Kernel())

    # ---- as plain values ---------------------------------------------------------------

    def plain(self) -> dict[str, Any]:
        """It all, as values that JSON holds."""
        return {
            "moved": self.moved,
            "steps": self.steps,
            "pace": self.pace.plain(),
            "kernels": {name: _plain(kernel) for name, kernel in self.kernels.items()},
        }

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Knowledge:
        """The knowledge that :meth:`plain` was called of.

        Raises
        ------
        KeyError, TypeError, ValueError
            When the values are none of it.
        """
        known = cls()
        known.moved, known.steps = float(values["moved"]), float(values["steps"])
        known.pace = Estimate.of(values["pace"])
        known.kernels = {str(name): _kernel(of) for name, of in values["kernels"].items()}
        return known


def _plain(kernel: Kernel) -> dict[str, Any]:
    return {
        "steps": kernel.steps,
        "work": kernel.work,
        "usual": kernel.usual,
        "alone": kernel.alone.plain(),
        "beside": {
            str(setting): [beside.at, *(one.plain() for one in (beside.compute, beside.adds, beside.delays))]
            for setting, beside in kernel.beside.items()
        },
    }


def _kernel(values: Mapping[str, Any]) -> Kernel:
    beside = {
        Setting.parse(name): Beside(Estimate.of(compute), Estimate.of(adds), Estimate.of(delays), int(at))
        for name, (at, compute, adds, delays) in values["beside"].items()
    }
    numbers = int(values["steps"]), float(values["work"]), float(values["usual"])
    return Kernel(Estimate.of(values["alone"]), beside, *numbers)


# ---- of several workers ----------------------------------------------------------------


def current(known: Knowledge) -> Knowledge:
    """Of a worker's knowledge what its last steps consisted of."""
    least = LITTLE * known.compute()
    kernels = {name: kernel for name, kernel in known.kernels.items() if kernel.seconds() > least}
    return _with_kernels(known, kernels)


def common(several: Sequence[Knowledge]) -> Knowledge:
    """What a mean worker knows, of the kernels that any of them knows.

    It knows no more of each than a mean one: a step is the same for all that wait for each other in it, and
    so its samples are no independent ones.
    """
    found = Knowledge()
    if several:
        found.moved, found.steps = fmean(one.moved for one in several), fmean(one.steps for one in several)
    found.pace = mean_of(one.pace for one in several)
    names = dict.fromkeys(name for one in several for name in one.kernels)
    found.kernels = {
        name: _common([one.kernels[name] for one in several if name in one.kernels]) for name in names
    }
    return found


def preferred(agreed: Knowledge, own: Knowledge) -> Knowledge:
    """What has been agreed upon, and what is one's own of kernels that others have not spoken of."""
    return _with_kernels(agreed, {**own.kernels, **agreed.kernels})


def _with_kernels(known: Knowledge, kernels: dict[str, Kernel]) -> Knowledge:
    found = Knowledge()
    found.moved, found.steps, found.pace, found.kernels = known.moved, known.steps, known.pace, kernels
    return found


def _common(kernels: Sequence[Kernel]) -> Kernel:
    settings = dict.fromkeys(setting for kernel in kernels for setting in kernel.beside)
    usual = [kernel.usual for kernel in kernels if kernel.usual]  # 0 where it is not known yet
    return Kernel(
        mean_of(kernel.alone for kernel in kernels),
        {
            setting: _beside(kernel.beside[setting] for kernel in kernels if setting in kernel.beside)
            for setting in settings
        },
        round(fmean(kernel.steps for kernel in kernels)),
        fmean(kernel.work for kernel in kernels),
        fmean(usual) if usual else 0.0,
    )


def _beside(several: Iterable[Beside]) -> Beside:
    found = list(several)
    compute, adds, delays = (
        mean_of(getattr(one, name) for one in found) for name in ("compute", "adds", "delays")
    )
    return Beside(compute, adds, delays, max(one.at for one in found))


# ---- in a file -------------------------------------------------------------------------


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
