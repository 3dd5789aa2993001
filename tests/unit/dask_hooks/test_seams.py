"""List the differences between the installed Dask and the supported one."""

from __future__ import annotations

import re

import pytest
from distributed.scheduler import SchedulerState
from distributed.shuffle._scheduler_plugin import ShuffleSchedulerPlugin

from dask_gpurt.dask_hooks import PARTS, Seam, State, differences, table
from dask_gpurt.dask_hooks.comparison import hash_of_body

#: All assumptions about Dask.
SEAMS = [seam for part in PARTS for seam in part.seams]


def test_this_dask_is_known() -> None:
    assert differences(SEAMS) == []


@pytest.mark.parametrize(
    ("seam", "said"),
    [
        (Seam("distributed.scheduler:Scheduler.nothing_of_the_kind"), "nothing_of_the_kind does not exist"),
        (Seam("distributed.no_such_module:f"), "f does not exist"),
        (
            Seam("distributed.worker:Worker.execute", "self key"),
            r"execute takes \(self, key, stimulus_id\), expected",
        ),
        (
            Seam("distributed.worker:Worker.execute", "self key stimulus_id", bodies=("0123456789ab",)),
            "the body of Worker.execute is [0-9a-f]{12}, expected 0123456789ab",
        ),
        # For a Dask that is installed without its source, or compiled.
        (Seam("math:sqrt", "x", bodies=("0123456789ab",)), r"the source of sqrt cannot be read \("),
    ],
)
def test_differences_are_reported(seam: Seam, said: str) -> None:
    (found,) = differences([seam])
    assert re.search(said, found)


def test_a_wrapper_that_passes_everything_on_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    create = ShuffleSchedulerPlugin._create
    monkeypatch.setattr(ShuffleSchedulerPlugin, "_create", lambda *args, **kwargs: create(*args, **kwargs))
    assert differences(SEAMS) == []


def test_layout_and_comments_are_no_part_of_a_body() -> None:
    def plain(x: int) -> int:
        y = x + 1
        return y

    def adorned(x: int) -> int:
        """Compute with a docstring and comments."""
        y = (
            x + 1  # as above
        )

        return y

    def other(x: int) -> int:
        y = x + 2
        return y

    assert hash_of_body(plain) == hash_of_body(adorned) != hash_of_body(other)


def test_the_table_has_a_state_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {row.state for row in table()} == {State.KNOWN}
    assert len(table()) == len(SEAMS)
    monkeypatch.setattr(SchedulerState, "get_comm_cost", lambda self, level: None)
    (row,) = (row for row in table() if row.state is not State.KNOWN)
    assert row.name == "SchedulerState.get_comm_cost"
    assert row.difference.endswith(
        "expected (self, ts, ws): reads go to any worker, whatever it has kept of their files"
    )
