"""Make dask-expr use the shuffle method "gpurt"."""

from dask_gpurt.dataframe.method import choose, leave, teach
from dask_gpurt.dataframe.takeover import METHOD

__all__ = ["METHOD", "choose", "leave", "teach"]
