"""Re-export the task classes of graphs, and functions that Dask's dataframe tasks call."""

from __future__ import annotations

from dask._task_spec import Alias, GraphNode, Task, TaskRef, convert_legacy_graph
from dask.dataframe.core import _concat as concat
from dask.dataframe.multi import merge_chunk

__all__ = ["Alias", "GraphNode", "Task", "TaskRef", "concat", "convert_legacy_graph", "merge_chunk"]
