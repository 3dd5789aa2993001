"""Create and release Dask's expressions from several threads of one process."""

from __future__ import annotations

import inspect
import pickle
from typing import Any
from weakref import WeakValueDictionary

import dask.dataframe as dd
import pandas as pd
import pytest
from dask._expr import SingletonExpr

from dask_gpurt.dask_hooks.comparison import differences
from dask_gpurt.dask_hooks.expr import find_in_one_step
from dask_gpurt.dask_hooks.seams import PLANNING
from dask_gpurt.observe import Metrics
from dask_gpurt.planning import PlanningCache


class LosesBetweenLooks(WeakValueDictionary[str, Any]):
    """Lose an entry after confirming it, as if another thread had released it in between."""

    def __contains__(self, name: object) -> bool:
        there = super().__contains__(name)
        if there:
            del self[str(name)]
        return there


def as_shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore Dask's own method for a test, also where chaos has run in this process before."""
    monkeypatch.setattr(SingletonExpr, "__new__", staticmethod(inspect.unwrap(SingletonExpr.__new__)))


def test_a_graph_is_unpickled_while_another_thread_lets_go_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler in its client's process used to refuse the graph: KeyError, then "lost dependencies"."""
    expression = dd.from_pandas(pd.DataFrame({"x": [1, 2]}), npartitions=2).x.sum().optimize().expr
    sent = pickle.dumps(expression)
    as_shipped(monkeypatch)
    monkeypatch.setattr(type(expression), "_instances", LosesBetweenLooks({expression._name: expression}))
    with pytest.raises(KeyError):  # otherwise Dask has fixed it, and the replacement is obsolete
        pickle.loads(sent)
    find_in_one_step()
    assert pickle.loads(sent)._name == expression._name


def test_equal_expressions_stay_one(monkeypatch: pytest.MonkeyPatch) -> None:
    as_shipped(monkeypatch)
    find_in_one_step()
    frame = dd.from_pandas(pd.DataFrame({"x": [1, 2]}), npartitions=2)
    assert (frame.x + 1).expr is (frame.x + 1).expr


def test_planning_is_kept_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """After chaos has run in a process, the runtime can still be enabled there."""
    as_shipped(monkeypatch)
    find_in_one_step()
    find_in_one_step()
    assert differences(PLANNING.seams) == []
    cache = PlanningCache(lambda: "client", metrics := Metrics())
    cache.install()
    try:
        assert len(dd.from_dict({"x": [1, 2]}, npartitions=1).x.sum().optimize().dask) > 0
        assert metrics.snapshot()["counters"]["planning.expressions.not-kept"] > 0
        assert not metrics.snapshot()["fallbacks"]
    finally:
        cache.remove()
