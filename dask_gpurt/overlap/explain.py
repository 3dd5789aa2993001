"""What was learnt of kernels, as a table that says why each runs under its setting. Pure."""

from __future__ import annotations

from typing import Any

from dask_gpurt.overlap.governor import INDIFFERENT, Governor, Outlook, safest
from dask_gpurt.overlap.knowledge import PRIORITY, Knowledge


def rows(known: Knowledge) -> list[dict[str, Any]]:
    """A row for each kernel and setting of which something was measured.

    Returns
    -------
    list of dict
        ``kernel``, ``setting`` and ``samples``; the speeds of ``compute`` and ``communication`` together,
        as shares of those alone; the time that a step takes relative to priority only: ``total``, at
        ``best`` and at ``worst``; whether the setting is ``used``, and ``why``. Speeds and times are None
        as long as they can not be told.
    """
    return [row for name in sorted(known.kernels) for row in _of_kernel(known, name)]


def _of_kernel(known: Knowledge, name: str) -> list[dict[str, Any]]:
    kernel = known.kernels[name]
    governor = Governor(dict.fromkeys(kernel.beside, 0.0), known)
    if missing := governor.missing(kernel):
        nothing = dict.fromkeys(("compute", "communication", "total", "best", "worst"))
        first = {"kernel": name, "setting": str(PRIORITY), "samples": round(kernel.alone.count), **nothing}
        return [{**first, "used": True, "why": f"to be measured: {missing}"}]
    outlooks = governor.outlooks(kernel)
    used = safest(outlooks)
    return [
        {
            "kernel": name,
            "setting": str(setting),
            "samples": round(kernel.beside[setting].compute.count),
            **_figures(outlook, outlooks[PRIORITY]),
            "used": setting == used,
            "why": _why(outlook, outlooks[used]),
        }
        for setting, outlook in outlooks.items()
    ]


def _figures(outlook: Outlook, usual: Outlook) -> dict[str, float]:
    expected = outlook.expected
    totals = {"total": expected, "best": outlook.best, "worst": outlook.worst}
    return {
        "compute": expected.speeds.compute,
        "communication": expected.speeds.communication,
        **{name: course.total / usual.expected.total for name, course in totals.items()},
    }


def _why(outlook: Outlook, used: Outlook) -> str:
    if outlook is used:
        return "no other is faster at its worst"
    if outlook.best.total < used.expected.total * (1 - INDIFFERENT):
        return "may be faster, is not known well enough"
    if outlook.best.total < used.expected.total:
        return "hardly faster even at its best"
    return "slower even at its best"
