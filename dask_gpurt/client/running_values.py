"""Correct running sums, products, least and greatest values, where partitions have no rows or no values.

:mod:`.corrections` installs this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pandas as pd
from dask.dataframe.dask_expr._cumulative import (
    CumMax,
    CumMin,
    CumProd,
    CumSum,
    CumulativeBlockwise,
    CumulativeFinalize,
    TakeLast,
)

from dask_gpurt.frames.running import go_on, last_row, total_so_far

_KINDS: dict[type, str] = {CumSum: "sum", CumProd: "prod", CumMin: "min", CumMax: "max"}


class LastRow(TakeLast):
    """Take the last running values of each partition as one row, or none."""

    operation = staticmethod(last_row)


class GoOn(CumulativeFinalize):
    """Go on in each partition with the running values of those before it."""

    _parameters = ["frame", "previous_partitions", "kind", "skipna"]

    def _layer(self) -> dict[Any, Any]:
        values, last, how = self.frame._name, self.previous_partitions._name, (self.kind, self.skipna)
        tasks: dict[Any, Any] = {(self._name, 0): (values, 0)}
        total: Any = (last, 0)
        for number in range(1, self.frame.npartitions):
            if number > 1:
                before, total = total, (f"{self._name}-total", number)
                tasks[total] = (total_so_far, (last, number - 1), before, *how)
            tasks[self._name, number] = (go_on, (values, number), total, *how)
        return tasks


def _go_on_after_nothing(original: Callable[..., Any], expr: Any) -> Any:
    """Go on after partitions without rows, as filters leave them, or without values in a column.

    Running sums of frames become null there with Dask, and least and greatest values too, or they raise.
    """
    kind = _KINDS.get(type(expr))
    if kind is None or not isinstance(expr.frame._meta, (pd.DataFrame, pd.Series)):
        return original(expr)
    values = CumulativeBlockwise(expr.frame, expr.axis, expr.skipna, expr.chunk_operation)
    make, take = cast(Any, GoOn), cast(Any, LastRow)
    return make(values, take(values, expr.skipna), kind, expr.skipna)


#: What each corrects, by its name in Dask.
RUNNING: tuple[tuple[str, Callable[..., Any]], ...] = (
    ("CumulativeAggregations._lower", _go_on_after_nothing),
)
