"""Share options and output among the command lines of the benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from dask.utils import parse_bytes

from benchmarks.common import compact_json


def in_bytes(_: Any, __: Any, text: str | None) -> int | None:
    """Parse a size such as ``2GiB``, as a click callback."""
    return None if text is None else parse_bytes(text)


def split_list(known: Sequence[str]) -> Callable[[Any, Any, str], list[str]]:
    """Return a click callback that parses a comma-separated list of known words."""

    def split(_: Any, parameter: click.Parameter, text: str) -> list[str]:
        words = [word.strip() for word in text.split(",") if word.strip()]
        if not words or set(words) - set(known):
            raise click.BadParameter(f"{text!r} is not a comma-separated list of {', '.join(known)}")
        return words

    return split


def write(results: Mapping[str, Any], output: Path | None) -> None:
    """Write results as JSON, unless ``output`` is None."""
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(compact_json.dumps(results) + "\n")
