"""Make dask-expr use the shuffle method "gpurt"."""

from dask_gpurt.dataframe.method import METHOD, choose, leave, teach

__all__ = ["METHOD", "choose", "leave", "teach"]
