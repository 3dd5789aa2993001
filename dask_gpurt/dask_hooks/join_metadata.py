"""Send the metadata of joins with their tasks as bytes, of which workers make frames if they need them.

Decisions and their figures: ``docs/decisions/planning.md``.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from functools import cache, cached_property
from typing import Any

from dask._task_spec import Task
from dask.dataframe.multi import merge_chunk
from dask.tokenize import normalize_token

from dask_gpurt.dask_hooks.comparison import Seam

#: The argument of joins that is their metadata.
_META = "result_meta"
#: What asks it for dtypes and columns.
_JOIN = Seam("dask.dataframe.multi:merge_chunk", "lhs args result_meta kwargs", bodies=("b5312ef6cc60",))


class LateMetadata:
    """Stand in for an empty frame, which is made as soon as anything is asked of it."""

    def __init__(self, payload: bytes):
        self._payload = payload

    @cached_property
    def frame(self) -> Any:
        """Return the frame."""
        return pickle.loads(self._payload)

    def __getattr__(self, name: str) -> Any:
        if name == "frame" or name.startswith("__"):  # or it would ask for itself if it cannot be made
            raise AttributeError(name)
        return getattr(self.frame, name)

    def __dask_tokenize__(self) -> Any:
        return normalize_token(self.frame)

    def __reduce__(self) -> tuple[Any, ...]:
        return LateMetadata, (self._payload,)


@cache
def _is_known() -> bool:
    return _JOIN.difference() is None


def defer_metadata(graph: Mapping[Any, Any]) -> None:
    """Have the joins of a new graph, also those within fused tasks, get their metadata late."""
    late: dict[int, tuple[Any, LateMetadata]] = {}  # with the frames: an address may be used again
    left = [*graph.values()] if _is_known() else []
    while left:
        node = left.pop()
        if not isinstance(node, Task):
            continue
        if node.has_subgraph():
            left += node.args[0].values()
        elif node.func is merge_chunk and not isinstance(meta := node.kwargs[_META], LateMetadata):
            if id(meta) not in late:
                late[id(meta)] = meta, LateMetadata(pickle.dumps(meta, protocol=5))
            node.kwargs[_META] = late[id(meta)][1]
