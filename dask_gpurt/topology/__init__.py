"""Which devices there are, what joins them, and how fast it is."""

from dask_gpurt.topology.links import SHIPPED, Link, Speed
from dask_gpurt.topology.model import HostLinks, Place, Topology

__all__ = ["SHIPPED", "HostLinks", "Link", "Place", "Speed", "Topology"]
