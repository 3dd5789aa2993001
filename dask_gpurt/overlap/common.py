"""What several workers have learnt, as one of them would know it. Pure.

Workers that take part in the same runs wait for the slowest of them: a setting pays once all use it. So they
decide from the same knowledge.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean

from dask_gpurt.overlap.estimate import mean_of
from dask_gpurt.overlap.knowledge import Beside, Kernel, Knowledge

#: The share of all compute below which others need not know of a kernel.
LITTLE = 0.01


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
