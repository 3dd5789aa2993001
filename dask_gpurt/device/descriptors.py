"""Notice that a process has few file descriptors left, and say what to do.

Connections, mapped pools and files of spilled data need descriptors. Without any, connections to peers fail,
which looks as if the peers did not answer: they are called again until their time is over.
"""

from __future__ import annotations

import errno
import os
import resource

#: Fewer free descriptors than these are reported: a connection, a pool and a file for a few peers.
FEW_LEFT = 32
_USED = "/proc/self/fd"
#: Errors of a process and of a system without descriptors.
_NONE_LEFT = (errno.EMFILE, errno.ENFILE)
_RIGHT = "raise the limit (ulimit -n) before workers start, or close files in tasks"


def few_left() -> str | None:
    """Return what is wrong and what would be right if few descriptors are left, else None. Blocks."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        used = len(os.listdir(_USED))
    except OSError as error:
        if error.errno not in _NONE_LEFT:
            return None  # this system does not list them
        used = limit
    if limit == resource.RLIM_INFINITY or limit - used >= FEW_LEFT:
        return None
    return (
        f"{used} of {limit} file descriptors of this worker are in use, and connections to its peers, their "
        f"shared memory and spilled data need some: {_RIGHT}"
    )


def advice(error: OSError) -> str:
    """Return an addition to the message of an error, if it is for lack of descriptors."""
    return f"; {_RIGHT}" if error.errno in _NONE_LEFT else ""
