"""Collect the metrics, fallbacks and decisions of every room, and report them."""

from dask_gpurt.observe.counting import Metrics
from dask_gpurt.observe.decisions import Decisions
from dask_gpurt.observe.fallbacks import Fallback
from dask_gpurt.observe.methods import MethodChoice

__all__ = ["Decisions", "Fallback", "MethodChoice", "Metrics"]
