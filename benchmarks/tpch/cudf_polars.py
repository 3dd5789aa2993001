"""Run cudf-polars' own benchmark of the same queries on the same files, as a contender."""

from __future__ import annotations

import importlib.util
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from .contenders import CUDF_POLARS
from .measure import Plan, Run
from .queries import QUERIES
from .reference import WrongResultError, check

PROGRAM = "cudf_polars.streaming.benchmarks.pdsh"
#: Its queries that round to two decimals.
ROUNDED = (10, 14, 15)


def is_installed() -> bool:
    """Return whether cudf-polars is installed."""
    return importlib.util.find_spec("cudf_polars") is not None


def run_polars(plan: Plan, *, workers: int, round_number: int) -> Iterator[Run]:
    """Run queries with cudf-polars' Dask engine in a process of its own, and check their results.

    Its log has durations only, so there is no budget. They include planning and collecting, as elsewhere.

    Raises
    ------
    RuntimeError
        If the program ended without a record of its runs.
    """
    with tempfile.TemporaryDirectory() as directory:
        output, results = Path(directory) / "records.jsonl", Path(directory) / "results"
        command = [sys.executable, "-m", PROGRAM, ",".join(map(str, plan.queries))]
        command += ["--path", str(plan.tables.directory.resolve()), "--suffix", ""]
        command += ["--scale", f"{plan.tables.scale:g}", "--frontend", "dask", "--num-gpus", str(workers)]
        command += ["--iterations", str(plan.warm + 1), "--results-directory", str(results)]
        command += ["--output", str(output), "--no-print-results", "--no-summarize"]
        # Not checked here: the exit status is an error even if only one query failed.
        ended = subprocess.run(command, stdout=subprocess.DEVNULL)
        records = output.read_text().splitlines() if output.exists() else []
        if not records:
            raise RuntimeError(f"{PROGRAM} ended with status {ended.returncode} and without results")
        for run in read_records(json.loads(records[-1]), round_number):
            if run.query in plan.wanted and not run.error:
                run.error = _difference(results / f"q_{run.query:02d}.parquet", run.query, plan)
            yield run


def _difference(file: Path, number: int, plan: Plan) -> str:
    found, wanted = pd.read_parquet(file), plan.wanted[number]
    if len(found.columns) == len(wanted.columns):
        found.columns = wanted.columns  # some names differ
    try:
        check(QUERIES[number], found, wanted.round(2) if number in ROUNDED else wanted)
    except WrongResultError as error:
        return repr(error)
    return ""


def read_records(record: Mapping[str, Any], round_number: int) -> list[Run]:
    """Read the runs from a record of its log."""
    runs = []
    for one in itertools.chain(*record["records"].values()):
        run = Run(one["query"], CUDF_POLARS, round_number, one["iteration"], one.get("duration", 0.0))
        if one["status"] != "success":
            run.error = str(one["traceback"]).strip().rpartition("\n")[2]
        runs.append(run)
    return runs
