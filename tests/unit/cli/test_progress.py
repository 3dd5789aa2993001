"""Show progress in lines where standard error is no terminal."""

from __future__ import annotations

import pytest

from dask_gpurt.cli.cluster import progress


def steps(*, quiet: bool) -> None:
    with progress(width=10, quiet=quiet) as show:
        show("starting", 0, None)
        for number, doing in enumerate(["join", "join", "sort"]):
            show(doing, number, 3)


def test_a_line_says_what_is_done_now(capsys: pytest.CaptureFixture[str]) -> None:
    steps(quiet=False)
    printed = capsys.readouterr()
    assert printed.err.splitlines() == ["starting", "join (0 of 3 done)", "sort (2 of 3 done)"]
    assert printed.out == ""


def test_quiet_is_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    steps(quiet=True)
    assert capsys.readouterr() == ("", "")


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # makes rich treat standard error as a terminal
    steps(quiet=False)
    assert "2/3" in capsys.readouterr().err
