"""Leave some parameters of a test to the slow tests, where others represent them by default."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """Return a set of parameters that is tested with ``-m slow`` only."""
    return pytest.param(*values, marks=pytest.mark.slow)


def except_slow(values: Iterable[Any], these: Collection[Any]) -> list[Any]:
    """Return parameters, of which these are tested with ``-m slow`` only."""
    every = list(values)
    assert all(one in every for one in these), these
    return [slow(value) if value in these else value for value in every]
