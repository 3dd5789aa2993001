"""Choose the worker of each task."""

from dask_gpurt.memory.ledger import FreeMemory
from dask_gpurt.placement.estimates import Headroom, LedgerHeadroom
from dask_gpurt.placement.gate import GatedPlacement
from dask_gpurt.placement.strategy import Placement

__all__ = ["FreeMemory", "GatedPlacement", "Headroom", "LedgerHeadroom", "Placement"]
