"""Memory of a worker that its settings grant is not counted as growth."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.chaos.leftovers import trimmed
from dask_gpurt.memory.host import BlockPool

SIZE_BYTES = 256 * 2**20


def pin(memory: np.ndarray) -> Callable[[], None]:
    return lambda: None


@pytest.mark.parametrize("is_on", [True, False], ids=["on", "off"])
def test_the_pinned_tier_is_switched_on(is_on: bool) -> None:
    worker: Any = SimpleNamespace(plugins={})
    before = trimmed(worker)
    pool = BlockPool(SIZE_BYTES, register=pin)
    pool.free(pool.allocate(SIZE_BYTES))
    worker.plugins["gpurt"] = SimpleNamespace(is_on=is_on, tiers=SimpleNamespace(pinned=pool))
    expected = 0 if is_on else SIZE_BYTES
    assert trimmed(worker) - before == pytest.approx(expected, abs=SIZE_BYTES / 4)
    pool.close()
