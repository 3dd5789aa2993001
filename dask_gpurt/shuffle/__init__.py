"""Shuffle: a spec describes a shuffle, runs attempt it."""

from dask_gpurt.shuffle.spec import ShuffleSpec

__all__ = ["ShuffleSpec"]
