"""What cudf spills by itself, with ``--enable-cudf-spill``: its buffers that lie in host memory for now.

Memory is known by the owner of a buffer, as in :mod:`dask_gpurt.memory.cudf_owners`.
"""

from __future__ import annotations

import sys
from typing import Any

#: Bytes by the identity of what owns them.
Owners = dict[int, int]


def manager() -> Any:
    """cudf's spill manager, None where cudf does not spill or has not been imported."""
    module = sys.modules.get("cudf.core.buffer.spill_manager")
    return module.get_global_manager() if module is not None else None


def spilled(manager: Any) -> Owners:
    """The buffers of a manager that lie in host memory."""
    return {id(owner): owner.size for owner in manager.buffers() if owner.is_spilled}
