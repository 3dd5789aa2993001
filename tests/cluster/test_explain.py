"""Explain computations: before they run, after they ran, those of a script, and those of stock Dask."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask
import dask.dataframe as dd
import pandas as pd
import pytest
from click.testing import CliRunner
from distributed import Client, LocalCluster

import dask_gpurt
from dask_gpurt.cli import main
from dask_gpurt.client.explain.plan import Explanation, Read
from dask_gpurt.client.explain.run import Run, StepRun, advise, measure

SCRIPT = """
import dask.dataframe as dd
from distributed import Client, LocalCluster
import dask_gpurt

if __name__ == "__main__":
    client = Client(LocalCluster(n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0"))
    dask_gpurt.enable(client)
    large = dd.read_parquet({large!r})
    print(large.groupby("key").value.sum().compute().sum())
    print(len(large.merge(dd.read_parquet({small!r}), on="key").compute()))
    client.close()
    raise KeyError("afterwards")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tables")
    large = pd.DataFrame({"key": range(4000), "value": 1.0, "unused": "x"})
    small = pd.DataFrame({"key": range(0, 4000, 40), "name": "y"})
    dd.from_pandas(large, npartitions=4).to_parquet(folder / "large", write_index=False)
    dd.from_pandas(small, npartitions=2).to_parquet(folder / "small", write_index=False)
    return folder


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        yield dask_gpurt.enable(client)


def tables(folder: Path) -> tuple[Any, Any]:
    large, small = (dd.read_parquet(folder / name) for name in ("large", "small"))
    return large, small


def test_a_plan_tells_its_reads_and_joins_and_why(client: Client, folder: Path) -> None:
    large, small = tables(folder)
    with dask.config.set({"gpurt.planning.broadcast-size": "1 MiB"}):
        plan = dask_gpurt.explain(large.merge(small, on="key").value.sum())
    reads = {read.table: read for read in plan.reads}
    assert (reads["large"].files, reads["large"].partitions, reads["large"].columns) == (
        4,
        4,
        ("key", "value"),
    )
    assert reads["large"].of_columns == 3
    assert reads["large"].bytes == 4000 * 16
    assert reads["small"].partitions == 1
    assert "is read in 1 partitions, not 2" in reads["small"].why
    (join,) = plan.joins
    assert join.what == "inner join on key"
    assert join.how == "broadcast of the right side to 4 partitions"
    assert join.line.rpartition(" or ")[2].startswith(Path(__file__).name + ":")
    assert not plan.shuffles
    for text in (
        "large: 4 files in 4 partitions, 2 of 3 columns",
        join.how,
        "rules applied:",
        "PartitionSize",
    ):
        assert text in repr(plan)


def test_a_plan_tells_why_reads_are_left(client: Client, folder: Path) -> None:
    large, _ = tables(folder)
    plan = dask_gpurt.explain(large.key.head(3, compute=False))
    (read,) = plan.reads
    assert "results depend on partitions" in read.why


def test_a_plan_that_shuffles_says_so(client: Client, folder: Path) -> None:
    large, _ = tables(folder)
    plan = dask_gpurt.explain(large.merge(large, on="key", broadcast=False))
    assert [join.how for join in plan.joins] == ["shuffle of both sides into 4 partitions"]


def test_an_analysis_has_all_tasks_of_the_run(client: Client, folder: Path) -> None:
    large, small = tables(folder)
    found = dask_gpurt.explain(large.merge(small, on="key", broadcast=False).value.sum(), analyze=True)
    assert sum(step.tasks for step in found.run.steps) == found.plan.tasks
    assert any("read large" in step.label for step in found.run.steps)
    assert 0 < found.run.first <= found.run.last <= found.run.seconds
    assert "threads were busy" in repr(found)
    assert found._repr_html_().startswith("<pre>")


def test_what_cannot_be_explained_is_refused(client: Client, folder: Path) -> None:
    with pytest.raises(TypeError, match="a collection of Dask"):
        dask_gpurt.explain(3)
    large, _ = tables(folder)
    dask_gpurt.disable(client)
    with pytest.raises(RuntimeError, match=r"off for this client: call dask_gpurt\.enable"):
        dask_gpurt.explain(large)
    dask_gpurt.enable(client)


def test_all_computations_of_a_script_are_explained(folder: Path, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(SCRIPT.format(large=str(folder / "large"), small=str(folder / "small")))
    done = subprocess.run(
        [sys.executable, "-m", "dask_gpurt", "explain", str(script)],
        capture_output=True, text=True, timeout=120, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert done.stdout.split() == ["4000.0", "100"]
    assert done.stderr.count("ran in") == 2  # the program closes its client
    trace = done.stderr.partition("Traceback")[2].partition("KeyError: 'afterwards'")[0]
    assert trace.splitlines()[1] == f'  File "{script}", line 13, in <module>'
    assert "computation 2 of 2" in done.stderr
    assert "group by key (program.py:10)" in done.stderr


# ---- pure parts --------------------------------------------------------------------------------------


def test_steps_have_the_times_of_their_tasks() -> None:
    plan = Explanation(3, 0.1, names={"sum-chunk-abc": "read large"})
    rows = [
        {
            "key": ("sum-chunk-abc", n),
            "nbytes": 8,
            "startstops": [
                {"action": "transfer", "start": 10.0 + n, "stop": 10.5 + n},
                {"action": "compute", "start": 10.5 + n, "stop": 11.0 + n},
            ],
        }
        for n in range(2)
    ]
    run = measure(rows, plan, began=9.0, ended=13.0, threads=2)
    assert run.steps == (StepRun("read large", 2, computing=1.0, waiting=1.0, bytes=16),)
    assert (run.seconds, run.first, run.last) == (4.0, 1.0, 3.0)
    assert run.busy == 1.0 / (2 * 2.0)
    # Clocks of workers are off by the latency of a heartbeat.
    assert measure(rows, plan, began=10.25, ended=11.75, threads=2).last == 1.5


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (StepRun("apply slow by key", 4, 8.0, 0, 0), "`apply slow by key`"),
        (StepRun("read large", 1000, 2.0, 0, 0), "fewer, larger partitions"),
        (StepRun("inner join on key", 4, 1.0, 9.0, 0), "data from other workers"),
        (StepRun("read large", 4, 8.0, 0, 0), "may depend on them"),
    ],
)
def test_hints_are_about_what_takes_long(step: StepRun, expected: str) -> None:
    read = Read("large", 9, 9, ("key",), 1, None, None, "since results depend on partitions")
    plan = Explanation(step.tasks, 0.01, reads=(read,))
    (hint, *_) = advise(plan, Run(5.0, 0.1, 4.9, 2, (step,)))
    assert expected in hint


def test_a_run_in_which_nothing_stands_out_has_no_hints() -> None:
    steps = tuple(StepRun(f"step {n}", 10, 0.9, 0.0, 0) for n in range(10))
    assert advise(Explanation(100, 0.01), Run(5.0, 0.1, 4.9, 2, steps)) == ()


# ---- programs and reports of stock Dask -----------------------------------------------------------

PROGRAM = """
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
    (tmp_path / "program.py").write_text(PROGRAM)
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
