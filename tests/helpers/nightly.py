"""Leave some parameters of a test to the nightly tests, where others represent them by default."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def nightly(*values: Any) -> Any:
    """Return a set of parameters that is tested with ``-m nightly`` only."""
    return pytest.param(*values, marks=pytest.mark.nightly)


def only_by_day(values: Iterable[Any], these: Collection[Any]) -> list[Any]:
    """Return parameters, of which all but these are tested with ``-m nightly`` only."""
    every = list(values)
    assert all(one in every for one in these), these
    return [value if value in these else nightly(value) for value in every]
