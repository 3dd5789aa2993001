"""Run each example as users start it."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.commands import run
from tests.helpers.flights import write_tables
from tests.helpers.nightly import nightly
from tests.helpers.tpch import small_tables

EXAMPLES = Path(__file__).parents[2] / "examples"


def no_arguments(folder: Path) -> list[str]:
    return []


def few_documents(folder: Path) -> list[str]:
    return ["--rows", "40"]


def few_flights(folder: Path) -> list[str]:
    write_tables(folder, 2_000)
    return ["--data", str(folder), "--years", "1"]


def few_orders(folder: Path) -> list[str]:
    if importlib.util.find_spec("xgboost") is None:
        pytest.skip("xgboost is not installed")
    return ["--rows", "500"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("merge_and_sort", no_arguments, "shuffle.rows"),
        ("switch_on", no_arguments, "the same result both ways"),
        nightly("near_duplicates", few_documents, "of 320 documents are left"),
        nightly("flights", few_flights, "read, joined, grouped and written"),
        nightly("xgboost_training", few_orders, "times its data"),
    ],
)
def test_an_example(name: str, arguments: Callable[[Path], list[str]], said: str, tmp_path: Path) -> None:
    done = run(sys.executable, EXAMPLES / f"{name}.py", *arguments(tmp_path))
    assert said in done.stdout


def test_each_example_is_run() -> None:
    (runs,) = (mark for mark in test_an_example.pytestmark if mark.name == "parametrize")
    arguments = [getattr(run, "values", run) for run in runs.args[1]]
    assert {name for name, *_ in arguments} == {path.stem for path in EXAMPLES.glob("*.py")}


def printed(notebook: Path) -> str:
    """Return what the cells of a notebook have printed."""
    cells = json.loads(notebook.read_text())["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    return "".join("".join(output.get("text", ())) for output in outputs)


@pytest.mark.slow
def test_the_tutorial_runs_and_its_change_halves_the_time(tmp_path: Path) -> None:
    root = EXAMPLES.parent
    run(sys.executable, "-m", "ci.tutorial", tmp_path / "tutorial.ipynb", PYTHONPATH=str(root))
    ran, checked_in = (
        float(re.findall(r", ([\d.]+) times as fast", printed(notebook))[0])
        for notebook in (tmp_path / "tutorial.ipynb", root / "docs" / "tutorial.ipynb")
    )
    assert ran > 0  # how much faster depends on what else runs here
    assert checked_in > 2


@pytest.mark.nightly
def test_the_notebook(tmp_path: Path) -> None:
    # Execute the cells in order, as Jupyter would; Jupyter is not needed.
    notebook = json.loads((EXAMPLES / "tpch.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell.get("outputs") for cell in notebook["cells"])
    script = tmp_path / "notebook.py"
    script.write_text(
        "if __name__ == '__main__':\n    import os, sys\n"
        + "".join(
            f"    exec(compile({cell!r}, 'cell {number}', 'exec'), globals())\n"
            for number, cell in enumerate(cells)
        )
        + "    print(seconds)\n"
    )
    small_tables(tmp_path / "tables", parts=2)
    done = run(sys.executable, script, TPCH_TABLES=str(tmp_path / "tables"), PYTHONPATH=str(EXAMPLES.parent))
    assert "22: " in done.stdout.splitlines()[-1]
