"""Switch programs on and off, and leave to Dask what they cannot do."""

from __future__ import annotations

import operator
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
from dask._task_spec import Task, TaskRef

from dask_gpurt.config import ComputeSettings
from dask_gpurt.frames.programs import Interpreter, call
from dask_gpurt.observe import Metrics
from dask_gpurt.worker.programs import WorkerPrograms
from tests.helpers.pandas_columns import PandasColumns

FRAME = pd.DataFrame({"a": [1, 2, 3], "b": [1.0, 2.0, 3.0]})


def task() -> Task:
    """Return a fused task."""
    chosen = Task("chosen", operator.getitem, TaskRef("in"), ["a"])
    return Task.fuse(Task("in", FRAME.copy), chosen, Task("double", operator.mul, TaskRef("chosen"), 2))


@pytest.fixture
def programs() -> Any:
    settings = ComputeSettings(programs=True, check_programs=0)
    found = WorkerPrograms(settings, SimpleNamespace(kind="cuda"), Metrics())  # type: ignore[arg-type]
    found._interpreter = Interpreter(PandasColumns(), found._failed)
    found.install()
    yield found
    found.uninstall()


def counted(programs: WorkerPrograms) -> float:
    return sum(programs._metrics.total("programs.nodes").values())


def test_fused_tasks_run_on_columns_while_programs_are_on(programs: WorkerPrograms) -> None:
    assert task()().equals(FRAME[["a"]] * 2)
    assert counted(programs) == 1
    programs.on = False
    assert task()().equals(FRAME[["a"]] * 2)
    assert counted(programs) == 1
    programs.on = True
    programs.uninstall()
    assert task()().equals(FRAME[["a"]] * 2)
    assert counted(programs) == 1


def test_a_frame_that_cannot_be_made_leaves_the_task_to_dask(
    programs: WorkerPrograms, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Any, value: Any) -> Any:
        raise RuntimeError("no such index")

    monkeypatch.setattr(PandasColumns, "closed", fails)
    assert task()().equals(FRAME[["a"]] * 2)
    assert "no such index" in programs._metrics.fallbacks()["programs.node"]["reason"]


def test_single_calls_are_operations_while_programs_are_on(programs: WorkerPrograms) -> None:
    other = pd.DataFrame({"a": [3, 1], "c": [7, 8]})

    def merged(*frames: Any, **options: Any) -> str:
        return "by frames"

    found = call("merge", merged, FRAME, other, left_on="a", right_on="a")
    assert found.equals(FRAME.merge(other, on="a"))
    assert call("merge", merged, FRAME, other, left_on="a", right_index=True) == "by frames"
    programs.on = False
    assert call("merge", merged, FRAME, other, left_on="a", right_on="a") == "by frames"


def test_on_the_host_fused_tasks_are_left_to_dask() -> None:
    settings = ComputeSettings(programs=True, check_programs=0)
    on_host = WorkerPrograms(settings, SimpleNamespace(kind="host"), Metrics())  # type: ignore[arg-type]
    on_host._interpreter = Interpreter(PandasColumns(), on_host._failed)
    on_host.install()
    assert Task.fuse(Task("a", FRAME.copy), Task("b", operator.mul, TaskRef("a"), 2))().equals(FRAME * 2)
    assert not counted(on_host)
