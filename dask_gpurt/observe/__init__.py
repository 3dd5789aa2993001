"""Collect the metrics and fallbacks of every room, and report them."""

from dask_gpurt.observe.counting import MethodChoice, Metrics
from dask_gpurt.observe.fallbacks import Fallback

__all__ = ["Fallback", "MethodChoice", "Metrics"]
