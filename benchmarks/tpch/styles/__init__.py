"""Hold the queries of TPC-H in the styles of several users: the same results, written in other ways.

``careful`` (:mod:`..queries`) filters first and sorts last, as Dask's best practices say. The others are as
people write who know pandas or SQL, and leave the rest to the library. Nothing in them is chosen for or
against a rule of a planner. Nothing differs between pandas and cudf, whose ``query`` has no strings, and
which has no named aggregations with Dask. A query returns a collection or, where it ends in ``head``, rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType

from ..queries import QUERIES, Query
from . import chained, columns, sql


def _queries_of(module: ModuleType) -> dict[int, Query]:
    return {number: replace(of, build=getattr(module, f"q{number}")) for number, of in QUERIES.items()}


CAREFUL, CHAINED, COLUMNS, SQL = "careful", "chained", "columns", "sql"
#: The queries of each style by number.
STYLES: Mapping[str, Mapping[int, Query]] = {
    CAREFUL: QUERIES,
    CHAINED: _queries_of(chained),
    COLUMNS: _queries_of(columns),
    SQL: _queries_of(sql),
}
