"""Create, read and release Dask's expressions from several threads of one process."""

from __future__ import annotations

import pickle
import sys
import threading
from collections.abc import Iterator
from functools import cached_property
from typing import Any
from weakref import WeakValueDictionary

import dask.dataframe as dd
import pandas as pd
import pytest
from dask._expr import Expr, SingletonExpr

from dask_gpurt.dask_hooks import expression_threads
from dask_gpurt.dask_hooks.comparison import differences
from dask_gpurt.dask_hooks.expression_threads import sharing_expressions
from dask_gpurt.dask_hooks.seams import PLANNING
from tests.helpers.planned import Planner
from tests.helpers.waiting import THREAD_LIMIT_S


class LosesBetweenLooks(WeakValueDictionary[str, Any]):
    """Lose an entry after confirming it, as if another thread had released it in between."""

    def __contains__(self, name: object) -> bool:
        there = super().__contains__(name)
        if there:
            del self[str(name)]
        return there


def test_a_graph_is_unpickled_while_another_thread_lets_go_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler in its client's process used to refuse the graph: KeyError, then "lost dependencies"."""
    expression = dd.from_pandas(pd.DataFrame({"x": [1, 2]}), npartitions=2).x.sum().optimize().expr
    sent = pickle.dumps(expression)

    def lose() -> None:
        monkeypatch.setattr(type(expression), "_instances", LosesBetweenLooks({expression._name: expression}))

    lose()
    with pytest.raises(KeyError):  # otherwise Dask has fixed it, and the replacement is obsolete
        pickle.loads(sent)
    lose()
    with sharing_expressions():
        assert pickle.loads(sent)._name == expression._name


def test_equal_expressions_stay_one() -> None:
    with sharing_expressions():
        frame = dd.from_pandas(pd.DataFrame({"x": [1, 2]}), npartitions=2)
        assert (frame.x + 1).expr is (frame.x + 1).expr


def test_a_key_error_of_an_operand_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise KeyError("operand")

    monkeypatch.setattr(Expr, "__new__", fails)
    with sharing_expressions(), pytest.raises(KeyError, match="operand"):
        SingletonExpr()


def test_planning_is_kept_beside_it() -> None:
    with sharing_expressions():
        assert differences(PLANNING.seams) == []
        planner = Planner()
        planner.cache.install()
        try:
            with planner.used():
                assert len(dd.from_dict({"x": [1, 2]}, npartitions=1).x.sum().optimize().dask) > 0
            assert planner.count("expressions.not-kept") > 0
            assert not planner.metrics.snapshot()["fallbacks"]
        finally:
            planner.cache.remove()


@pytest.fixture(autouse=True)
def _without_users() -> Iterator[None]:
    """Begin as in a process without the runtime, which a cluster of other tests may have switched on."""
    users = set(expression_threads._users)
    for user in users:
        expression_threads._end(user)
    yield
    for user in users:
        expression_threads._begin(user)


class _Sort(Expr):
    @cached_property
    def bounds(self) -> list[int]:
        return [0, 1]


class _Meeting(Expr):
    """Have a property whose value one thread cannot compute before another one computes it too."""

    both = threading.Barrier(2)

    @cached_property
    def bounds(self) -> int:
        return self.both.wait(THREAD_LIMIT_S)


def test_two_threads_compute_one_property_at_once() -> None:
    """As where one of them has a cluster compute the value, for which the cluster needs the other thread."""
    with sharing_expressions():
        found: list[int] = []
        other = threading.Thread(target=lambda: found.append(_Meeting().bounds), daemon=True)
        other.start()
        found.append(_Meeting().bounds)
        other.join(THREAD_LIMIT_S)
    assert sorted(found) == [0, 1]


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="Python 3.12 has removed the lock")
def test_other_classes_keep_their_lock_and_the_last_user_restores_all() -> None:
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
        with sharing_expressions():
            with sharing_expressions():
                plain = Plain()
                assert plain.value == 1
                assert asked == [plain]
            sort = _Sort()
            assert sort.bounds is sort.bounds
            assert asked == [plain], "the lock came back while someone needs it gone"
        assert vars(cached_property)["__get__"] is get
        assert SingletonExpr.__new__ is made_by
    finally:
        cached_property.__get__ = before  # type: ignore[method-assign]
