"""Check that results of planning outlive the process, but not in files that others may have written."""

from __future__ import annotations

import gc
import os
import pickle
import shutil
import time
import types
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from dask.dataframe.dask_expr.io import parquet
from dask.tokenize import tokenize
from dask.utils import M
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.client.planning import keys as digests
from dask_gpurt.client.planning import store
from dask_gpurt.client.planning.catalogue.schema import schema_of
from dask_gpurt.client.planning.keys import digest_of, environment, frozen
from dask_gpurt.client.planning.store import Generation, ResultsFile, Store, StoredCache, add
from dask_gpurt.client.session import Sessions
from dask_gpurt.config import cache_files
from dask_gpurt.dask_hooks.parquet_files import pickled
from dask_gpurt.dask_hooks.planning import content_of
from dask_gpurt.observe import Metrics
from tests.helpers.examples import examples
from tests.helpers.planned import Planner

ROOT = Path(__file__).parents[4]
UNREADABLE, NOT_STORED = "planning.store-unreadable", "planning.not-stored"
KEYS = [bytes([number]) * 20 for number in range(5)]


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


def reasons(metrics: Metrics) -> dict[str, str]:
    return {name: found["reason"] for name, found in metrics.snapshot()["fallbacks"].items()}


def write(path: Path, metrics: Metrics, *results: Any) -> None:
    """Store results as a process does that then ends."""
    writer = Store(path, metrics)
    for key, result in zip(KEYS, results, strict=False):
        writer.put(key, result)
    writer.save()


def read(path: Path, metrics: Metrics, count: int = 3) -> list[Any]:
    """Return what another process finds."""
    reader = Store(path, metrics)
    return [reader.get(key) for key in KEYS[:count]]


# ---- the store ------------------------------------------------------------------------------------


def test_a_plan_saved_by_one_process_is_found_by_the_next(path: Path, metrics: Metrics) -> None:
    assert read(path, metrics) == [None] * 3
    write(path, metrics, "a", {"b": 1})
    assert read(path, metrics) == ["a", {"b": 1}, None]
    write(path, metrics, "changed")
    assert read(path, metrics) == ["changed", {"b": 1}, None]
    assert reasons(metrics) == {}
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_a_result_is_what_it_was_when_it_was_stored(path: Path, metrics: Metrics) -> None:
    keeper, result = Store(path, metrics), ["a"]
    keeper.put(KEYS[0], result)
    result.append("b")
    assert keeper.get(KEYS[0]) == ["a"]


def test_processes_that_write_at_once_keep_each_others_results(path: Path, metrics: Metrics) -> None:
    keys = [number.to_bytes(20, "little") for number in range(32)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda key: add(path, {key: key}, (), 0.0), keys))
    found = ResultsFile.open(path)
    assert found is not None
    assert {key: found.read(key) for key in keys} == {key: key for key in keys}


def test_a_process_keeps_the_file_that_it_has_opened(path: Path, metrics: Metrics) -> None:
    write(path, metrics, "a")
    reader = Store(path, metrics)
    assert reader.get(KEYS[0]) == "a"
    write(path, metrics, "changed")
    path.unlink()
    assert reader.get(KEYS[0]) == "a"
    assert reasons(metrics) == {}


def test_another_process_that_is_writing_is_not_waited_for(
    path: Path, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "WRITING_TIMEOUT_S", 0.0)
    write(path, metrics, "a")
    with cache_files.alone(path, 1):
        write(path, metrics, "b")
    assert "another process is writing" in reasons(metrics)[NOT_STORED]
    assert read(path, metrics, 1) == ["a"]


def test_the_least_recently_used_plan_goes_first(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "FILE_LIMIT_BYTES", 25)
    for now, key in enumerate(KEYS[:2]):
        add(path, {key: b"0123456789"}, (), now)
    add(path, {KEYS[2]: b"0123456789"}, {KEYS[0]}, 5)
    found = ResultsFile.open(path)
    assert found is not None
    assert [key in found.places for key in KEYS[:3]] == [True, False, True]
    assert path.stat().st_size < 25 + 1_000


def test_a_process_that_finds_all_writes_once_a_day(
    path: Path, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(path, metrics, "a", "b")
    began = time.time()
    for passed, is_written in ((60.0, False), (store.USED_ANEW_S + 60.0, True)):
        before, used = path.stat().st_ino, Store(path, metrics)
        monkeypatch.setattr(store, "time", types.SimpleNamespace(time=lambda now=began + passed: now))
        assert used.get(KEYS[0]) == "a"
        used.save()
        assert (path.stat().st_ino != before) == is_written
    found = ResultsFile.open(path)
    assert found is not None
    assert found.places[KEYS[0]].used > found.places[KEYS[1]].used


def test_memory_and_results_are_bounded(
    path: Path, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "RESULT_LIMIT_BYTES", 1_000)
    monkeypatch.setattr(store, "WAITING_LIMIT_BYTES", 1_500)
    keeper = Store(path, metrics)
    for key, size in zip(KEYS, (900, 2_000, 800), strict=False):
        keeper.put(key, b"x" * size)
    found = [keeper.get(key) for key in KEYS[:3]]
    assert [result is not None for result in found] == [False, False, True]


class Unpicklable:
    def __reduce__(self) -> Any:
        raise ValueError("not to be pickled")


class Unloadable:
    def __reduce__(self) -> Any:
        return int, ("no number",)


def test_a_plan_that_cannot_be_pickled_is_counted_and_made_anew(path: Path, metrics: Metrics) -> None:
    write(path, metrics, Unpicklable(), Unloadable(), "a")
    assert "not to be pickled" in reasons(metrics)[NOT_STORED]
    assert read(path, metrics) == [None, None, "a"]
    assert "no number" in reasons(metrics)[UNREADABLE]


# ---- damaged and foreign files ---------------------------------------------------------------------


def older_format(path: Path) -> None:
    path.write_bytes(b"dask-gpurt planning 1\n" + (2).to_bytes(8, "little") + b"{}")


def with_index(index: str) -> Callable[[Path], None]:
    """Return a damage that writes a made-up index with the right checksum."""

    def damage(path: Path) -> None:
        raw = index.encode()
        checksum = bytes.fromhex(store.checksum_of(raw))
        path.write_bytes(store.MAGIC + checksum + len(raw).to_bytes(8, "little") + raw)

    return damage


MADE_UP = [
    "[" * 100_000,
    "[]",
    '{"00": 1}',
    '{"00": [0, 9223372036854775808, "", 0]}',
    '{"00": [-1, 1, "", 0]}',
    '{"00": [0, 0.5, "", 0]}',
    '{"00": [0, 0, "", "now"]}',
    '{"00": [0, 0, ""]}',
]


@pytest.mark.parametrize("damage", [older_format, *map(with_index, MADE_UP)])
@pytest.mark.parametrize("adds", [True, False])
def test_a_damaged_file_is_replaced(
    path: Path, metrics: Metrics, damage: Callable[[Path], None], adds: bool
) -> None:
    """Also by a process that has nothing to add."""
    write(path, metrics, "a" * 50)
    damage(path)
    finder = Store(path, metrics)
    assert finder.get(KEYS[0]) is None
    assert any(word in reasons(metrics)[UNREADABLE] for word in ("is damaged", "of another version"))
    if adds:
        finder.put(KEYS[0], "b")
    finder.save()
    found = ResultsFile.open(path)
    assert found is not None
    assert list(found.places) == [KEYS[0]] * adds
    assert NOT_STORED not in reasons(metrics)


#: Results of a process, and the edits that may damage its file: where, how many bytes go, and which come.
RESULTS = ["a" * 50, {"b": 1}, ["c", None]]
EDITS = st.lists(
    st.tuples(st.integers(0), st.integers(0, 40), st.binary(max_size=40)), min_size=1, max_size=3
)


@examples(40)
@given(edits=EDITS, keep=st.none() | st.integers(0, 700))
def test_whatever_is_damaged_results_are_right_or_made_anew(
    edits: list[tuple[int, int, bytes]], keep: int | None
) -> None:
    with TemporaryDirectory() as folder:
        path, metrics = Path(folder, "planning", "results"), Metrics()
        write(path, metrics, *RESULTS)
        content = path.read_bytes()
        for where, goes, comes in edits:
            where %= len(content) + 1
            content = content[:where] + comes + content[where + goes :]
        content = content[:keep]
        path.write_bytes(content)
        for found, right in zip(read(path, metrics), RESULTS, strict=True):
            assert found in (None, right)
        write(path, metrics, *RESULTS)
        name = store.NAME
        if name.startswith(content[: len(name)]) or content.endswith(store.MAGIC):
            assert read(path, metrics) == RESULTS
            assert NOT_STORED not in reasons(metrics)
        else:  # nobody knows whose file it is
            assert path.read_bytes() == content
            assert "not a file of the runtime's" in reasons(metrics)[NOT_STORED]


def test_a_program_ends_quietly_whatever_happens_to_its_store(
    path: Path, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise OverflowError("too large")

    keeper = Store(path, metrics)
    keeper.put(KEYS[0], "a")
    monkeypatch.setattr(store, "add", fail)
    keeper.save()
    assert reasons(metrics) == {NOT_STORED: "OverflowError('too large')"}


class Trap:
    """Leave a trace if it is unpickled."""

    def __init__(self, trace: Path):
        self.trace = trace

    def __reduce__(self) -> Any:
        return Path.touch, (self.trace,)


def link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


#: What others may do to a file or its folder, and why it is not used then.
BY_OTHERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a folder of a group": (lambda path: path.parent.chmod(0o770), "others may write to"),
    "a folder as /tmp": (lambda path: path.parent.chmod(0o1777), "others may write to"),
    "a file of all": (lambda path: path.chmod(0o606), "others may write to"),
    "a link": (link, "symbolic link"),
    "a pipe": (pipe, "is not a file"),
    "text": (lambda path: path.write_text("of the user"), "is not a file of the runtime's planning"),
}


@pytest.mark.parametrize("name", BY_OTHERS)
def test_a_file_that_others_may_have_written_is_not_used(
    path: Path, tmp_path: Path, metrics: Metrics, name: str
) -> None:
    trace, (change, reason) = tmp_path / "trace", BY_OTHERS[name]
    write(path, metrics, Trap(trace))
    change(path)
    before = path.lstat()
    assert read(path, metrics, 1) == [None]
    write(path, metrics, "b")
    assert set(reasons(metrics)) == {UNREADABLE, NOT_STORED}
    assert all(reason in each for each in reasons(metrics).values())
    assert not trace.exists()
    assert (path.lstat().st_ino, path.lstat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_file_of_another_user_is_not_used(
    path: Path, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(path, metrics, "a")
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    assert read(path, metrics, 1) == [None]
    write(path, metrics, "b")
    assert all("belongs to the user" in reason for reason in reasons(metrics).values())


def test_a_place_that_cannot_be_written_is_counted(tmp_path: Path, metrics: Metrics) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "results"
    assert read(path, metrics, 1) == [None]
    write(path, metrics, "a")
    assert set(reasons(metrics)) == {UNREADABLE, NOT_STORED}


def test_a_user_without_a_home_directory_has_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    sessions = Sessions()
    monkeypatch.setattr(Path, "home", home)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert sessions.store_at("auto") is None
    assert "home directory" in reasons(sessions.metrics)[NOT_STORED]


# ---- digests ----------------------------------------------------------------------------------------


class OfTheUser(Enum):
    A = 1


def of_the_user() -> None: ...


def key_of(frame: Any) -> Hashable:
    schema = schema_of(frame)
    assert schema is not None
    return schema.key


FRAME = pd.DataFrame({"a": pd.Series([], dtype="int64")})
STABLE: list[Hashable] = [
    *(None, True, 1, 1.0, -0.0, 0.0, "1", b"1", "(1,)", (1,), ((1,),), (1, 1), ("1,1",), ("1", "1")),
    *(frozen(value) for value in (None, True, 1, 1.0, "1", [1], (1,), {"a": 1}, len, np.add, M.sum, M.min)),
    *(frozen(value) for value in (pd.DataFrame, pd.DataFrame.from_dict, pd.concat, np.dtype("int8"))),
    *(frozen(np.dtype(kind)) for kind in ("int16", "<M8[ns]", "<M8[us]", "O")),
    *(
        key_of(FRAME.astype(dtype))
        for dtype in ("int64", "Int64", "str", "string[pyarrow]", "category", "bool[pyarrow]")
    ),
    *(key_of(FRAME.astype(pd.ArrowDtype(pa.timestamp(unit)))) for unit in ("ns", "us")),
    *(key_of(each) for each in (FRAME.a, FRAME.set_index("a"), FRAME.rename(columns={"a": "1"}))),
]


def test_digests_of_different_keys_differ() -> None:
    found = [digest_of(key) for key in STABLE]
    assert None not in found
    assert len(set(found)) == len(found) == len({*map(repr, STABLE)})


@pytest.mark.parametrize(
    "key",
    [
        of_the_user,
        OfTheUser,
        OfTheUser.A,
        lambda: 0,
        types.FunctionType((lambda: 0).__code__, {"__name__": "pandas"}, "<lambda>"),
        [].append,
        object(),
        np.dtype([("a", "int8")]),
        {1},
        (1, (of_the_user,)),
    ],
    ids=lambda key: type(key).__name__,
)
def test_a_value_that_may_differ_in_the_next_process_has_no_digest(key: Any) -> None:
    assert digest_of(key) is None


def test_libraries_that_are_not_known_have_no_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "_VERSIONED", {"dask_gpurt": ("distributed under no name",)})
    environment.cache_clear()
    try:
        assert environment() is None
        assert digest_of(1) is None
    finally:
        environment.cache_clear()


def test_source_of_planning_that_differs_gives_other_digests(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "planner_of_test"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(digests, "PLANNERS", {"planner_of_test": ("*.py",)})
    found = []
    for name, source in (("a.py", "x = 1"), ("a.py", "x = 2"), ("b.py", "x = 2")):
        (package / name).write_text(source)
        environment.cache_clear()
        found.append(digest_of(1))
    environment.cache_clear()
    assert len(set(found)) == 3


def test_the_source_that_plans_is_that_of_the_client() -> None:
    files = {str(file.relative_to(folder)) for folder, file in digests.sources_of("dask_gpurt")}
    client = ROOT / "dask_gpurt" / "client"
    assert {str(file.relative_to(client.parent)) for file in client.rglob("*.py")} < files
    for pattern in digests.PLANNERS["dask_gpurt"]:
        assert any(Path(file).match(pattern) for file in files), pattern


def test_settings_with_the_address_of_an_object_are_not_stored(path: Path, metrics: Metrics) -> None:
    """Another object may have the address in the next process."""
    keeper = Store(path, metrics)
    for settings, is_stored in (((repr(object()),), False), (("{}",), True)):
        for number, expected in ((1, None), (2, "a" if is_stored else None)):
            kept: StoredCache[str] = StoredCache("kind", 9, lambda: keeper)
            generation = Generation(number, settings)
            found = kept.get(generation, "key", lambda: "key")
            assert found.value == expected
            kept.put(generation, "key", "a", found)


# ---- expressions --------------------------------------------------------------------------------------


def test_the_content_of_an_expression_counts(table: str) -> None:
    read = dd.read_parquet(table)
    other = dd.read_parquet(table, columns=["key"])
    expressions = [
        *(read, other, read.key, read[["key"]], read.key + 1, read.key + 1.0, read[read.key > 1]),
        *(read.merge(read, on="key"), read.merge(read, on="key", how="left"), read.key.sum(), read.key.min()),
        *(read.key.isin([1, 2]), read.key.isin([1, 3]), read.key.isin([1.0, 2.0]), read.key.isin(["1", "2"])),
        *(read.key.isin(pd.Series([1, 2]).to_numpy()), read.shuffle("key"), read.shuffle("value")),
    ]
    found = [content_of(each.expr) for each in expressions]
    assert None not in found
    assert len(set(found)) == len(found) - 1, "isin of a list and of an array are alike"
    # Dask makes a list of the set of the values, and the order of strings in it differs between processes.
    orders = (read.key.isin(np.array(values)) for values in (["b", "a"], ["a", "b"]))
    assert len({content_of(each.expr) for each in orders}) == 1
    pd.DataFrame({"key": [1], "value": [2]}).to_parquet(f"{table}/part.1.parquet")
    assert content_of(dd.read_parquet(table).key.expr) != content_of(read.key.expr)


def test_an_input_without_files_has_no_content(table: str) -> None:
    read = dd.read_parquet(table)
    named = dask.delayed(3, name="threshold")  # may be another number in the next process
    frame = pd.DataFrame({"key": [1]})
    secret = dd.read_parquet(table, storage_options={"auto_mkdir": True})
    for expression in (read.map_partitions(M.add, named, meta=read), dd.from_pandas(frame), secret):
        assert content_of(expression.expr) is None
        assert content_of(expression.key.sum().expr) is None


def test_the_state_of_files_counts(planner: Planner, table: str, path: Path) -> None:
    """On an Arrow file system Dask compares sizes and times, which the file may share with its successor."""
    part, contents = Path(table, "part.0.parquet"), []
    for _ in range(3):
        planner.begin_again(path)
        read = dd.read_parquet(table, filesystem="arrow").key.expr
        contents.append((read._name, content_of(read)))
        del read
        gc.collect()
        if len(contents) == 2:
            copy = part.with_name("copy")
            shutil.copy2(part, copy)
            copy.replace(part)
    assert contents[0] == contents[1] != (contents[0][0], None)
    assert contents[2][0] == contents[0][0]
    assert contents[2][1] not in (contents[0][1], None)


def test_files_of_which_the_state_is_not_known_have_no_content(table: str) -> None:
    assert content_of(dd.read_parquet(table, filesystem="arrow").key.expr) is None


def test_a_plan_brings_the_statistics_that_the_scheduler_needs(
    table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler in the process of the client would otherwise compute them, and wait for itself."""
    table = dd.read_parquet(table, filesystem="arrow")
    stored = pickled(table["key"].sum().optimize(fuse=False).expr)
    files = [tokenize(file) for file in table.expr._dataset_info["all_files"]]
    expected = {file: vars(parquet)["_STATS_CACHE"][file] for file in files}
    monkeypatch.setitem(vars(parquet), "_STATS_CACHE", {})  # as in the next process
    pickle.loads(stored)
    assert vars(parquet)["_STATS_CACHE"] == expected != {}


def test_a_plan_is_not_stored_if_a_setting_has_changed_meanwhile(
    planner: Planner, table: str, path: Path
) -> None:
    """A thread may change it, and change it back, while another plans, with the key of the setting before."""

    def plan(expr: Any, stage: str) -> Any:
        """Plan as Dask does, but with another setting for some time; planning makes expressions."""
        with dask.config.set({"dataframe.convert-string": next(meanwhile)}):
            dd.read_parquet(table)
        return expr

    meanwhile, found = iter([False, True]), []
    with dask.config.set({"dataframe.convert-string": True}):
        for _ in range(3):
            planner.begin_again(path)
            planner.cache.optimise(plan, dd.read_parquet(table).key.expr, "fused")
            found.append(planner.count("plans.loaded"))
    assert found == [0, 0, 1]
