"""Generate the tables of the bench: reproducible, complete, and with matching join keys."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from dask_gpurt.tools.bench.tables import MAX_ITEMS, TABLES, Tables, TableSize, make

SCALE, PARTITIONS = 0.001, 5
SIZE = TableSize(SCALE, PARTITIONS)


def whole(name: str) -> pd.DataFrame:
    parts = range(SIZE.partitions_of(name))
    return pd.concat([make(part, name, SCALE, PARTITIONS) for part in parts], ignore_index=True)


def test_keys_are_as_in_tpch() -> None:
    customer, orders, items = map(whole, TABLES)
    assert list(customer.c_custkey) == list(range(150))
    assert list(orders.o_orderkey) == list(range(1500))
    assert set(orders.o_custkey) <= {key for key in customer.c_custkey if key % 3 != 0}
    per_order = items.groupby("l_orderkey").size()
    assert list(per_order.index) == list(orders.o_orderkey)
    assert (per_order.min(), per_order.max()) == (1, MAX_ITEMS)
    joined = items.merge(orders, left_on="l_orderkey", right_on="o_orderkey")
    assert (joined.l_shipdate > joined.o_orderdate).all()


@pytest.mark.parametrize("name", TABLES)
def test_a_partition_is_the_same_each_time_and_has_the_columns_that_are_asked_for(name: str) -> None:
    one = make(1 % SIZE.partitions_of(name), name, SCALE, PARTITIONS)
    again = make(1 % SIZE.partitions_of(name), name, SCALE, PARTITIONS, columns=list(one.columns[:1]))
    pd.testing.assert_frame_equal(one[one.columns[:1]], again)


def test_written_tables_equal_the_generated_ones(tmp_path: Path) -> None:
    written, made = Tables(SIZE, folder=str(tmp_path)), Tables(SIZE)
    written.write()
    assert [path.name for path in tmp_path.iterdir()] == ["gpurt-bench"]
    for name in TABLES:
        found, wanted = (each[name].compute(scheduler="sync") for each in (written, made))
        pd.testing.assert_frame_equal(found.reset_index(drop=True), wanted.reset_index(drop=True))
        assert written[name].npartitions == made[name].npartitions
