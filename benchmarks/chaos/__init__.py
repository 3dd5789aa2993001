"""Run random operations and random faults on a real cluster, and check every result against pandas.

    python -m benchmarks.chaos --seconds 600 --seed 1

Workers import this package when they unpickle the worker plugin.
"""

from benchmarks.chaos.faults import FAULTS
from benchmarks.chaos.operations import OPERATIONS
from benchmarks.chaos.plan import Plan, Step
from benchmarks.chaos.report import Report
from benchmarks.chaos.runner import Chaos

__all__ = ["FAULTS", "OPERATIONS", "Chaos", "Plan", "Report", "Step"]
