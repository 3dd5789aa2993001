"""Raise the errors of outputs as they are: whoever catches them does not know of shuffles."""

from __future__ import annotations

from typing import Any

import dask.dataframe as dd
import pandas as pd
import pytest

from tests.helpers.in_process import on_cluster
from tests.helpers.nightly import nightly


class Unreadable:
    """A value that raises an error when an output with it is assembled."""

    def __init__(self, error: type[Exception]):
        self.error = error

    def __reduce__(self) -> Any:
        return _raise, (self.error,)


def _raise(error: type[Exception]) -> None:
    raise error("of a test")


@pytest.mark.parametrize("error", [nightly(MemoryError), ZeroDivisionError])
@pytest.mark.parametrize("tiers", [True, False])
@pytest.mark.parametrize("operation", ["shuffle", "merge"])
def test_an_error_of_an_output_keeps_its_type(error: type[Exception], tiers: bool, operation: str) -> None:
    settings = {"gpurt.memory.tiers": tiers, "gpurt.memory.retries": 1, "dataframe.convert-string": False}

    @on_cluster(workers=1, **settings)
    async def run(client: Any, scheduler: Any, worker: Any) -> None:
        meta = pd.DataFrame({"k": pd.Series(dtype="int64"), "x": pd.Series(dtype=object)})
        frame = dd.from_map(
            lambda number: meta.reindex(range(9)).assign(k=number, x=Unreadable(error)), range(2), meta=meta
        )
        result = frame.shuffle("k") if operation == "shuffle" else frame.merge(frame[["k"]], on="k")
        with pytest.raises(error, match="of a test") as caught:
            await client.compute(result.map_partitions(len, meta=("rows", "int64")))
        assert "P2P" not in str(caught.value)

    run()
