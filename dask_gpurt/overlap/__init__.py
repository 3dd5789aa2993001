"""Decide what runs beside what on one GPU, and make it so."""

from dask_gpurt.overlap.interposer import Interposer, NotLoadedError
from dask_gpurt.overlap.occupancy import CapError, Caps, DeviceLimits, Residency

__all__ = ["CapError", "Caps", "DeviceLimits", "Interposer", "NotLoadedError", "Residency"]
