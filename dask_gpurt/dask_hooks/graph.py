"""Name the tasks that graphs consist of, and what Dask's tasks of dataframes call."""

from __future__ import annotations

from dask._task_spec import Alias, GraphNode, Task, TaskRef, convert_legacy_graph
from dask.dataframe.core import _concat as concat
from dask.dataframe.multi import merge_chunk

__all__ = ["Alias", "GraphNode", "Task", "TaskRef", "concat", "convert_legacy_graph", "merge_chunk"]
