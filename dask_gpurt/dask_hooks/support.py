"""Decide whether the runtime can work with the installed Dask, and list what differs from what is known."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from enum import StrEnum
from importlib.metadata import version
from typing import NamedTuple

from dask_gpurt.dask_hooks.comparison import SeamGroup, UnsupportedError, differences
from dask_gpurt.dask_hooks.seams import EXPRESSIONS, PARTS, REQUIRED

#: The versions of Dask that are known, and that the tests run with.
OLDEST, NEWEST = "2026.7.1", "2026.8.0"


class State(StrEnum):
    """Name how a seam compares with what is known of it."""

    KNOWN = "as known"
    DIFFERS = "differs"
    UNUSED = "not used"


class Row(NamedTuple):
    """Hold a line of the table of seams."""

    part: str
    name: str
    state: State
    #: In which way it differs, and what happens then; empty if it does not.
    difference: str


def table(unused: Collection[SeamGroup] = ()) -> list[Row]:
    """Compare all seams with the installed Dask.

    Parameters
    ----------
    unused
        Parts that nothing needs, as settings are; they are not looked at.
    """
    return [row for part in PARTS for row in _rows(part, part in unused)]


def _rows(part: SeamGroup, unused: bool) -> Iterator[Row]:
    for seam in part.seams:
        found = None if unused else seam.difference()
        if found is None:
            yield Row(part.name, seam.short, State.UNUSED if unused else State.KNOWN, "")
        else:
            yield Row(part.name, seam.short, State.DIFFERS, f"{found}: {part.without or 'it stays off'}")


def why_unsupported(*, expressions: bool = False) -> str | None:
    """Say why the runtime can not work in this process; None where it can.

    Parameters
    ----------
    expressions
        Whether to look at Dask's expressions too, as a client needs to.
    """
    if sys.platform != "linux":
        return f"the runtime works on Linux only, this is {sys.platform}: shuffles stay Dask's own"
    parts = (*REQUIRED, EXPRESSIONS) if expressions else REQUIRED
    found = differences(seam for part in parts for seam in part.seams)
    if not found:
        return None
    versions = (f"{package} {version(package)}" for package in ("dask", "distributed"))
    return (
        f"{' and '.join(versions)} is not as the runtime knows it ({OLDEST} to {NEWEST}), so it stays off "
        f"and shuffles stay Dask's own. What it would replace differs: {'; '.join(found)}"
    )


def require(*, expressions: bool = False) -> None:
    """Make sure that the runtime can work in this process; see :func:`why_unsupported`.

    Raises
    ------
    UnsupportedError
        Where it can not, with the reason.
    """
    if (reason := why_unsupported(expressions=expressions)) is not None:
        raise UnsupportedError(reason)
