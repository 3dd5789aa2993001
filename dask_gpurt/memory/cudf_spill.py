"""What cudf spills by itself, with ``--enable-cudf-spill``: its buffers that lie in host memory for now.

A buffer of cudf's has an owner that stays the same wherever the bytes lie, so that is what memory is
known by here. Only what tells of a buffer without moving it is asked for: its pointer would bring it
back to the device, for ever.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

#: Bytes by the identity of what owns them.
Owners = dict[int, int]


def manager() -> Any:
    """cudf's spill manager, None where cudf does not spill or has not been imported."""
    module = sys.modules.get("cudf.core.buffer.spill_manager")
    return module.get_global_manager() if module is not None else None


def spilled(manager: Any) -> Owners:
    """The buffers of a manager that lie in host memory."""
    return {id(owner): owner.size for owner in manager.buffers() if owner.is_spilled}


def owners(frames: Sequence[Any], manager: Any) -> list[Any]:
    """The spillable owners of what a cudf object is serialised to; None for each frame without one.

    Parameters
    ----------
    frames
        Buffers around the memory of their owners on the device, or views of what it was spilled to.
    """
    by_address = {}
    if any(isinstance(frame, memoryview) for frame in frames):
        by_address = {owner.memory_info()[0]: owner for owner in manager.buffers() if owner.is_spilled}
    return [_owner(frame, by_address) for frame in frames]


def _owner(frame: Any, by_address: Mapping[int, Any]) -> Any:
    if isinstance(frame, memoryview):
        return by_address.get(np.asarray(frame.obj).ctypes.data)
    wrapper = getattr(getattr(frame, "owner", None), "owner", None)
    return getattr(getattr(wrapper, "_buf", None), "owner", None)
