"""Print tables with units and all columns, and name loggers after modules."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

import dask_gpurt
from dask_gpurt.memory.ledger import KINDS
from dask_gpurt.observe import Fallback, Metrics
from dask_gpurt.observe.metrics import shown_metric
from dask_gpurt.observe.tables import MemoryUsage

COLUMNS = ("worker", "tier", "capacity", "headroom", *KINDS)
MIB = 2**20


def row(worker: str, tier: str, capacity: int, **kinds: int) -> dict[str, object]:
    used = sum(kinds.get(kind, 0) for kind in ("partitions", "shards", "reservations"))
    return {
        "worker": worker,
        "tier": tier,
        "capacity": capacity,
        "headroom": capacity - used,
        **{kind: kinds.get(kind, 0) for kind in KINDS},
    }


ON_HOST = (
    row("a", "device", 100 * MIB, partitions=30 * MIB, published=MIB),
    row("a", "pinned", 0),
    row("a", "host", 0, unmanaged=7 * MIB),
    row("a", "disk", 2**40),
)
ON_GPU = tuple(
    row("g", tier, nbytes * MIB) for tier, nbytes in (("device", 9), ("pinned", 0), ("host", 0), ("disk", 5))
)


def test_without_a_gpu_tiers_are_called_by_what_they_are() -> None:
    usage = MemoryUsage((*ON_HOST, *ON_GPU), COLUMNS, {"a": 64 * MIB})
    frame = usage.to_pandas().set_index(["worker", "tier"])
    assert list(frame.loc["a"].index) == ["memory", "shared memory", "disk"]
    assert frame.loc[("a", "memory"), "unmanaged"] == 7 * MIB
    assert frame.loc[("a", "memory"), "published"] == 0
    pool = frame.loc[("a", "shared memory")]
    assert (pool["capacity"], pool["published"], pool["headroom"]) == (64 * MIB, MIB, 63 * MIB)
    assert list(frame.loc["g"].index) == ["device", "pinned", "host", "disk"]
    before = usage.to_pandas(names="metrics")
    assert list(before["tier"]) == ["device", "pinned", "host", "disk"] * 2
    assert frame["partitions"].sum() == before["partitions"].sum()
    assert frame["unmanaged"].sum() == before["unmanaged"].sum()
    with pytest.raises(ValueError, match="expected 'shown' or 'metrics'"):
        usage.to_pandas(names="mine")


def test_it_prints_all_columns_with_units() -> None:
    with pd.option_context("display.width", 40, "display.max_columns", 3):
        printed = repr(MemoryUsage(ON_HOST, COLUMNS, {"a": 64 * MIB}))
    head = printed.splitlines()[1].split()
    assert head == [column for column in COLUMNS if column != "cudf"]
    assert "30.00 MiB" in printed
    assert "..." not in printed
    assert printed.startswith("<MemoryUsage of 1 worker\n")
    assert repr(MemoryUsage((), COLUMNS)) == "<MemoryUsage: no rows>"
    assert repr(MemoryUsage((), COLUMNS, enabled=False)) == "<MemoryUsage: the runtime is off>"


def test_a_column_for_cudf_is_printed_where_there_is_a_gpu() -> None:
    usage = MemoryUsage((*ON_HOST, *ON_GPU), COLUMNS, {"a": 64 * MIB})
    assert "cudf" in repr(usage)
    # A frame has the same columns everywhere, for programs.
    assert list(MemoryUsage(ON_HOST, COLUMNS, {"a": 64 * MIB}).to_pandas()) == list(COLUMNS)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("memory.device.peak", "memory.device.peak (memory)"),
        ("memory.disk.peak", "memory.disk.peak"),
        ("memory.spill.bytes.device.disk", "memory.spill.bytes.device.disk (memory to disk)"),
        ("memory.spill.bytes.exchange.disk", "memory.spill.bytes.exchange.disk"),
        ("exchange.bytes.comms", "exchange.bytes.comms"),
        ("shuffle.rows", "shuffle.rows"),
        ("of.another.version.device", "of.another.version.device"),
    ],
)
def test_a_metric_names_its_tiers_as_the_tables_do(name: str, shown: str) -> None:
    assert shown_metric(name) == shown


def test_completion_shows_the_functions() -> None:
    assert {"enable", "disable", "report", "memory_usage", "explain"} <= set(dir(dask_gpurt))
    for name in ("enable", "report", "memory_usage", "explain"):
        assert "Returns" in getattr(dask_gpurt, name).__doc__


# ---- loggers are named after modules, so that Dask's ``logging`` section selects rooms ------------

PACKAGE = Path(dask_gpurt.__file__).parent


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
