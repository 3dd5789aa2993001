"""Which worker runs which task."""

from dask_gpurt.memory.ledger import Room
from dask_gpurt.placement.cost import Terms
from dask_gpurt.placement.free_memory import Headroom, LedgerHeadroom
from dask_gpurt.placement.strategy import Placement

__all__ = ["Headroom", "LedgerHeadroom", "Placement", "Room", "Terms"]
