"""What was learnt of kernels, as a table that says why each runs under its setting. Pure."""

from __future__ import annotations

from typing import Any

from dask_gpurt.overlap.governor import INDIFFERENT, Governor, Outlook, safest
from dask_gpurt.overlap.knowledge import Knowledge
from dask_gpurt.overlap.steps import PRIORITY

#: The share of its speed that a step keeps at worst, where nobody says: what was measured counts alone.
UNSAID = 0.01


def rows(known: Knowledge) -> list[dict[str, Any]]:
    """A row for each kernel and setting of which something was measured.

    Returns
    -------
    list of dict
        ``kernel``, ``setting`` and ``samples``, the steps measured; the speed of ``compute`` beside
        communication, as a share of that alone; what communication ``adds`` to a step, as a share of the
        step with priority only, and the time that the step then takes relative to that one: ``total``, at
        ``best`` and at ``worst``; whether the setting is ``used``, and ``why``. Shares are None as long as
        they can not be told.
    """
    return [row for name in sorted(known.kernels) for row in _of_kernel(known, name)]


def _of_kernel(known: Knowledge, name: str) -> list[dict[str, Any]]:
    kernel = known.kernels[name]
    governor = Governor(dict.fromkeys(kernel.beside, UNSAID), known)
    if missing := governor.missing(kernel):
        nothing = dict.fromkeys(("compute", "adds", "total", "best", "worst"))
        first = {"kernel": name, "setting": str(PRIORITY), "samples": round(kernel.alone.count), **nothing}
        return [{**first, "used": True, "why": f"to be measured: {missing}"}]
    outlooks = governor.outlooks(kernel)
    used = safest(outlooks)
    return [
        {
            "kernel": name,
            "setting": str(setting),
            "samples": round(kernel.beside[setting].adds.count),
            "compute": kernel.beside[setting].compute.mean / kernel.speed(),
            **_figures(outlook, outlooks[PRIORITY], known.moved * kernel.beside[setting].adds.mean),
            "used": setting == used,
            "why": _why(outlook, outlooks[used]),
        }
        for setting, outlook in outlooks.items()
    ]


def _figures(outlook: Outlook, usual: Outlook, adds: float) -> dict[str, float]:
    step = usual.expected or 1.0
    totals = {"total": outlook.expected, "best": outlook.best, "worst": outlook.worst}
    return {"adds": adds / step, **{name: seconds / step for name, seconds in totals.items()}}


def _why(outlook: Outlook, used: Outlook) -> str:
    if outlook is used:
        return "no other is faster at its worst"
    if outlook.best < used.expected * (1 - INDIFFERENT):
        return "may be faster, is not known well enough"
    if outlook.best < used.expected:
        return "hardly faster even at its best"
    return "slower even at its best"
