"""Write tables to files, let the planner's rules change programs on them, and compare rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import dask.dataframe as dd
import pandas as pd
import pytest
from dask._expr import Expr, FinalizeCompute, optimize_until
from dask.base import collections_to_expr

from dask_gpurt.client.corrections import correct_with
from dask_gpurt.client.planning.cache import EARLY_RULES
from dask_gpurt.client.planning.reads import lower
from dask_gpurt.client.planning.rules import Facts, PartitionSizes, Rule
from dask_gpurt.dask_hooks import PatchSet
from tests.helpers.clusters import canonical
from tests.helpers.planned import value_of

#: Reads a table by its name.
Read = Callable[[str], Any]
ONE_THREAD = PartitionSizes(1, 1)


@pytest.fixture(scope="module", autouse=True)
def corrected() -> Iterator[None]:
    """Correct what Dask makes of filters by labels, as where the runtime is on."""
    patches = PatchSet()
    correct_with(lambda: True, patches)
    yield
    patches.restore()


def stored(folder: Path, tables: Mapping[str, pd.DataFrame], files: int = 1, **others: int) -> Read:
    """Write each table to so many files, some to others; return a function that reads one by its name."""
    for name, table in tables.items():
        parts = dd.from_pandas(table, npartitions=others.get(name, files), sort=False)
        parts.to_parquet(folder / name, write_index=False)
    return lambda name: dd.read_parquet(folder / name)


def computation(*results: Any) -> Any:
    """Return what ``dask.compute`` optimises."""
    return FinalizeCompute(collections_to_expr(results))


def ruled(*results: Any, sizes: PartitionSizes = ONE_THREAD) -> tuple[Any, Facts]:
    """Return the plan of a computation that the early rules have changed, and their facts."""
    facts = Facts(sizes)
    return apply_rules(computation(*results), facts, *EARLY_RULES), facts


def tuned(plan: Any) -> Any:
    """Return a plan, or that of a result, as the later rules get it."""
    return optimize_until(plan if isinstance(plan, Expr) else computation(plan), "tuned-logical")


def apply_rules(plan: Any, facts: Facts, *rules: Rule) -> Any:
    """Return a plan that rules have changed one after the other."""
    for rule in rules:
        plan = rule.apply(plan, facts)
    return plan


def computed(plan: Any, facts: Facts | None = None) -> Any:
    """Compute a tuned plan, with the checks of its files that rules have asked for."""
    return value_of(lower(plan if facts is None else facts.tables.checked(plan), "fused"))


def assert_rows(found: Any, expected: Any) -> None:
    """Compare rows in any order, whatever their labels and the units of their dtypes."""
    expected = expected.astype(dict(found.dtypes.items()))
    rows = (canonical(each, index=False) for each in (found, expected))
    pd.testing.assert_frame_equal(*rows, check_dtype=False)
