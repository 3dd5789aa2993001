"""Interrupt commands, and print what a trace holds."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from typing import Any

import pytest
from click.testing import CliRunner

from dask_gpurt.cli import cluster, main
from dask_gpurt.cli.trace import print_trace
from dask_gpurt.monitor.trace import ProcessTrace, Trace
from dask_gpurt.observe.recording import Event, Kind


def test_a_command_that_is_interrupted_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(client: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("dask_gpurt.cli.doctor.examine", interrupt)
    done = CliRunner().invoke(main, ["doctor"])
    assert (done.exit_code, done.output) == (130, "interrupted\n")


#: Prints whether ctrl-C is kept from the process.
BLOCKED = "import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()))"


def start_process() -> str:
    done = subprocess.run([sys.executable, "-c", BLOCKED], capture_output=True, text=True, timeout=60)
    return done.stdout.strip()


def test_workers_that_a_cluster_starts_later_ignore_interrupts_too() -> None:
    going, found = threading.Event(), []

    def event_loop() -> None:
        going.wait(60)
        found.append(start_process())

    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with cluster._without_interrupts():
        loop = threading.Thread(target=event_loop)
        loop.start()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
    going.set()
    loop.join()
    assert (found, start_process()) == (["True"], "False")


# ---- traces ---------------------------------------------------------------------------------------


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
