"""Describe a cluster that hangs."""

from __future__ import annotations

from dask_gpurt.tools.chaos.watchdog import as_text


def test_a_description_is_written_as_an_outline_without_empty_items() -> None:
    found = {
        "executing": ["a-task", "another"],
        "ready": [],
        "runtime": {"moving": "no", "pulls": {"bytes": 3}},
    }
    assert as_text(found) == "executing:\n  a-task\n  another\nruntime:\n  moving: no\n  pulls: bytes: 3"
