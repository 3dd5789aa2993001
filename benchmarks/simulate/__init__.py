"""Simulate clusters of thousands of workers with Dask's real scheduler, in virtual time."""

from benchmarks.simulate.cluster import SHAPES, Cluster, Machine, build_cluster
from benchmarks.simulate.report import Result
from benchmarks.simulate.simulation import Simulation
from benchmarks.simulate.tiers import Capacity
from benchmarks.simulate.work import Submission, Work, Workload
from benchmarks.simulate.worker import Overheads
from benchmarks.simulate.workloads import WORKLOADS, build_workload

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
