"""Model the devices of a cluster, the links between them, and their speeds."""

from dask_gpurt.topology.model import SHIPPED, Link, Place, Speed, Topology

__all__ = ["SHIPPED", "Link", "Place", "Speed", "Topology"]
