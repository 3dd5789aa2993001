"""Isolate all access to private parts of Dask. This package takes callables and never imports the runtime.

The names exported here look Dask's parts up by name, so importing them is safe with any version of Dask.
The modules ``graphs``, ``planning``, ``shuffle``, ``worker`` and ``scheduler`` import private parts
directly: import them only after :func:`require`.
"""

from dask_gpurt.dask_hooks.comparison import Seam, SeamGroup, UnsupportedError, differences
from dask_gpurt.dask_hooks.patch import PatchOrderError, PatchSet, guarded
from dask_gpurt.dask_hooks.seams import EXPRESSIONS, PARTS, PLANNING, READS, REQUIRED
from dask_gpurt.dask_hooks.support import NEWEST, OLDEST, Row, State, require, table, why_unsupported

__all__ = [
    "EXPRESSIONS",
    "NEWEST",
    "OLDEST",
    "PARTS",
    "PLANNING",
    "READS",
    "REQUIRED",
    "PatchOrderError",
    "PatchSet",
    "Row",
    "Seam",
    "SeamGroup",
    "State",
    "UnsupportedError",
    "differences",
    "guarded",
    "require",
    "table",
    "why_unsupported",
]
