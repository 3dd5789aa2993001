"""Run the tests under a residency cap: ``GPURT_TEST_RESIDENCY=4``, with the interposer in ``LD_PRELOAD``.

``ci/gpu_residency.sh`` runs them so. Results are compared as without the cap.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest

import dask_gpurt
from dask_gpurt.overlap import CapError, Caps, Interposer, NotLoadedError, Residency

#: Maximum number of blocks of a kernel on an SM; 0 means no cap.
CAP = int(os.environ.get("GPURT_TEST_RESIDENCY", 0))
#: Settings of the tests' workers.
SETTINGS: dict[str, Any] = {"gpurt.overlap.mode": CAP} if CAP else {}

_of_workers: Counter[str] = Counter()


def confine() -> None:
    """Cap the launches of this process."""
    if CAP:
        try:
            Residency(Interposer()).apply(Caps(CAP))
        except (NotLoadedError, CapError) as error:
            raise pytest.UsageError(f"GPURT_TEST_RESIDENCY={CAP} is set, but {error}") from None


def count(client: Any) -> None:
    """Add the counters of a cluster's workers, before they end."""
    if CAP:
        told = dask_gpurt.report(client)["counters"]
        _of_workers.update({name: int(told[name]) for name in told if name.startswith("residency.")})


def summary() -> list[str]:
    """Report how many launches were capped: one line for this process, one for the workers."""
    if not CAP:
        return []
    here = {f"residency.{name}": amount for name, amount in Interposer().counters().items()}
    return [
        f"launches {where}: {found.get('residency.capped', 0)} of {found.get('residency.seen', 0)} capped"
        for where, found in (("here", here), ("on workers", _of_workers))
    ]
