"""Export the tasks of graphs, functions that these call, and Dask's servers and tasks under clear names.

mypy checks what the runtime uses of a server against Dask's own class.
"""

from __future__ import annotations

from dask._task_spec import Alias, GraphNode, Task, TaskRef, convert_legacy_graph
from dask.dataframe.core import _concat as concat
from dask.dataframe.dask_expr._util import _convert_to_list as convert_to_list
from dask.dataframe.groupby import _compute_sum_of_squares as sum_of_squares
from dask.dataframe.groupby import _cum_agg_aligned as add_totals_before
from dask.dataframe.groupby import _groupby_raise_unaligned as group_aligned
from dask.dataframe.multi import merge_chunk
from distributed import Scheduler as SchedulerServer
from distributed import Worker as WorkerServer
from distributed.batched import BatchedSend as Stream
from distributed.scheduler import SchedulerState, WorkerState
from distributed.scheduler import TaskState as SchedulerTask
from distributed.shuffle import ShuffleSchedulerPlugin as ShuffleExtension
from distributed.worker_state_machine import TaskState as WorkerTask

__all__ = [
    "Alias",
    "GraphNode",
    "SchedulerServer",
    "SchedulerState",
    "SchedulerTask",
    "ShuffleExtension",
    "Stream",
    "Task",
    "TaskRef",
    "WorkerServer",
    "WorkerState",
    "WorkerTask",
    "add_totals_before",
    "concat",
    "convert_legacy_graph",
    "convert_to_list",
    "group_aligned",
    "merge_chunk",
    "sum_of_squares",
]
