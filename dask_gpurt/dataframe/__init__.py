"""How dask-expr comes to us: the shuffle method "gpurt"."""

from dask_gpurt.dataframe.method import METHOD, install, uninstall

__all__ = ["METHOD", "install", "uninstall"]
