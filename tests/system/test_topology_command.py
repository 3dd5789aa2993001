"""Run ``dask gpurt topology`` as a user types it; the command's other output has unit tests."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.helpers.commands import run


def test_the_file_of_this_host_is_read_back(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "dask_gpurt", "topology", "--json")
    done = run(*command)
    file = tmp_path / "topology.json"
    file.write_text(done.stdout)
    again = run(*command, "--load", file)
    assert json.loads(again.stdout) == json.loads(done.stdout)
