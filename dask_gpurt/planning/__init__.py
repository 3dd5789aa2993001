"""Plan the queries of a client in less time, and exactly as Dask does."""

from dask_gpurt.planning.cache import PlanningCache

__all__ = ["PlanningCache"]
