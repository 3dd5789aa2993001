"""Test the cache of columns with a library of arrays on the host."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.config import Size
from dask_gpurt.memory.host import BlockPool, PinnedTier
from dask_gpurt.memory.ledger import RESERVATIONS, Label, Ledger, Limits, NoRoom, Tier
from dask_gpurt.memory.serialize import raw_frames
from dask_gpurt.observe import Metrics
from dask_gpurt.reads import arrow_tables
from dask_gpurt.reads import columns as module
from dask_gpurt.reads.below import ColumnsBelow
from dask_gpurt.reads.columns import Asked, Column, ColumnCache, ColumnRead, Kept
from dask_gpurt.worker.kept_reads import KeptColumns, asked_of
from dask_gpurt.worker.tiers import WorkerTiers
from tests.helpers.examples import examples
from tests.helpers.far_device import Far, FarDevice

COLUMNS = ("a", "b", "c")
INDEX = {b"pandas": b'{"index_columns": ["i"]}'}
ROWS = 5


class Table(NamedTuple):
    """Stand in for what a reader returns."""

    names: tuple[str, ...]
    columns: list[np.ndarray]
    rows: list[int]
    facts: list[dict[bytes, bytes]]


class Tables:
    """Take tables of arrays apart, as frames/cudf_reads.py does with those of pylibcudf."""

    full = False

    @property
    def FrameOfRead(self) -> type[Frame]:
        return Frame

    def names(self, table: Table) -> list[Any]:
        return [(name, []) for name in table.names]

    def facts(self, table: Table) -> Any:
        return table.facts

    def rows(self, table: Table) -> list[int]:
        return table.rows

    def columns(self, table: Table) -> list[Any]:
        return table.columns

    def kind(self, column: np.ndarray) -> Any:
        return column.dtype.str

    def nbytes(self, column: np.ndarray) -> int:
        return column.nbytes

    def copies(self, columns: Sequence[Any], rows: Sequence[int], stream: Any) -> list[list[Any]]:
        if self.full:
            raise MemoryError
        ends = np.cumsum(rows)
        return [
            [column[end - n : end].copy() for column in columns] for n, end in zip(rows, ends, strict=True)
        ]

    def joined(self, parts: Sequence[Sequence[Any]], stream: Any) -> list[Any]:
        return [np.concatenate(column) for column in zip(*parts, strict=True)]

    def taken_apart(self, column: np.ndarray) -> tuple[Any, list[Any]]:
        return column.dtype, [Far(column.view(np.uint8))] if column.size else []

    def put_together(self, shape: Any, buffers: Iterator[Any]) -> np.ndarray:
        return next(buffers).memory.view(shape)

    def wait(self, stream: Any) -> None:
        pass

    def table(self, columns: Sequence[Any], names: Sequence[Any], facts: Sequence[Any]) -> Table:
        return Table(tuple(name for name, _ in names), list(columns), [], list(facts))


class Library:
    """Hold files of several versions, and read them. File 0 has an index, and none has a column "none"."""

    def __init__(self) -> None:
        self.versions = [0, 0, 0]
        self.calls: list[Any] = []
        self.replaced_by_read: int | None = None

    def column(self, file: int, name: str) -> np.ndarray:
        return np.arange(file + ROWS) * 7 + file * 1000 + self.versions[file] * 100 + ord(name)

    def table(self, files: Sequence[int], names: Sequence[str] | None) -> Table:
        found = [name for name in (COLUMNS if names is None else names) if name in COLUMNS]
        if 0 in files:
            found.append("i")
        facts: list[dict[bytes, bytes]] = [{} if file else INDEX for file in files]
        columns = [np.concatenate([self.column(file, name) for file in files]) for name in found]
        return Table(tuple(found), columns, [file + ROWS for file in files], facts)

    def read(
        self, cache: ColumnCache, files: Sequence[int], names: tuple[str, ...] | None, **how: Any
    ) -> Any:
        def call(some: Sequence[str] | None) -> Table:
            self.calls.append(some)
            if self.replaced_by_read is not None:
                self.versions[self.replaced_by_read] += 1
                self.replaced_by_read = None
            return self.table(files, names if some is None else some)

        asked = Asked(tuple((str(file), None, ()) for file in files), names)
        tables: Any = how.get("tables", Tables())
        reading = ColumnRead(
            cache, tables, asked, call, contextlib.nullcontext, how.get("metrics", Metrics())
        )
        found = reading.read(None)
        reading.keep()
        return found

    def versions_of(self, paths: Any) -> tuple[Any, ...]:
        return tuple((self.versions[int(path)],) for path in paths)


@pytest.fixture
def library() -> Iterator[Library]:
    with simulated() as found:
        yield found


@contextlib.contextmanager
def simulated() -> Iterator[Library]:
    found = Library()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "versions_of", found.versions_of)
        patch.setattr(module, "are_lasting", lambda versions: True)
        yield found


def same(one: Table, other: Table) -> bool:
    return (
        one.names == other.names
        and one.facts == other.facts
        and all(map(np.array_equal, one.columns, other.columns))
    )


def below(room: Callable[[], int], told: Callable[[int], None] = lambda nbytes: None) -> ColumnsBelow:
    """Return a tier of blocks of 16 KiB, as large as a cache of columns."""
    tier = PinnedTier(BlockPool(16 << 10, block=256), lambda nbytes: found.release(nbytes))
    found = ColumnsBelow(tier, FarDevice(), Tables, room, told)
    return found


def both(room: int = 10_000, lower: int = 16 << 10) -> ColumnCache:
    return ColumnCache(lambda: room, lambda nbytes: None, below(lambda: lower))


def test_columns_are_dropped_rather_than_wait_for_memory_to_be_pinned() -> None:
    gate = threading.Event()

    def register(memory: np.ndarray) -> Callable[[], None]:
        assert gate.wait(30)
        return lambda: None

    pool = BlockPool(16 << 10, block=256, register=register)
    under = ColumnsBelow(PinnedTier(pool), FarDevice(), Tables, lambda: 16 << 10, lambda nbytes: None)
    values = np.arange(100)
    columns = {"a": Column(("one", []), "<i8", values, values.nbytes)}
    part = ("file", None, ())
    under.take(part, Kept((0,), {}, {}, columns))
    assert not under.has(part, (0,), "a")
    gate.set()
    pool.free(pool.allocate(1))
    under.take(part, Kept((0,), {}, {}, columns))
    assert under.has(part, (0,), "a")
    pool.close()


def replace_all(cache: ColumnCache) -> None:
    """Keep a column that needs all the room of a cache."""
    values = np.zeros(cache._room() // 8, np.int64)
    column = Column(("large", []), "<i8", values, values.nbytes)
    cache.keep(("large", None, ()), Kept((0,), {}, {}, {"large": column}))


FILES = st.sampled_from([(0,), (1,), (2,), (1, 2), (2, 1), (0, 1)])
NAMES = st.sampled_from([None, ("a",), ("b", "a"), ("a", "b", "c"), ("c", "b"), ("a", "none")])
STEPS = st.lists(
    st.tuples(
        FILES,
        NAMES,
        st.sampled_from([None, None, 0, 1, 2]),
        st.booleans(),
        st.integers(0, 600),
        st.integers(0, 2000),
    ),
    max_size=40,
)


@examples(200)
@given(steps=STEPS, has_below=st.booleans())
def test_reads_are_as_the_library_makes_them(
    steps: list[tuple[Any, Any, int | None, bool, int, int]], has_below: bool
) -> None:
    """Whatever is replaced, before or during a read, evicted, or written into earlier results."""
    room, lower, told, told_below = 600, 2000, [0], [0]
    under = below(lambda: lower, told_below.append)
    cache = ColumnCache(lambda: room, told.append, under if has_below else None)
    with simulated() as library:
        for files, names, replaced, during, room, lower in steps:  # the caches ask for them
            cache.fit()
            under.fit()
            assert cache.nbytes <= room
            assert under._tier.used == under.nbytes <= lower
            if replaced is not None and during:
                library.replaced_by_read = replaced
            elif replaced is not None:
                library.versions[replaced] += 1
            before = library.table(files, names)
            found = library.read(cache, files, names)
            library.replaced_by_read = None
            assert same(found, before) or same(found, library.table(files, names))
            for column in found.columns:
                column[:] = -1
            assert told[-1] == cache.nbytes <= room
            assert told_below[-1] == under.nbytes <= lower
    cache.close()
    under.close()
    assert under._tier.used == 0


def test_only_what_is_not_there_is_read(library: Library) -> None:
    cache, metrics = ColumnCache(lambda: 10_000, lambda nbytes: None), Metrics()
    library.read(cache, (1, 2), ("a", "b"), metrics=metrics)
    decoded = metrics.total("reads.bytes.{source}")
    for files, names in (((1,), ("b",)), ((2, 1), ("b", "a")), ((1, 2), ("a", "c"))):
        assert same(library.read(cache, files, names, metrics=metrics), library.table(files, names))
    assert library.calls == [None, ["c"]]
    each = (ROWS + 1 + ROWS + 2) * 8
    assert decoded == {("decoded",): 2 * each}
    served = each + 2 * each + (ROWS + 1) * 8
    assert metrics.total("reads.bytes.{source}") == {("decoded",): 3 * each, ("device",): served}
    assert metrics.total("reads.hits.{source}") == {("device",): 3}
    assert metrics.total("reads.seconds.saved")[()] > 0


def test_a_file_replaced_while_other_columns_are_read_is_read_whole(library: Library) -> None:
    cache, metrics = ColumnCache(lambda: 10_000, lambda nbytes: None), Metrics()
    library.read(cache, (1,), ("a",))
    library.replaced_by_read = 1
    found = library.read(cache, (1,), ("a", "b"), metrics=metrics)
    assert same(found, library.table((1,), ("a", "b")))
    assert library.calls == [None, ["b"], None]
    assert metrics.total("reads.replaced") == {(): 2}


def test_columns_of_different_types_are_left_to_the_library(library: Library) -> None:
    cache, tables = ColumnCache(lambda: 10_000, lambda nbytes: None), Tables()
    tables.kind = lambda column: column.size  # type: ignore[method-assign]
    for files in ((1,), (2,), (1, 2)):
        assert same(library.read(cache, files, None, tables=tables), library.table(files, None))
    assert library.calls == [None] * 3


def test_without_memory_for_copies_nothing_is_kept(library: Library) -> None:
    cache, tables = ColumnCache(lambda: 10_000, lambda nbytes: None), Tables()
    tables.full = True
    assert same(library.read(cache, (1,), None, tables=tables), library.table((1,), None))
    assert cache.nbytes == 0


# ---- frames of earlier reads --------------------------------------------------------------------------


class Frame(NamedTuple):
    """Stand in for a frame, and for how it is made of a table again."""

    table: Table

    @classmethod
    def of(cls, frame: Frame, table: Table) -> Frame | None:
        return frame if same(frame.table, table) else None

    def frame(self, table: Table) -> Frame:
        return Frame(table)


class FrameReads:
    """Read frames of files through their columns, as a worker does."""

    def __init__(self, library: Library) -> None:
        self.library, self.metrics, self.looks = library, Metrics(), 0
        self.cache = ColumnCache(lambda: 10_000, lambda nbytes: None)
        self.kept = KeptColumns(self.cache, Tables, contextlib.nullcontext, self.metrics)
        self.beside = SimpleNamespace(stream=None, join=lambda columns: None)

    def again(self, call: Any = "call") -> Any:
        return self.kept.frame(call, lambda: self.beside)

    def read(self, files: Sequence[int], names: tuple[str, ...], *, times: int = 1) -> Table:
        """Read, and note the frame."""
        tables: list[Any] = []
        options = SimpleNamespace(names=names, set_column_names=lambda some: setattr(options, "names", some))
        asked = Asked(tuple((str(file), None, ()) for file in files), names)

        def plainly() -> Table:
            self.library.calls.append(options.names)
            if self.library.replaced_by_read is not None:
                self.library.versions[self.library.replaced_by_read] += 1
            return self.library.table(files, options.names)

        found: Table = self.kept.read(asked, options, plainly, self.beside, tables.append)
        self.kept.made("call", times * tables, Frame(found))
        return found


@pytest.fixture
def frames(library: Library) -> FrameReads:
    return FrameReads(library)


def test_a_frame_is_made_again_without_a_read(
    frames: FrameReads, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert frames.again() is None
    frames.read((1, 2), ("a", "b"))
    looked: list[Any] = []
    monkeypatch.setattr(module, "versions_of", lambda paths: looked.append(1) or library.versions_of(paths))
    assert same(frames.again().table, library.table((1, 2), ("a", "b")))
    assert len(library.calls) == len(looked) == 1
    assert frames.again("another call") is None


def test_a_frame_whose_file_was_replaced_or_whose_columns_went_is_read(
    frames: FrameReads, library: Library
) -> None:
    frames.read((1,), ("a",))
    library.versions[1] += 1
    assert frames.again() is None
    frames.read((1,), ("a",))
    assert same(frames.again().table, library.table((1,), ("a",)))
    frames.cache.release(1)
    assert frames.again() is None
    assert len(library.calls) == 2


def test_a_frame_of_other_contents_than_the_columns_is_not_made_again(
    frames: FrameReads, library: Library
) -> None:
    """The file changes while it is read, and is read by others then: its columns are kept."""
    library.replaced_by_read = 1
    frames.read((1,), ("a",))
    library.replaced_by_read = None
    library.read(frames.cache, (1,), ("a",))
    assert frames.again() is None


def test_a_frame_of_several_reads_is_not_made_again(frames: FrameReads) -> None:
    frames.read((1,), ("a",), times=2)
    assert frames.again() is None


# ---- columns below the device -----------------------------------------------------------------------


def test_columns_that_have_to_go_come_back_from_below(library: Library) -> None:
    cache, metrics = both(), Metrics()
    for files in ((1,), (2,)):
        library.read(cache, files, ("a", "b"))
    replace_all(cache)
    cache.release(cache.nbytes)
    library.calls.clear()
    assert cache.nbytes == 0
    for files, names in (((1, 2), ("b", "a")), ((1,), ("c", "a")), ((1, 2), ("a",))):
        assert same(library.read(cache, files, names, metrics=metrics), library.table(files, names))
    assert library.calls == [["c"]]
    both_files, one = 8 * (2 * ROWS + 3), 8 * (ROWS + 1)
    # Raised columns stay on the device again.
    found = {("decoded",): one, ("pinned",): 2 * both_files, ("device",): one + both_files}
    assert metrics.total("reads.bytes.{source}") == found
    assert metrics.total("reads.hits.{source}") == {("pinned",): 1, ("device",): 2}


def test_data_that_is_spilled_takes_the_room_of_columns(library: Library) -> None:
    """Even if the columns were just read: their memory is free once the read is over."""
    cache = both(room=0)
    under = cache.below
    assert under is not None
    library.read(cache, (1,), None)
    used = under._tier.used
    reading = [column for kept in under._parts.values() for column in kept.columns.values()]
    assert under.release(used) == used == under._tier.used
    del reading
    whole = np.zeros(16 << 10, np.uint8)
    fence = under._tier.put("data", raw_frames([whole]), FarDevice(), ordered=True)
    fence()
    assert (under.nbytes, under._tier.used) == (0, whole.nbytes)
    with pytest.raises(NoRoom):
        under._tier.put("more", raw_frames([whole]), FarDevice(), ordered=True)


def test_a_column_that_is_copied_back_outlives_its_place_below(library: Library) -> None:
    cache = both(room=0)
    under = cache.below
    assert under is not None
    library.read(cache, (1,), ("a",))
    gather = under._device.gather_all

    def late(scattered: Any) -> Any:
        under.release(under.nbytes)
        again = np.full(16 << 8, 255, np.uint8)
        under._tier.put("data", raw_frames([again]), FarDevice(), ordered=True)()
        return gather(scattered)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(under._device, "gather_all", late)
        assert same(library.read(cache, (1,), ("a",)), library.table((1,), ("a",)))
    assert library.calls == [None]


def test_without_memory_to_copy_columns_back_they_are_decoded(library: Library) -> None:
    cache = both(room=0)
    library.read(cache, (1,), ("a",))
    under = cache.below
    assert under is not None
    under._device.gather_all = MagicMock(side_effect=MemoryError)  # type: ignore[method-assign]
    assert same(library.read(cache, (1,), ("a",)), library.table((1,), ("a",)))
    assert library.calls == [None, None]


def test_an_allocation_that_fails_waits_for_the_last_column_to_go_down(library: Library) -> None:
    """Otherwise it would find nothing to drop, and spill data, or fail."""
    cache = both()
    under = cache.below
    assert under is not None
    library.read(cache, (1,), ("a",))
    going, go, scatter = threading.Event(), threading.Event(), under._device.scatter

    def slow(*given: Any, **named: Any) -> Any:
        going.set()
        go.wait(10)
        return scatter(*given, **named)

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as threads:
        patch.setattr(under._device, "scatter", slow)
        first = threads.submit(replace_all, cache)
        going.wait(10)
        large = cache.nbytes
        second = threads.submit(cache.release, large)
        assert not wait([second], timeout=0.05).done
        go.set()
        first.result()
        assert second.result() == large == 10_000


CALL: dict[str, Any] = {"filepaths_or_buffers": ["/x", "/y"], "engine": "cudf", "columns": ["a", "b"]}


@pytest.mark.parametrize(
    "other",
    [
        {"engine": "pyarrow"},
        {"filepaths_or_buffers": [b"PAR1"]},
        {"filepaths_or_buffers": ["s3://x"]},
        {"filepaths_or_buffers": ["/x", "/x"]},
        {"columns": []},
        {"columns": ["a", "a"]},
        {"columns": ["a.field"]},
        {"row_groups": [[0]]},
        {"row_groups": [0, 1]},
        {"nrows": 3},
        {"skip_rows": 3},
        {"filters": "x > 0"},
        {"allow_mismatched_pq_schemas": True},
        {"case_sensitive_names": False},
        {"_chunk_read_limit": 1},
    ],
    ids=repr,
)
def test_reads_that_depend_on_more_are_left_alone(other: dict[str, Any]) -> None:
    assert asked_of(**CALL | other) is None


def test_reads_are_known_by_files_row_groups_options_and_columns() -> None:
    found = asked_of(**CALL, row_groups=[[0, 2], None], use_pandas_metadata=True)
    assert found == ((("/x", (0, 2), (True, True)), ("/y", None, (True, True))), ("a", "b"), ())
    # Of files that pandas has written, Dask also asks for an index without a name.
    assert asked_of(**CALL | {"columns": ["a", "b", None]}) == asked_of(**CALL)
    assert asked_of(**CALL | {"columns": None}) == (
        (("/x", None, (False, True)), ("/y", None, (False, True))),
        None,
        (),
    )


# ---- versions of files ----------------------------------------------------------------------------


@pytest.mark.parametrize("in_place", [True, False])
def test_a_file_with_the_same_size_and_time_is_another_one(tmp_path: Path, in_place: bool) -> None:
    path, new = tmp_path / "x", tmp_path / "new"
    path.write_bytes(b"one")
    os.utime(path, (1e9, 1e9))
    before = module.versions_of([str(path)])
    assert module.versions_of([str(path)]) == before
    for _ in range(1000):
        if module.versions_of([str(path)]) != before:  # not within a tick of the kernel's clock
            break
        time.sleep(0.001)
        (path if in_place else new).write_bytes(b"two")
        os.utime(path if in_place else new, (1e9, 1e9))
        if not in_place:
            new.replace(path)
    assert module.versions_of([str(path)]) != before
    assert path.stat().st_size == 3
    assert path.stat().st_mtime == 1e9


def test_files_that_have_just_changed_are_not_known_well_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x"
    path.touch()
    os.utime(path, (1e9, 1e9))
    versions = module.versions_of([str(path)])
    assert not module.are_lasting(versions)
    later = path.stat().st_ctime_ns + module.LEAST_AGE_NS + 1
    monkeypatch.setattr(module, "time", SimpleNamespace(time_ns=lambda: later))
    assert module.are_lasting(versions)
    device = f"{os.major(versions[0][0])}:{os.minor(versions[0][0])}"
    mounts = tmp_path / "mounts"
    mounts.write_text(f"36 35 {device} / /data rw,noatime shared:1 - fuse.store store rw\n")
    monkeypatch.setattr(module, "MOUNTS", mounts)
    assert not module.are_lasting(versions)
    monkeypatch.setattr(module, "MOUNTS", tmp_path / "none")
    assert not module.are_lasting(versions)


# ---- memory of the device -------------------------------------------------------------------------


class Tiers(SimpleNamespace):
    """Stand in for the tiers of a worker with a GPU."""

    def __init__(self, cache: Any = None) -> None:
        self.spilled: list[int] = []
        limits = Limits(1000, 0, 0, 0)
        super().__init__(
            ledger=Ledger({Tier.DEVICE: 1000}),
            limits=limits,
            settings=SimpleNamespace(cache=cache),
            device=SimpleNamespace(on_host=False),
            tiered_buffer=SimpleNamespace(spill=self.spilled.append, removals=0),
            _guard=object(),
            _seen=threading.local(),
            _dropping=False,
            _metrics=Metrics(),
            ranges=SimpleNamespace(fit=lambda: None),
            reporter=SimpleNamespace(changed=lambda: None),
            begun=[],
        )
        self.columns = ColumnCache(self.room, lambda nbytes: None)

    def room(self) -> int:
        return WorkerTiers._left_for_columns(self)  # type: ignore[arg-type]

    def _left_to_keep(self, *args: int) -> int:
        return WorkerTiers._left_to_keep(self, *args)  # type: ignore[arg-type]

    def in_background(self, function: Any) -> None:
        self.begun.append(function)

    def _drop_columns(self) -> None:
        WorkerTiers._drop_columns(self)  # type: ignore[arg-type]

    def fail(self, nbytes: int) -> bool:
        return WorkerTiers._short(self, nbytes)  # type: ignore[arg-type]


def test_columns_take_only_what_the_device_tier_has_left() -> None:
    for setting, most in ((None, 500), (Size.parse("30%", key="", expected=""), 300)):
        tiers = Tiers(setting)
        assert tiers.room() == most
        tiers.ledger.add(Tier.DEVICE, Label(RESERVATIONS), 900)
        assert tiers.room() == 100
        tiers._guard = None  # allocations of others would fail
        assert tiers.room() == 0


def test_columns_below_leave_half_of_the_pinned_tier_and_all_that_others_have() -> None:
    tiers = Tiers()
    tiers.limits = Limits(1000, 800, 0, 0)
    tiers.pinned, tiers.below = SimpleNamespace(used=100), SimpleNamespace(nbytes=100)
    assert WorkerTiers._left_below(tiers) == 400  # type: ignore[arg-type]
    tiers.pinned.used = 700
    assert WorkerTiers._left_below(tiers) == 200  # type: ignore[arg-type]
    tiers._guard = None
    assert WorkerTiers._left_below(tiers) == 0  # type: ignore[arg-type]


def test_columns_on_a_host_take_what_bytes_of_files_leave() -> None:
    tiers = Tiers()
    tiers.device.on_host = True
    tiers.ranges.nbytes, tiers._left_for_ranges = 300, lambda: 400
    assert tiers.room() == 100
    tiers.ranges.nbytes = 500
    assert tiers.room() == 0


def test_the_system_gets_what_dropped_columns_had_before_anything_is_spilled(library: Library) -> None:
    """Also if they were dropped for data before, when the process was not short of memory."""
    tiers, given_back = Tiers(), []
    tiers._given_back = 0
    library.read(tiers.columns, (1,), None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrow_tables, "give_back", lambda: given_back.append(tiers.columns.nbytes))
        for _ in range(2):
            WorkerTiers._give_back(tiers)  # type: ignore[arg-type]
            tiers.columns.release(1)
            WorkerTiers._give_back(tiers)  # type: ignore[arg-type]
    assert given_back == [2 * 8 * (ROWS + 1), 8 * (ROWS + 1)]


def test_an_allocation_that_fails_drops_columns_before_anything_is_spilled(library: Library) -> None:
    tiers = Tiers()
    for file in (1, 2):
        library.read(tiers.columns, (file,), None)
    kept = tiers.columns.nbytes
    with WorkerTiers.sparing(tiers):  # type: ignore[arg-type]
        assert not tiers.fail(10)
    assert tiers.columns.nbytes == kept
    assert tiers.fail(10)
    assert 0 < tiers.columns.nbytes < kept
    assert tiers.fail(kept)
    assert (tiers.columns.nbytes, tiers.spilled) == (0, [])
    tiers.fail(10)
    assert tiers.spilled == [10]


def test_an_allocation_is_tried_again_if_another_thread_has_dropped_columns(library: Library) -> None:
    tiers = Tiers()
    library.read(tiers.columns, (1,), None)
    tiers.columns.release(tiers.columns.nbytes)
    assert [tiers.fail(10), tiers.fail(10)] == [True, False]
    assert tiers.spilled == [10]


def test_columns_are_freed_one_by_one(library: Library) -> None:
    """So that an allocation that fails meanwhile on another thread still finds some to drop."""
    cache = ColumnCache(lambda: 10_000, lambda nbytes: None)
    library.read(cache, (1,), None)
    left = []
    for kept in cache._parts.values():
        for column in kept.columns.values():
            weakref.finalize(column.data, lambda: left.append(cache.nbytes))
    del kept, column
    cache.release(cache.nbytes)
    assert left == [2 * 8 * (ROWS + 1), 8 * (ROWS + 1), 0]


def test_a_reservation_drops_columns_on_another_thread_than_its_own(library: Library) -> None:
    """Freeing memory of a device may block, and the ledger changes on the event loop, too."""
    tiers = Tiers()
    library.read(tiers.columns, (1,), None)
    kept = tiers.columns.nbytes
    tiers.ledger.add(Tier.DEVICE, Label(RESERVATIONS), 1000 - kept // 2)
    for _ in range(2):
        WorkerTiers._changed(tiers)  # type: ignore[arg-type]
    assert (tiers.columns.nbytes, len(tiers.begun)) == (kept, 1)
    tiers.begun.pop()()
    assert 0 < tiers.columns.nbytes <= kept // 2
    WorkerTiers._changed(tiers)  # type: ignore[arg-type]
    assert tiers.begun == []
