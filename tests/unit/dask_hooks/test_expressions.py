"""Expressions of Dask that several threads of one process make and let go of."""

from __future__ import annotations

import pickle
from typing import Any
from weakref import WeakValueDictionary

import dask.dataframe as dd
import pandas as pd
import pytest
from dask._expr import SingletonExpr

from dask_gpurt.dask_hooks.expr import find_in_one_step


class LosesBetweenLooks(WeakValueDictionary[str, Any]):
    """Loses what it has said to have, as if another thread had let go of it right then."""

    def __contains__(self, name: object) -> bool:
        there = super().__contains__(name)
        if there:
            del self[str(name)]
        return there


def test_a_graph_is_unpickled_while_another_thread_lets_go_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler in the process of its client refused the graph: KeyError, and then "lost dependencies"."""
    expression = dd.from_pandas(pd.DataFrame({"x": [1, 2]}), npartitions=2).x.sum().optimize().expr
    sent = pickle.dumps(expression)
    monkeypatch.setattr(SingletonExpr, "__new__", vars(SingletonExpr)["__new__"])  # given back afterwards
    monkeypatch.setattr(type(expression), "_instances", LosesBetweenLooks({expression._name: expression}))
    with pytest.raises(KeyError):  # else Dask has mended it, and nothing has to be replaced any more
        pickle.loads(sent)
    find_in_one_step()
    assert pickle.loads(sent)._name == expression._name


def test_equal_expressions_stay_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SingletonExpr, "__new__", vars(SingletonExpr)["__new__"])
    find_in_one_step()
    frame = dd.from_pandas(pd.DataFrame({"x": [1, 2]}), npartitions=2)
    assert (frame.x + 1).expr is (frame.x + 1).expr
