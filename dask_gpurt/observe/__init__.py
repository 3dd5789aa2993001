"""Collect the metrics and fallbacks of every room, and report them."""

from dask_gpurt.observe.counting import Metrics
from dask_gpurt.observe.fallbacks import Fallback
from dask_gpurt.observe.methods import MethodChoice

__all__ = ["Fallback", "MethodChoice", "Metrics"]
