"""Check that rules know the operations of dask_cudf that do what those of Dask do, by their names."""

from __future__ import annotations

import sys
import warnings
from types import ModuleType
from typing import Any

import pytest
from dask._expr import optimize_until
from dask.dataframe.dask_expr import _expr, _groupby
from dask.dataframe.dask_expr.io.parquet import ReadParquet
from hypothesis import given

from dask_gpurt.client.planning.cache import EARLY_RULES
from dask_gpurt.client.planning.rules import Facts, PartitionSizes
from dask_gpurt.client.planning.rules.dependence import why_dependent
from dask_gpurt.dask_hooks.planning import rebuild
from tests.helpers.examples import examples
from tests.helpers.rules import Read, apply_rules, computation
from tests.unit.client.planning.test_filters import programs, read, run, value_of

__all__ = ["read"]

pytestmark = pytest.mark.usefixtures("by_tasks")


class NoOp(_expr.Elemwise):
    """What dask_cudf puts around each read."""

    _parameters = ["frame"]
    _projection_passthrough = True
    _filter_passthrough = True
    _preserves_partitioning_information = True
    operation = staticmethod(lambda frame: frame)


class RenameAxisCudf(_expr.RenameAxis):
    """Name an index, as after each join with one."""


class CudfGroupbyAgg(_groupby.GroupbyAggregation):
    """Aggregate groups."""


MODULES = {
    NoOp: "dask_cudf.io.parquet",
    RenameAxisCudf: "dask_cudf._expr.expr",
    CudfGroupbyAgg: "dask_cudf._expr.groupby",
}
for each, module in MODULES.items():
    each.__module__ = module
OF_CUDF = {_expr.RenameAxis: RenameAxisCudf, _groupby.GroupbyAggregation: CudfGroupbyAgg}


@pytest.fixture(autouse=True)
def found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the classes where pickle looks for them, as Dask does to name expressions."""
    for name in ("dask_cudf", "dask_cudf.io", "dask_cudf._expr", *MODULES.values()):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for kind, name in MODULES.items():
        setattr(sys.modules[name], kind.__name__, kind)


def as_dask_cudf_makes_it(plan: Any) -> Any:
    """Return a plan with the classes of dask_cudf."""

    def changed(expr: Any) -> Any:
        if isinstance(expr, ReadParquet):
            return NoOp(expr)
        kind = OF_CUDF.get(type(expr))
        return expr if kind is None else kind(*expr.operands)

    return rebuild(plan, changed)


def ruled(plan: Any) -> tuple[Any, list[tuple[str, bool, str]], bool]:
    """Apply the rules; return the plan, what they noted, and whether its results depend on partitions."""
    facts = Facts(PartitionSizes(1, 1))
    plan = apply_rules(plan, facts, *EARLY_RULES)
    notes = sorted((note.rule, note.done, note.text.replace("Cudf", "")) for note in facts.notes)
    tuned = rebuild(
        optimize_until(plan, "tuned-logical"), lambda expr: expr.frame if isinstance(expr, NoOp) else expr
    )
    return plan, notes, why_dependent(tuned) is not None


@examples(8)
@given(program=programs)
def test_rules_do_the_same_to_any_program(read: Read, program: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = computation(run(read, program)[0])
        try:
            found = ruled(as_dask_cudf_makes_it(plan))
        except Exception as error:
            found = (None, type(error), False)
        try:
            expected = ruled(plan)
        except Exception as error:
            expected = (None, type(error), False)
    assert found[1:] == expected[1:]


def test_a_join_with_an_index_is_on_rows(read: Read) -> None:
    """As whoever writes ``join`` and ``right_index=True``; its filter goes below both joins."""
    large, small = read("large"), read("small")
    groups = large.groupby("key").agg({"n": "max"})
    rows = large.merge(groups, left_on="key", right_index=True, suffixes=("", "_max"))
    rows = rows.merge(small, on="key")
    result = rows[rows.n > 1].more.max()
    plan = as_dask_cudf_makes_it(computation(result))
    assert any(isinstance(expr, RenameAxisCudf) for expr in plan.walk())
    changed, notes, depends = ruled(plan)
    assert not depends
    assert [done for rule, done, _ in notes if rule == "Filters"] == [True, True]
    assert value_of(changed) == value_of(computation(result)) == result.compute()
