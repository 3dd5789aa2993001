"""Divide shards by output where they will be spilled, and work where memory is too short for it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from distributed import wait

import dask_gpurt
from dask_gpurt.device.host import HostDevice
from dask_gpurt.exchange import Shard
from dask_gpurt.frames.pandas import PandasTable
from dask_gpurt.observe import Fallback
from dask_gpurt.shuffle import joins
from dask_gpurt.shuffle.receiver import Receiver
from tests.helpers.allocations import failing_allocations, larger_ones_fail
from tests.helpers.in_process import on_cluster

MIB = 2**20
#: Bytes of an input, all inputs, and outputs.
INPUT_BYTES, INPUTS, OUTPUTS = 4 * MIB, 4, 6


def make(part: int) -> pd.DataFrame:
    values = np.random.default_rng(part).integers(0, 2**62, INPUT_BYTES // 16)
    return pd.DataFrame({"key": values, "value": values})


@pytest.mark.parametrize(
    ("in_place", "occupied", "divided"), [(False, 0, False), (False, 47, True), (True, 47, False)]
)
def test_shards_that_find_no_room_when_they_land_are_divided_by_output(
    monkeypatch: pytest.MonkeyPatch, in_place: bool, occupied: int, divided: bool
) -> None:
    """A spilled section is read back as a whole for each of its outputs."""
    monkeypatch.setattr(HostDevice, "reads_in_place", in_place)
    sections: list[int] = []
    receive = Receiver.receive

    async def recorded(self: Receiver, offers: Any) -> None:
        offers = list(offers)
        sections.extend(len(offer.sections) for offer in offers if isinstance(offer, Shard))
        await receive(self, offers)

    monkeypatch.setattr(Receiver, "receive", recorded)

    @on_cluster(workers=2, **{"gpurt.memory.device": 48 * MIB})
    async def run(client: Any, scheduler: Any, *workers: Any) -> None:
        # In pieces, so that no more than a few are spilled for the inputs.
        other = [
            client.submit(np.ones, MIB, np.uint8, workers=[worker.address], key=f"{worker.name}-{number}")
            for worker in workers
            for number in range(occupied)
        ]
        await wait(other)
        frame = dd.from_map(make, range(INPUTS), meta=make(0).iloc[:0])
        shuffled = frame.shuffle("key", npartitions=OUTPUTS)
        found = await client.compute(shuffled)
        pd.testing.assert_frame_equal(
            found.sort_values("key", ignore_index=True),
            pd.concat(map(make, range(INPUTS))).sort_values("key", ignore_index=True),
        )
        del other

    run()
    assert len(sections) == INPUTS * 2
    assert set(sections) == ({OUTPUTS // 2} if divided else {1})


# ---- work that does not fit is split within its tasks ---------------------------------------------

PARTS, ROWS = 4, 10_000
#: Maximum bytes of an array: less than one integer per row of a partition takes.
LIMIT = ROWS * 6


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Fail steps that need too large an array with a MemoryError; count the failures."""
    found: Counter[str] = Counter()

    def limited(name: str, step: Any) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            with failing_allocations(larger_ones_fail(LIMIT)) as allocations:
                try:
                    return step(*args, **options)
                finally:
                    found[name] += allocations.failed

        return run

    monkeypatch.setattr(PandasTable, "split", limited("split", PandasTable.split))
    monkeypatch.setattr(joins, "merge_chunk", limited("join", joins.merge_chunk))
    return found


def sides() -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return a large side, and one that matches few of its rows."""
    random = np.random.default_rng(0)
    left = pd.DataFrame({"key": random.permutation(PARTS * ROWS), "row": np.arange(PARTS * ROWS)})
    right = pd.DataFrame({"key": np.arange(0, PARTS * ROWS, 100), "x": random.random(PARTS * ROWS // 100)})
    return left, right


@on_cluster()
async def test_a_merge_with_too_little_memory_is_done_in_parts(
    client: Any, scheduler: Any, *crew: Any, refused: Counter[str]
) -> None:
    left, right = sides()
    with dask.config.set({"dataframe.shuffle.method": "gpurt"}):
        large, small = (dd.from_pandas(side, npartitions=PARTS, sort=False) for side in (left, right))
        merged = large.merge(small, on="key", broadcast=False)
        found = await client.compute(merged)
    rows = found.sort_values("row", ignore_index=True)
    pd.testing.assert_frame_equal(rows, left.merge(right, on="key"))
    assert refused["split"] >= PARTS
    assert refused["join"] >= 1
    report = await dask_gpurt.report(client)
    counts = [
        w["fallbacks"].get(Fallback.MEMORY_SPLIT.id, {}).get("count", 0) for w in report["workers"].values()
    ]
    assert sum(counts) >= PARTS + 1
    assert not any(w["counters"].get("memory.retries") for w in report["workers"].values()), "tasks ran once"
