"""Give each output a section of its own in shards that will probably be spilled before they are read."""

from __future__ import annotations

from typing import Any

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from distributed import wait

from dask_gpurt.device.host import HostDevice
from dask_gpurt.exchange import Shard
from dask_gpurt.shuffle.receiver import Receiver
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
