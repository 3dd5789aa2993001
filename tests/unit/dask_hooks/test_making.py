"""Make expressions faster, with the names that Dask gives them, and send metadata of joins as bytes."""

from __future__ import annotations

import operator
import sys
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from enum import StrEnum
from functools import partial, wraps
from typing import Any
from unittest.mock import patch

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from dask._expr import Expr, _ExprSequence
from dask.base import compute
from dask.core import flatten
from dask.dataframe.multi import merge_chunk
from dask.tokenize import TokenizationError, _tokenize_deterministic, tokenize
from dask.typing import no_default
from dask.utils import M
from distributed.protocol.pickle import dumps, loads
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.dask_hooks import PatchSet, lighter_tasks
from dask_gpurt.dask_hooks.lighter_tasks import LateMetadata, defer_metadata
from dask_gpurt.dask_hooks.making import make_faster
from dask_gpurt.dask_hooks.planning import graph_of


class Colour(StrEnum):
    """Look like text."""

    RED = "red"


class Operation(Expr):
    """Have any operands."""

    _parameters = ["first", "second", "third"]
    _defaults = {"second": "b", "third": None}


TOKENIZE_OF_DASK = sys.modules["dask.tokenize"]._tokenize
INNER: Any = Operation("inner")
VALUES = (
    *(None, True, 1, 1.0, -0.0, float("nan"), "", "it's", "ü", b"a", np.float64(1), np.int8(1), Colour.RED),
    *(pd.Timestamp(2020, 1, 1), Operation, Colour, int, operator.add, M.sum, slice(1), range(2), INNER),
    *(partial(operator.add, 1), np.dtype("int8"), pd.DataFrame({"a": [1]}), pd.Index(["a"]), [], (), {}, {1}),
    *(no_default, partial(partial, max, key=[1]), "a".upper, INNER.operand, Colour.mro, Expr._reconstruct),
    *(np.array([1]), pd.Timestamp(0, tz="UTC"), pd.NaT, pd.NA, OrderedDict(a=1), defaultdict(list), compute),
)
nested = st.recursive(
    st.sampled_from(VALUES),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from(["b", "a", 1, None, 1.5]), inner, max_size=3),
    ),
    max_leaves=6,
)


@pytest.fixture(scope="module", autouse=True)
def _faster() -> Iterator[None]:
    patches = PatchSet()
    make_faster(patches)
    assert patches
    yield
    patches.restore()


def dask_tokenize(*args: Any, **kwargs: Any) -> str:
    with patch.object(sys.modules["dask.tokenize"], "_tokenize", TOKENIZE_OF_DASK):
        return _tokenize_deterministic(*args, **kwargs)


@given(operands=st.lists(nested, min_size=1, max_size=5))
def test_names_are_those_that_dask_gives(operands: list[Any]) -> None:
    made: Any = _ExprSequence(*operands)  # any of Dask's: a class of somebody else is named by Dask
    values = [_ExprSequence, *made.operands]
    assert made.deterministic_token == tokenize(*values) == dask_tokenize(*values)
    assert tokenize(*values, name=1) == dask_tokenize(*values, name=1)
    assert [type(each) for each in made.operands[: len(operands)]] == [type(each) for each in operands]


def test_operands_are_given_by_name_by_default_or_as_collections() -> None:
    frame = dd.from_pandas(pd.DataFrame({"a": [1]}), npartitions=1)
    assert Operation(1).operands == [1, "b", None]
    assert Operation(1, third=3).operands == [1, "b", 3]
    assert Operation(frame, [frame]).operands[0] is frame.expr
    with pytest.raises(KeyError, match="first"):
        Operation()
    with pytest.raises(AssertionError):
        Operation(1, other=2)


def test_what_cannot_be_hashed_or_contains_itself_fails_or_is_named_as_with_dask() -> None:
    deep: list[Any] = []
    deep.append(deep)
    assert _ExprSequence(deep).deterministic_token == dask_tokenize(_ExprSequence, deep)
    assert _tokenize_deterministic(deep) == dask_tokenize(deep)
    assert Operation(1).deterministic_token == dask_tokenize(Operation, 1, "b", None)
    for kind in (_ExprSequence, Operation):
        with pytest.raises(TokenizationError):
            kind(object())
    assert tokenize(object()) != tokenize(object())  # is no error where it need not be the same


def test_wrappers_of_functions_of_dask_are_named_by_what_they_hold_and_are_not_kept() -> None:
    for of in (compute, operator.add):
        held = {"least": 1}

        @wraps(of)
        def wrapper(*args: Any, held: dict[str, int] = held) -> Any:
            return args, held

        names = [_tokenize_deterministic(wrapper), dask_tokenize(wrapper)]
        held["least"] = 2
        names += [_tokenize_deterministic(wrapper), dask_tokenize(wrapper)]
        assert names[0] == names[1] != names[2] == names[3]
        known = weakref.ref(wrapper)
        del wrapper
        assert known() is None


def test_operands_may_be_named_by_what_describes_them() -> None:
    patches = PatchSet()
    make_faster(patches, lambda value: f"<{len(value)}>" if isinstance(value, pd.DataFrame) else None)
    few, many = pd.DataFrame({"a": [1]}), pd.DataFrame({"a": [1, 2]})
    names = [_ExprSequence([frame]).deterministic_token for frame in (few, pd.DataFrame({"b": [1]}), many)]
    patches.restore()
    assert names[0] == names[1] != names[2]


# ---- metadata of joins are sent as bytes ----------------------------------------------------------

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
