"""Press ctrl-C in a command that has a cluster of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.helpers.commands import PATIENCE_S, environment
from tests.helpers.flights import write_tables

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize("name", ["demo", "bench"])
def test_ctrl_c_ends_it_in_one_line(name: str, tmp_path: Path) -> None:
    flights = ("--data", str(write_tables(tmp_path, flights=2_000)))
    arguments = {"demo": flights, "bench": ("--scale", "0.01")}[name]
    process = subprocess.Popen(
        [sys.executable, "-m", "dask_gpurt", name, *arguments],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env=environment(),
        start_new_session=True,  # as a terminal does, ctrl-C goes to the command and its workers
        # A shell has its background jobs ignore ctrl-C, and so would a command of tests that run in one.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stderr is not None
    begun = next(line for line in process.stderr if re.search(r"\(\d+ of \d+ done\)", line))
    os.killpg(process.pid, signal.SIGINT)
    _, rest = process.communicate(timeout=PATIENCE_S)
    assert begun
    assert [line for line in rest.splitlines() if " done)" not in line] == ["interrupted"]
    assert process.returncode == 130
