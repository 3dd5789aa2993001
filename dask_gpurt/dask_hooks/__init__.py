"""Hold all code that touches private parts of Dask; it knows nothing of the runtime and takes callables.

The names that are exported here look at Dask by name. The modules ``expr``, ``graph``, ``planning``,
``shuffle``, ``worker`` and ``scheduler`` import private parts, and are imported after :func:`require`.
"""

from dask_gpurt.dask_hooks.comparison import Seam, SeamGroup, UnsupportedError, differences
from dask_gpurt.dask_hooks.patch import PatchOrderError, PatchSet, guarded
from dask_gpurt.dask_hooks.seams import CHOICES, EXPRESSIONS, PARTS, PLANNING, READS, REQUIRED
from dask_gpurt.dask_hooks.support import NEWEST, OLDEST, Row, State, require, table, why_unsupported

__all__ = [
    "CHOICES",
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
