"""Counters and events that every room may write to."""

from dask_gpurt.observe.decisions import Decisions
from dask_gpurt.observe.metrics import Metrics

__all__ = ["Decisions", "Metrics"]
