"""Model the devices of a cluster, the links between them, and their speeds."""

from dask_gpurt.topology.links import SHIPPED, Link, Speed
from dask_gpurt.topology.model import Place, Topology

__all__ = ["SHIPPED", "Link", "Place", "Speed", "Topology"]
