"""Divide recordings of stock Dask into computations and parts of their time, and foresee plans."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import dask.dataframe as dd
import pandas as pd
import pytest
from dask.core import flatten

from benchmarks.qualify import fit as fitting
from dask_gpurt.dask_hooks.planning import keys_of
from dask_gpurt.tools.qualify.parts import (
    BEFORE,
    FACTORS,
    IDLE,
    OTHER,
    PARTS,
    WAITING,
    computations,
    estimate,
    kind_of,
    library_of,
)
from dask_gpurt.tools.qualify.program import observed
from dask_gpurt.tools.qualify.recording import Recording, of_report


def task(name: str, start: float, stop: float, *, waited: float = 0.0) -> dict[str, Any]:
    spans = [{"action": "compute", "start": start + waited, "stop": stop}]
    if waited:
        spans.insert(0, {"action": "transfer", "start": start, "stop": start + waited})
    return {"key": (f"{name}-{'ab' * 16}", 0), "startstops": spans}


def test_the_parts_of_a_computation_are_its_time() -> None:
    rows = [task("read_parquet", 12.0, 14.0), task("shuffle-transfer", 14.0, 15.0, waited=0.5)]
    (found,) = computations(Recording(rows, [11.0], threads=2, began=10.0, ended=20.0))
    expected = {"reads": 1.0, "shuffles": 0.25, WAITING: 0.25, BEFORE: 1.0, IDLE: 2.5}
    assert found.parts == dict.fromkeys(PARTS, 0.0) | expected
    assert found.seconds == 15.0 - 10.0


def test_a_graph_that_arrives_while_tasks_run_counts_with_them() -> None:
    rows = [task("sum", 1.0, 3.0), task("sum", 2.5, 4.0), task("sum", 6.0, 7.0)]
    found = computations(Recording(rows, [0.5, 2.0, 5.0], threads=1, began=0.0, ended=9.0))
    assert [len(each.rows) for each in found] == [2, 1]
    assert [each.parts[BEFORE] for each in found] == [0.5, 1.0]


def test_without_arrivals_pauses_divide_computations() -> None:
    rows = [task("inc", 0.0, 1.0), task("inc", 1.1, 2.0), task("inc", 5.0, 6.0)]
    found = computations(Recording(rows, [], threads=1, began=0.0, ended=6.0))
    assert [len(each.rows) for each in found] == [2, 1]
    assert sum(each.seconds for each in found) == 6.0


def test_transfers_beside_each_other_are_no_longer_than_the_time() -> None:
    rows = [task("inc", 0.0, 2.0, waited=1.9) for _ in range(50)]
    (found,) = computations(Recording(rows, [0.0], threads=2, began=0.0, ended=2.0))
    assert found.seconds == pytest.approx(2.0)


def test_nothing_recorded_is_no_computation() -> None:
    assert computations(Recording([], [1.0], threads=2, began=0.0, ended=2.0)) == []


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("shuffle-p2p", "shuffles"),
        ("hash-join-transfer", "shuffles"),
        ("hashjoinp2p", "shuffles"),
        ("rechunk-transfer", "shuffles"),
        ("blockwisemerge", "joins"),
        ("read_parquet-fused", "reads"),
        ("groupbychunk", "groups"),
        ("sum-tree", "groups"),
        ("my_function", OTHER),
    ],
)
def test_tasks_are_told_by_their_names(name: str, kind: str) -> None:
    assert kind_of((f"{name}-{'0f' * 16}", 3)) == kind


# ---- performance reports -----------------------------------------------------------------------------


def write_report(path: Path, data: dict[str, list[Any]]) -> Path:
    source = {"data": {"type": "map", "entries": [[name, values] for name, values in data.items()]}}
    document = json.dumps({"id": {"roots": [{"attributes": {"child": source}}]}})
    path.write_text(
        f'<script type="application/json" id="x">{document}</script>"&lt;li&gt; Threads: 4 &lt;/li&gt;"'
    )
    return path


def test_tasks_of_a_report_are_put_together(tmp_path: Path) -> None:
    key = ["sum-" + "ab" * 16, 0]
    data = {
        "start": [500.0, 2000.0],  # ms, at the centers
        "duration": [1000.0, 2000.0],
        "key": [key, key],
        "color": ["red", "#440154"],
        "worker_thread": ["w-1", "w-1"],
    }
    found = of_report(write_report(tmp_path / "report.html", data))
    (row,) = found.rows
    assert row["key"] == tuple(key)
    assert row["startstops"] == [
        {"action": "transfer", "start": 0.0, "stop": 1.0},
        {"action": "compute", "start": 1.0, "stop": 3.0},
    ]
    assert (found.threads, found.began, found.ended) == (4, 0.0, 3.0)


@pytest.mark.parametrize("text", ["", "<html>something else</html>"])
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    (path := tmp_path / "page.html").write_text(text)
    with pytest.raises(ValueError, match="no task stream with tasks"):
        of_report(path)


# ---- estimates ---------------------------------------------------------------------------------------


def test_factors_are_those_that_the_results_give() -> None:
    for found in fitting.report():
        if found["fitted"] == found["judged"]:
            assert found["factors"] == FACTORS[found["library"]]


def test_programs_without_frames_stay_as_they_are() -> None:
    (found,) = computations(Recording([task("simulate", 1.0, 3.0)], [0.5], 1, 0.0, 4.0))
    assert library_of([{"typename": "numpy.ndarray"}], found.parts) == ""
    assert estimate(found.parts, "") == (found.seconds, found.seconds)
    assert estimate(found.parts, "pandas").seconds < estimate(found.parts, "pandas").stays < found.seconds


@pytest.mark.parametrize(("typename", "library"), [("pandas.Series", "pandas"), ("cudf.DataFrame", "cudf")])
def test_the_library_is_that_of_results(typename: str, library: str) -> None:
    rows = [{"typename": "builtins.float"}, {"typename": typename}]
    assert library_of(rows, dict.fromkeys(PARTS, 0.0)) == library


# ---- plans of programs that have run on stock Dask -------------------------------------------------


def test_plans_are_foreseen_with_the_corrections_of_the_runtime(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of alternatives for the right side of a join, Dask puts what they share in place of the left side."""
    for name, key in (("a", "k"), ("b", "j")):
        frame = pd.DataFrame({key: range(40), f"{name}_x": 1})
        dd.from_pandas(frame, npartitions=2).to_parquet(tmp_path / name, write_index=False)
    with observed() as plans:
        rows = dd.read_parquet(tmp_path / "a").merge(
            dd.read_parquet(tmp_path / "b"), left_on="k", right_on="j"
        )
        first = (rows.a_x == 1) & (rows.b_x >= 1) & (rows.b_x <= 5)
        second = (rows.a_x == 2) & (rows.b_x >= 1) & (rows.b_x <= 7)
        rows[first | second].compute(scheduler="sync")
    (planned,) = [planned for _, planned in plans.found]
    (found,) = plans.of([{"key": key} for key in flatten(keys_of(planned.plan))], threads=2)
    assert found[1].reads
    assert not caplog.records
