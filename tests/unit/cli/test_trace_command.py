"""Print what a trace holds."""

from __future__ import annotations

import pytest

from dask_gpurt.cli.trace import print_trace
from dask_gpurt.monitor.trace import ProcessTrace, Trace
from dask_gpurt.observe.recording import Event, Kind


def test_a_trace_of_an_idle_cluster_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    print_trace(Trace(processes={"tcp://a:1": ProcessTrace()}))
    assert capsys.readouterr().out == (
        "no task ran, and nothing was moved: run something on the cluster meanwhile\n"
    )


def test_the_longest_steps_and_what_is_missing_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    pack = Event(Kind.SPAN, "pack", 1.0, 0.25, 1, "", {"bytes": 5})
    print_trace(Trace(processes={"tcp://a:1": ProcessTrace(events=[pack, pack], lost=3)}))
    printed = capsys.readouterr().out
    assert "pack" in printed
    assert "500.00 ms" in printed
    assert "3 events were lost" in printed
