"""Send the metadata of joins as bytes."""

from __future__ import annotations

from typing import Any

import dask
import dask.dataframe as dd
import pandas as pd
import pytest
from dask.core import flatten
from dask.dataframe.multi import merge_chunk
from dask.tokenize import tokenize
from distributed.protocol.pickle import dumps, loads

from dask_gpurt.dask_hooks import lighter_tasks
from dask_gpurt.dask_hooks.lighter_tasks import LateMetadata, defer_metadata
from dask_gpurt.dask_hooks.planning import graph_of

LEFT = pd.DataFrame({"key": [0, 1, 2], "kind": pd.Categorical(["a", "b", "a"])}, index=[3.0, 4.0, 5.0])
RIGHT = pd.DataFrame({"key": [1, 1, 5], "value": ["x", "y", "z"]})


def joined(left: pd.DataFrame = LEFT, right: pd.DataFrame = RIGHT, *, fuse: bool = True, **how: Any) -> Any:
    tables = [dd.from_pandas(each, npartitions=1, sort=False) for each in (left, right)]
    return tables[0].merge(tables[1], on="key", **how)[["kind", "value"]].optimize(fuse=fuse)


def joins(nodes: Any) -> list[Any]:
    """Return the joins of tasks, also within fused ones."""
    found = []
    for node in nodes:
        if getattr(node, "func", None) is merge_chunk:
            found.append(node)
        elif hasattr(node, "has_subgraph") and node.has_subgraph():
            found += joins(node.args[0].values())
    return found


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize(("left", "right"), [(LEFT, RIGHT), (LEFT[:0], RIGHT), (LEFT, RIGHT[:0])])
def test_joins_get_their_metadata_late(left: pd.DataFrame, right: pd.DataFrame, fuse: bool) -> None:
    """Also if a side is empty, when Dask takes labels and the dtype of the index from it."""
    frame = joined(left, right, fuse=fuse)
    graph = loads(dumps(graph_of(frame.expr)))
    (join,) = joins(graph.values())
    late = join.kwargs["result_meta"]
    assert type(late) is LateMetadata
    assert "frame" not in vars(late)
    (found,) = dask.get(graph, list(flatten(frame.__dask_keys__())))
    (expected,) = dask.get(dict(frame.expr.__dask_graph__()), list(flatten(frame.__dask_keys__())))
    pd.testing.assert_frame_equal(found, expected)


def test_tasks_have_the_tokens_that_they_have_with_dask() -> None:
    plan = joined(fuse=False).expr
    (join,), (plain,) = joins(graph_of(plan).values()), joins(plan.__dask_graph__().values())
    assert tokenize(join.kwargs["result_meta"]) == tokenize(plain.kwargs["result_meta"])


def test_other_joins_of_dask_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lighter_tasks, "_is_known", lambda seam: False)
    graph = dict(joined(fuse=False).expr.__dask_graph__())
    defer_metadata(graph)
    (join,) = joins(graph.values())
    assert isinstance(join.kwargs["result_meta"], pd.DataFrame)
