"""Give right rows, and errors as they are, where shuffles of Dask do otherwise, under each of its methods."""

from __future__ import annotations

from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from distributed import Client

from tests.helpers.clusters import cluster
from tests.helpers.nightly import only_by_day

NUMBERS, DAYS = np.arange(60), pd.date_range("2026-01-01", periods=60)
LEFT = pd.DataFrame({"k": NUMBERS % 7, "day": DAYS.as_unit("ns"), "x": NUMBERS})
RIGHT = pd.DataFrame({"k": NUMBERS % 5, "day": DAYS.as_unit("us"), "y": NUMBERS})


@pytest.fixture(scope="module")
def client() -> Any:
    with cluster(here=True) as client:
        yield client


@pytest.fixture(params=["default", "taken over", "not taken over", "p2p"])
def _method(request: pytest.FixtureRequest, client: Client) -> Any:
    method = {"default": None, "p2p": "p2p"}.get(request.param, "tasks")
    takeover = request.param != "not taken over"
    with dask.config.set({"dataframe.shuffle.method": method, "gpurt.takeover": takeover}):
        yield


def table(frame: pd.DataFrame, partitions: int) -> Any:
    return dd.from_pandas(frame, npartitions=partitions, sort=False)


@pytest.mark.usefixtures("_method")
def test_a_join_with_distinct_rows_whose_key_is_renamed() -> None:
    """Dask looks for the rows' key under the name None and raises."""
    keys = table(RIGHT, 3)[["k"]].drop_duplicates().rename(columns={"k": "key"})
    joined = table(LEFT, 4).merge(keys, left_on="k", right_on="key").compute()
    assert sorted(joined.x) == [x for x in NUMBERS if x % 7 < 5]


@pytest.mark.usefixtures("client")
@pytest.mark.parametrize("method", [None, "tasks"])
def test_a_shift_within_groups_where_labels_of_the_index_repeat(method: str | None) -> None:
    """Dask sorts rows by their index before."""
    whole = LEFT.set_axis(NUMBERS % 15)
    with dask.config.set({"dataframe.shuffle.method": method}):
        found = table(whole, 4).groupby("k").x.shift(1, meta=("x", "float64")).compute()
    expected = whole.groupby("k").x.shift(1)
    assert sorted(found.fillna(-1).items()) == sorted(expected.fillna(-1).items())


@pytest.mark.usefixtures("_method")
def test_frames_without_columns() -> None:
    assert len(table(LEFT, 4)[[]].drop_duplicates(split_out=True).compute()) == len(LEFT)


OPERATIONS = ("shuffle", "merge", "set_index", "groupby", "sort_values")


@pytest.mark.usefixtures("client")
@pytest.mark.parametrize("operation", only_by_day(OPERATIONS, ["merge", "groupby"]))
@pytest.mark.parametrize("has", ["more", "less"])
def test_partitions_with_other_columns_are_shuffled_as_by_tasks(operation: str, has: str) -> None:
    def part(number: int) -> pd.DataFrame:
        whole = LEFT[["k", "x"]].iloc[number * 15 : number * 15 + 15].assign(v=number)
        if number != 2:
            return whole
        return whole.drop(columns="v") if has == "less" else whole.assign(more=1)

    programs: dict[str, Any] = {
        "shuffle": lambda frame: frame.shuffle("k"),
        "merge": lambda frame: frame.merge(table(RIGHT[["k", "y"]], 4), on="k"),
        "set_index": lambda frame: frame.set_index("x", divisions=[0, 20, 40, 59]),
        "groupby": lambda frame: frame.groupby("k").apply(len, meta=("rows", "int64")),
        "sort_values": lambda frame: frame.sort_values("x"),
    }
    results = []
    for takeover in (True, False):
        with dask.config.set({"dataframe.shuffle.method": "tasks", "gpurt.takeover": takeover}):
            frame = dd.from_map(part, range(4), meta=LEFT[["k", "x"]].iloc[:0].assign(v=1))
            found = programs[operation](frame).compute().reset_index()
            results.append(found.sort_values([*found.columns]).reset_index(drop=True))
    pd.testing.assert_frame_equal(*results)


@pytest.mark.usefixtures("client")
@pytest.mark.parametrize("takeover", [True, False])
def test_an_error_of_rows_keeps_its_type(takeover: bool) -> None:
    """Dask compares keys with divisions as each partition is transferred."""
    frame = dd.from_map(
        lambda number: LEFT.assign(x="text")[["x", "k"]], range(3), meta=LEFT[["x", "k"]].iloc[:0]
    )
    with (
        dask.config.set({"dataframe.shuffle.method": "tasks", "gpurt.takeover": takeover}),
        pytest.raises(TypeError) as caught,
    ):
        frame.set_index("x", divisions=[0, 20, 40, 59]).compute()
    assert "P2P" not in str(caught.value)
    assert caught.tb is not None
