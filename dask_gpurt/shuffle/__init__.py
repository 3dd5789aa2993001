"""Who needs which bytes: a shuffle is described by a spec and attempted by runs."""

from dask_gpurt.shuffle.spec import ShuffleSpec

__all__ = ["ShuffleSpec"]
