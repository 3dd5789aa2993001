"""Write JSON with one row a line: lists and objects that fit on a line are not broken."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

#: Maximum length of a line, in characters.
WIDTH = 140


def dumps(value: Any, depth: int = 0, name: str = "") -> str:
    """Format a value as JSON.

    Parameters
    ----------
    depth
        The number of lists and objects around the value; each indents by one space.
    name
        The name of the value in its object, as JSON.
    """
    begin = f"{name}: " if name else ""
    line = begin + json.dumps(value)
    if depth + len(line) <= WIDTH or not isinstance(value, Mapping | list | tuple):
        return line
    if isinstance(value, Mapping):
        rows = [dumps(each, depth + 1, _name(key)) for key, each in value.items()]
        return f"{begin}{{{_broken(rows, depth)}}}"
    return f"{begin}[{_broken([dumps(each, depth + 1) for each in value], depth)}]"


def _name(key: Any) -> str:
    """Return a key as JSON does, which turns numbers, booleans and None into strings."""
    return json.dumps({key: 0})[1:-4]


def _broken(rows: Sequence[str], depth: int) -> str:
    margin = "\n" + " " * depth
    return f"{margin} " + f",{margin} ".join(rows) + margin
