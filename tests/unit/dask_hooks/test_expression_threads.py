"""Create, read and release Dask's expressions from several threads of one process."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from functools import cached_property
from typing import Any
from weakref import WeakValueDictionary

import dask.dataframe as dd
import pandas as pd
import pytest
from dask._expr import Expr, SingletonExpr

from dask_gpurt.dask_hooks import PatchSet
from dask_gpurt.dask_hooks.comparison import differences
from dask_gpurt.dask_hooks.expression_threads import share_expressions
from dask_gpurt.dask_hooks.seams import PLANNING
from dask_gpurt.observe import Metrics
from dask_gpurt.planning import PlanningCache


@pytest.fixture
def patches() -> Iterator[PatchSet]:
    found = PatchSet()
    try:
        yield found
    finally:
        found.restore()


class LosesBetweenLooks(WeakValueDictionary[str, Any]):
    """Lose an entry after confirming it, as if another thread had released it in between."""

    def __contains__(self, name: object) -> bool:
        there = super().__contains__(name)
        if there:
            del self[str(name)]
        return there


def test_a_graph_is_unpickled_while_another_thread_lets_go_of_it(
    monkeypatch: pytest.MonkeyPatch, patches: PatchSet
) -> None:
    """A scheduler in its client's process used to refuse the graph: KeyError, then "lost dependencies"."""
    expression = dd.from_pandas(pd.DataFrame({"x": [1, 2]}), npartitions=2).x.sum().optimize().expr
    sent = pickle.dumps(expression)

    def lose() -> None:
        monkeypatch.setattr(type(expression), "_instances", LosesBetweenLooks({expression._name: expression}))

    lose()
    with pytest.raises(KeyError):  # otherwise Dask has fixed it, and the replacement is obsolete
        pickle.loads(sent)
    lose()
    share_expressions(patches)
    assert pickle.loads(sent)._name == expression._name


def test_equal_expressions_stay_one(patches: PatchSet) -> None:
    share_expressions(patches)
    frame = dd.from_pandas(pd.DataFrame({"x": [1, 2]}), npartitions=2)
    assert (frame.x + 1).expr is (frame.x + 1).expr


def test_a_key_error_of_an_operand_is_raised(monkeypatch: pytest.MonkeyPatch, patches: PatchSet) -> None:
    def fails(*_: object, **__: object) -> None:
        raise KeyError("operand")

    monkeypatch.setattr(Expr, "__new__", fails)
    share_expressions(patches)
    with pytest.raises(KeyError, match="operand"):
        SingletonExpr()


def test_planning_is_kept_beside_it(patches: PatchSet) -> None:
    share_expressions(patches)
    assert differences(PLANNING.seams) == []
    cache = PlanningCache(lambda: "client", metrics := Metrics())
    cache.install()
    try:
        assert len(dd.from_dict({"x": [1, 2]}, npartitions=1).x.sum().optimize().dask) > 0
        assert metrics.snapshot()["counters"]["planning.expressions.not-kept"] > 0
        assert not metrics.snapshot()["fallbacks"]
    finally:
        cache.remove()


class _Sort(Expr):
    @cached_property
    def bounds(self) -> list[int]:
        return [0, 1]


def test_other_classes_keep_their_lock_and_all_is_restored(patches: PatchSet) -> None:
    before, made_by = vars(cached_property)["__get__"], SingletonExpr.__new__
    asked = []

    class Plain:
        @cached_property
        def value(self) -> int:
            return 1

    def get(self: object, instance: object, owner: object = None) -> object:
        asked.append(instance)
        return before(self, instance, owner)

    cached_property.__get__ = get  # type: ignore[method-assign, assignment]
    try:
        share_expressions(patches)
        plain = Plain()
        assert plain.value == 1
        assert asked == [plain]
        sort = _Sort()
        assert sort.bounds is sort.bounds
        patches.restore()
        assert vars(cached_property)["__get__"] is get
        assert SingletonExpr.__new__ is made_by
    finally:
        cached_property.__get__ = before  # type: ignore[method-assign]
