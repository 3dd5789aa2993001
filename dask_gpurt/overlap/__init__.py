"""Decide which work overlaps on one GPU, and enforce the decision through stream priorities and caps."""

from dask_gpurt.overlap.interposer import CapError, Caps, DeviceLimits, Interposer, NotLoadedError, Residency

__all__ = ["CapError", "Caps", "DeviceLimits", "Interposer", "NotLoadedError", "Residency"]
