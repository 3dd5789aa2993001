"""Name operations for users, and tell of a plan, whatever an expression lacks."""

from __future__ import annotations

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest

from dask_gpurt.client.planning.origins import Origins, named
from tests.helpers.planned import Planner

TIMES = pd.DataFrame({"time": np.arange(20), "name": np.arange(20) % 3, "price": np.arange(20) / 2})


def trades_and_quotes() -> tuple[dd.DataFrame, dd.DataFrame]:
    return dd.from_pandas(TIMES[1::2], npartitions=3), dd.from_pandas(TIMES[::2], npartitions=2)


@pytest.mark.parametrize("how", ["inner", "asof"])
def test_joins_are_named_by_kind_and_keys(how: str) -> None:
    trades, quotes = trades_and_quotes()
    join = dd.merge_asof if how == "asof" else dd.merge
    assert named(join(trades, quotes, on="time").expr) == f"{how} join on time"
    indexed = join(trades.set_index("time"), quotes.set_index("time"), left_index=True, right_index=True)
    assert named(indexed.expr) == f"{how} join on index = index"


def test_a_join_by_the_last_row_before_is_told(planner: Planner) -> None:
    """Its class derives from that of other joins, and lacks their parameters."""
    trades, quotes = trades_and_quotes()
    dd.merge_asof(trades, quotes, on="time", by="name").optimize()
    assert planner.told["shuffles"] == {}


def test_a_plan_that_cannot_be_told_is_computed(planner: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> dict[str, str]:
        raise AttributeError("expressions of other libraries may lack anything")

    monkeypatch.setattr(Origins, "of_shuffles", fail)
    planned = dd.from_pandas(TIMES, npartitions=3).price.sum().optimize()
    assert "planning.not-told" in planner.metrics.snapshot()["fallbacks"]
    with dask.config.set(scheduler="sync"):
        assert planned.compute() == TIMES.price.sum()
