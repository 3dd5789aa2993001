"""Which worker runs which task."""

from dask_gpurt.memory.ledger import Room
from dask_gpurt.placement.binding import Placement
from dask_gpurt.placement.cost import Terms
from dask_gpurt.placement.headroom import Headroom, LedgerHeadroom

__all__ = ["Headroom", "LedgerHeadroom", "Placement", "Room", "Terms"]
