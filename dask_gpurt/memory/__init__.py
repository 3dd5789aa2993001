"""Store data in memory tiers: device, pinned, host, disk.

Five names carry the room. A :class:`TieredBuffer` stores objects by key, and moves them between tiers in the
:func:`order` of eviction. Below the live tier, :class:`LowerTiers` hold them as bytes. A :class:`Ledger`
counts the bytes of each tier by what they are for, and in an :class:`AdmissionQueue` tasks wait for memory.
"""

from dask_gpurt.memory.admission import AdmissionQueue
from dask_gpurt.memory.ledger import Ledger
from dask_gpurt.memory.lower_tiers import LowerTiers
from dask_gpurt.memory.spilling import order
from dask_gpurt.memory.store import TieredBuffer

__all__ = ["AdmissionQueue", "Ledger", "LowerTiers", "TieredBuffer", "order"]
