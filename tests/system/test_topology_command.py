"""Run ``dask gpurt topology --measure`` as a user types it; the command's other output has unit tests."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from dask_gpurt.topology import Link
from dask_gpurt.topology.file import load
from tests.helpers.commands import run
from tests.helpers.shared_memory import alone_in_shm


def test_this_host_is_measured_and_the_file_is_read_back(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "dask_gpurt", "topology", "--json")
    with alone_in_shm():
        done = run(*command, "--measure")
    file = tmp_path / "measured.json"
    file.write_text(done.stdout)
    speeds = load(file).speeds
    assert {Link.SHARED_MEMORY, Link.TCP, Link.DISK} <= set(speeds)
    assert all(1e6 < speed.bandwidth < 1e14 and speed.latency < 1 for speed in speeds.values())
    again = run(*command, "--load", file)
    assert json.loads(again.stdout) == json.loads(done.stdout)
