"""Decide which work overlaps on one GPU, and enforce the decision through stream priorities and caps."""

from dask_gpurt.overlap.interposer import Interposer, NotLoadedError
from dask_gpurt.overlap.occupancy import CapError, Caps, DeviceLimits, Residency

__all__ = ["CapError", "Caps", "DeviceLimits", "Interposer", "NotLoadedError", "Residency"]
