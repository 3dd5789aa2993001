"""Count and note what every room does; nothing here reads it back."""

from dask_gpurt.observe.decisions import Decisions
from dask_gpurt.observe.fallbacks import Fallback
from dask_gpurt.observe.methods import MethodChoice
from dask_gpurt.observe.metrics import Metrics

__all__ = ["Decisions", "Fallback", "MethodChoice", "Metrics"]
