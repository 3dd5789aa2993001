"""What of Dask is private and replaced or relied on. Knows nothing of the runtime; takes callables."""

from dask_gpurt.dask_hooks.patch import Patches
from dask_gpurt.dask_hooks.seams import (
    EXPRESSIONS,
    NEWEST,
    OLDEST,
    SEAMS,
    Seam,
    UnsupportedError,
    differences,
    require,
    why_unsupported,
)

__all__ = [
    "EXPRESSIONS",
    "NEWEST",
    "OLDEST",
    "SEAMS",
    "Patches",
    "Seam",
    "UnsupportedError",
    "differences",
    "require",
    "why_unsupported",
]
