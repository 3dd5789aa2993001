"""Count and note what every room does; nothing here reads it back."""

from dask_gpurt.observe.counting import Metrics
from dask_gpurt.observe.decisions import Decisions
from dask_gpurt.observe.fallbacks import Fallback
from dask_gpurt.observe.methods import MethodChoice

__all__ = ["Decisions", "Fallback", "MethodChoice", "Metrics"]
