"""Isolate all access to private parts of Dask. This package takes callables and never imports the runtime.

The names exported here look Dask's parts up by name, so importing them is safe with any version of Dask.
The modules ``graphs``, ``planning``, ``shuffle``, ``worker`` and ``scheduler`` import private parts
directly: import them only after :func:`require`, which compares the installed Dask.
"""

import sys
from importlib.metadata import version
from typing import NamedTuple

from dask_gpurt.dask_hooks.comparison import UnsupportedError as UnsupportedError
from dask_gpurt.dask_hooks.comparison import differences
from dask_gpurt.dask_hooks.patch import PatchSet as PatchSet
from dask_gpurt.dask_hooks.seams import PARTS, REQUIRED

#: The supported versions of Dask, with which the tests run.
OLDEST, NEWEST = "2026.7.1", "2026.8.0"


class Row(NamedTuple):
    """Hold a row of the table of seams."""

    part: str
    name: str
    #: The difference and its consequence; empty if there is none.
    difference: str


def table() -> list[Row]:
    """Compare all seams with the installed Dask."""
    found = ((part, seam, seam.difference()) for part in PARTS for seam in part.seams)
    return [
        Row(part.name, seam.short, f"{difference}: {part.without or 'it stays off'}" if difference else "")
        for part, seam, difference in found
    ]


def why_unsupported() -> str | None:
    """Return why the runtime cannot work in this process; None if it can."""
    if sys.platform != "linux":
        return f"the runtime works on Linux only, this is {sys.platform}: shuffles stay Dask's own"
    found = differences(seam for part in REQUIRED for seam in part.seams)
    if not found:
        return None
    versions = (f"{package} {version(package)}" for package in ("dask", "distributed"))
    return (
        f"{' and '.join(versions)} differ from the versions that the runtime supports ({OLDEST} to "
        f"{NEWEST}), so it stays off and shuffles stay Dask's own. Different parts: {'; '.join(found)}"
    )


def require() -> None:
    """Check that the runtime can work in this process; see :func:`why_unsupported`.

    Raises UnsupportedError if it cannot, with the reason.
    """
    if (reason := why_unsupported()) is not None:
        raise UnsupportedError(reason)
