"""Run random operations and random faults on a real cluster, and check every result against pandas.

Only the command line imports this package. Workers import it when they unpickle the worker plugin.
"""

from dask_gpurt.tools.chaos.faults import FAULTS
from dask_gpurt.tools.chaos.operations import OPERATIONS
from dask_gpurt.tools.chaos.plan import Plan, Step
from dask_gpurt.tools.chaos.report import Report
from dask_gpurt.tools.chaos.runner import Chaos

__all__ = ["FAULTS", "OPERATIONS", "Chaos", "Plan", "Report", "Step"]
