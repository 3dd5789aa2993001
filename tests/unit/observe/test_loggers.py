"""Check that loggers are named after modules, so that Dask's ``logging`` section selects rooms."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dask_gpurt
from dask_gpurt.observe import Fallback, Metrics

PACKAGE = Path(dask_gpurt.__file__).parent

SAYS = """
import logging
import distributed
for name in ("dask_gpurt.memory.disk", "dask_gpurt.worker.plugin", "dask_gpurt.shuffle.run"):
    logging.getLogger(name).info("said by %s", name)
"""


def test_the_logger_of_a_module_has_its_name() -> None:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Assign(targets=[ast.Name(id="logger")], value=ast.Call(args=[named])):
                    found[str(path.relative_to(PACKAGE))] = ast.unparse(named)
    # It reports fallbacks under the room they occur in.
    others = {"observe/counting.py"}
    assert {path for path, named in found.items() if named != "__name__"} == others
    assert len(found) > 10


@pytest.mark.parametrize("fallback", Fallback)
def test_a_fallback_is_logged_by_its_room(fallback: Fallback, caplog: pytest.LogCaptureFixture) -> None:
    labels = ["is_rootish"] if "{" in fallback.id else []
    Metrics().fallback(fallback, "a reason", *labels)
    (record,) = caplog.records
    assert record.name == f"dask_gpurt.{fallback.room}"
    assert (PACKAGE / fallback.room.replace(".", "/")).is_dir()


def test_the_section_logging_of_dask_selects_rooms(tmp_path: Path) -> None:
    chosen = "logging:\n  dask_gpurt: warning\n  dask_gpurt.memory: info\n"
    (tmp_path / "dask.yaml").write_text(chosen)
    done = subprocess.run(
        [sys.executable, "-c", SAYS],
        env={"DASK_CONFIG": str(tmp_path), "PYTHONPATH": str(PACKAGE.parent)},
        capture_output=True,
        text=True,
        check=True,
    )
    said = [line.partition("said by ")[2] for line in done.stderr.splitlines() if "said by " in line]
    assert said == ["dask_gpurt.memory.disk"]


LINE = r"[-0-9]{10} [:,0-9]{12} - dask_gpurt.memory.disk - WARNING - said\n"


@pytest.mark.parametrize(
    ("program", "printed"),
    [
        ("", LINE),
        ("logging.basicConfig(format='%(message)s')", "said\n"),
        ("logging.getLogger('dask_gpurt').addHandler(logging.NullHandler())", ""),
    ],
)
def test_a_line_has_time_name_and_level_unless_the_program_formats_it(program: str, printed: str) -> None:
    says = (
        f"import logging, dask_gpurt; {program}\nlogging.getLogger('dask_gpurt.memory.disk').warning('said')"
    )
    done = subprocess.run([sys.executable, "-c", says], capture_output=True, text=True, check=True)
    assert re.fullmatch(printed, done.stderr)
