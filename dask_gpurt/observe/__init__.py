"""Collect the metrics and fallbacks of every room, and report them."""

from dask_gpurt.observe.counting import Fallback, MethodChoice, Metrics

__all__ = ["Fallback", "MethodChoice", "Metrics"]
