"""Look at a program on stock Dask, and at the performance report that it writes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pandas as pd
from click.testing import CliRunner

from dask_gpurt.cli import main

SCRIPT = """
import dask, sys
import dask.dataframe as dd
from distributed import Client, performance_report

if __name__ == "__main__":
    with Client(n_workers=1, threads_per_worker=2, processes=False, dashboard_address=":0") as client:
        with performance_report("report.html"):
            frame = dd.read_parquet("table")
            joined = frame.merge(frame.rename(columns={"value": "other"}), on="key", broadcast=False)
            for _ in range(2):
                print(len(joined.groupby("key").other.sum().compute()))
        print("gpurt" in client.run_on_scheduler(lambda dask_scheduler: list(dask_scheduler.extensions)))
    raise ValueError("the end of the program")
"""


def test_a_program_is_qualified_with_the_runtime_off(tmp_path: Path) -> None:
    frame = pd.DataFrame({"key": range(4000), "value": 1.0})
    (tmp_path / "table").mkdir()
    for at in range(4):  # without Dask: two clients that close in another order leave it no scheduler
        frame[at::4].to_parquet(tmp_path / "table" / f"{at}.parquet", index=False)
    (tmp_path / "program.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "dask_gpurt", "qualify", "program.py"],
        capture_output=True, text=True, timeout=120, cwd=tmp_path,
    )  # fmt: skip
    assert done.stdout.split() == ["4000", "4000", "False"], done.stderr
    assert done.returncode == 1
    assert "ValueError: the end of the program" in done.stderr
    assert "computation 2 of 2" in done.stderr
    assert "with the runtime about" in done.stderr
    assert done.stderr.count("the runtime would plan") == 2
    # A report of Dask itself is read, too.
    result = CliRunner().invoke(main, ["qualify", str(tmp_path / "report.html")])
    assert result.exit_code == 0, result.output
    assert "shuffles" in result.output
    assert "with the runtime about" in result.output


def test_what_cannot_be_qualified_is_refused(tmp_path: Path) -> None:
    (page := tmp_path / "page.html").write_text("<html></html>")
    for arguments, why in (
        (["nothing.py"], "neither a file nor an address"),
        ([str(page)], "has no task stream"),
        (["tcp://127.0.0.1:1"], "no scheduler answers"),
    ):
        result = CliRunner().invoke(main, ["qualify", *arguments])
        assert result.exit_code != 0
        assert why in result.output
