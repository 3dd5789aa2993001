"""Speed up query planning on the client by caching, and fuse queries into fewer tasks."""

from dask_gpurt.client.planning.cache import PlanningCache

__all__ = ["PlanningCache"]
