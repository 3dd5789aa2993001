"""The tests under a residency cap: ``GPURT_TEST_RESIDENCY=4``, and the interposer in ``LD_PRELOAD``.

``ci/gpu_residency.sh`` runs them so. Their results are compared as they always are.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest

import dask_gpurt
from dask_gpurt.overlap import CapError, Caps, Interposer, NotLoadedError, Residency

#: Blocks of any kernel on an SM; 0 does not cap.
CAP = int(os.environ.get("GPURT_TEST_RESIDENCY", 0))
#: Settings of the workers of the tests.
SETTINGS: dict[str, Any] = {"gpurt.overlap.residency": CAP} if CAP else {}

_of_workers: Counter[str] = Counter()


def confine() -> None:
    """Cap what this process launches itself."""
    if CAP:
        try:
            Residency(Interposer()).apply(Caps(CAP))
        except (NotLoadedError, CapError) as error:
            raise pytest.UsageError(f"GPURT_TEST_RESIDENCY={CAP} is set, but {error}") from None


def count(client: Any) -> None:
    """Keep what the workers of a cluster tell, before they end."""
    if CAP:
        told = dask_gpurt.report(client)["counters"]
        _of_workers.update({name: int(told[name]) for name in told if name.startswith("residency.")})


def summary() -> list[str]:
    """Say how many launches were capped: a line for this process, one for the workers."""
    if not CAP:
        return []
    here = {f"residency.{name}": amount for name, amount in Interposer().counters().items()}
    return [
        f"launches {where}: {found.get('residency.capped', 0)} of {found.get('residency.seen', 0)} capped"
        for where, found in (("here", here), ("on workers", _of_workers))
    ]
