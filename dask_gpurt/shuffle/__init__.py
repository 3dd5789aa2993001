"""Shuffle dataframes and rechunk arrays: a spec describes a shuffle, and each run is an attempt at it."""

from dask_gpurt.shuffle.spec import ShuffleSpec

__all__ = ["ShuffleSpec"]
