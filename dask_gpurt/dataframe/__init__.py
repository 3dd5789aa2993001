"""Add the shuffle method "gpurt" to dask-expr."""

from dask_gpurt.dataframe.method import choose, leave, register_shuffle_method
from dask_gpurt.dataframe.takeover import METHOD

__all__ = ["METHOD", "choose", "leave", "register_shuffle_method"]
