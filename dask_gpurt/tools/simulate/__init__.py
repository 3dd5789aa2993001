"""Simulate clusters of thousands of workers with Dask's real scheduler, in virtual time."""

from dask_gpurt.tools.simulate.cluster import SHAPES, Cluster, Machine, build_cluster
from dask_gpurt.tools.simulate.report import Result
from dask_gpurt.tools.simulate.simulation import Simulation
from dask_gpurt.tools.simulate.tiers import Capacity
from dask_gpurt.tools.simulate.work import Submission, Work, Workload
from dask_gpurt.tools.simulate.worker import Overheads
from dask_gpurt.tools.simulate.workloads import WORKLOADS, build_workload

__all__ = [
    "SHAPES",
    "WORKLOADS",
    "Capacity",
    "Cluster",
    "Machine",
    "Overheads",
    "Result",
    "Simulation",
    "Submission",
    "Work",
    "Workload",
    "build_cluster",
    "build_workload",
]
