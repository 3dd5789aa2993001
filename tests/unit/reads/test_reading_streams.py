"""Choose the CUDA stream of a library's read. What the streams do is tested on GPUs."""

from __future__ import annotations

from typing import Any, NamedTuple
from unittest.mock import MagicMock

import pytest

from dask_gpurt.config import ReadSettings
from dask_gpurt.device.host import HostDevice
from dask_gpurt.observe import Fallback, Metrics
from dask_gpurt.reads.columns import Asked
from dask_gpurt.reads.policy import BESIDE_ON_GPU
from dask_gpurt.reads.turns import Turn
from dask_gpurt.worker import kept_reads, reading
from tests.helpers.far_device import FarDevice

Arguments = tuple[Any, ...]


class Read(NamedTuple):
    """Stand in for what a library's read returns, and note the arguments that it got."""

    arguments: Arguments
    columns: tuple[str, ...] = ("a", "b")


class Execution:
    """Stand in for a task that reads, and for the reads, the device and the stream of its worker."""

    stream = "own stream"
    asked: Any = None
    columns: Any = None

    def __init__(
        self,
        *,
        is_reading: bool = True,
        has_streams: bool = True,
        error: Exception | None = None,
        foreign: Exception | None = None,
    ):
        self.is_reading, self.error, self.foreign = is_reading, error, foreign
        self.reads = self
        self.streams = self if has_streams else None
        self.told: list[str] = []
        self.tables: list[Any] = [None]
        self.joined: list[tuple[str, ...]] = []
        self.counted = 0

    def beside(self) -> Execution:
        if self.error:
            raise self.error
        return self

    def join(self, columns: tuple[str, ...]) -> None:
        if self.foreign:
            raise self.foreign
        self.joined.append(columns)

    def count_stream(self) -> None:
        self.counted += 1

    def share_stream(self, reason: str) -> None:
        self.told.append(reason)


@pytest.mark.parametrize(
    ("beside", "on_host", "on_gpu"), [(None, 0, BESIDE_ON_GPU), (0, 0, 0), (1, 1, 1), (4, 4, 4)]
)
def test_tasks_read_beside_compute_on_a_gpu_unless_the_settings_say_otherwise(
    beside: int | None, on_host: int, on_gpu: int
) -> None:
    for device, expected in ((HostDevice(1 << 20), on_host), (FarDevice(), on_gpu)):
        reads = reading.WorkerReads(MagicMock(), device, ReadSettings(None, beside), Metrics())
        assert reads.report()["beside"] == expected


def read(execution: Any, *args: Any, monkeypatch: pytest.MonkeyPatch, **kwargs: Any) -> Arguments:
    """Read in a task; return the arguments that the library got last."""

    def read_parquet(options: Any, stream: Any = None, mr: Any = None, parquet_metadatas: Any = None) -> Read:
        return Read((options, stream, mr, parquet_metadatas))

    monkeypatch.setattr(reading._thread, "execution", execution)
    found: Read = reading._on_own_stream(read_parquet)(*args, **kwargs)
    return found.arguments


def test_a_read_beside_compute_has_a_stream_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    found = read(execution := Execution(), "options", parquet_metadatas="known", monkeypatch=monkeypatch)
    assert found == ("options", "own stream", None, "known")
    assert execution.joined == [("a", "b")]
    assert execution.counted == 1
    assert not execution.told


@pytest.mark.parametrize(
    "execution",
    [None, Execution(is_reading=False), Execution(has_streams=False)],
    ids=["outside tasks", "outside readers", "no streams"],
)
def test_other_reads_are_left_alone(execution: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(execution, "options", monkeypatch=monkeypatch) == ("options", None, None, None)


@pytest.mark.parametrize("given", [{"stream": "given"}, {"mr": "given"}])
def test_a_given_stream_or_resource_is_used(given: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    found = read(Execution(), "options", monkeypatch=monkeypatch, **given)
    assert found == ("options", given.get("stream"), given.get("mr"), None)


@pytest.mark.parametrize("reason", [{"error": MemoryError("none")}, {"foreign": TypeError("none")}])
def test_without_a_stream_of_its_own_a_read_uses_the_users(
    reason: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if what was read on one is not of the library's allocator, and so could not be freed safely."""
    execution = Execution(**reason)
    assert read(execution, "options", monkeypatch=monkeypatch) == ("options", None, None, None)
    assert execution.told == ["none"]
    assert not execution.counted


class Columns:
    """Stand in for columns that are kept, and for the library that takes them apart."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None):
        self.order: list[Any] = []
        self.error = error
        self.new_columns = ["kept"]
        self.versions = None
        monkeypatch.setattr(kept_reads, "ColumnRead", self.reading)
        self.metrics = Metrics()
        self.kept = kept_reads.KeptColumns(MagicMock(), lambda: "tables", MagicMock(), self.metrics)

    def reading(self, cache: Any, tables: Any, asked: Any, read: Any, *_: Any) -> Columns:
        self.asked, self.read_some = asked, read
        return self

    def read(self, stream: Any) -> Read:
        if self.error:
            raise self.error
        found: Read = self.read_some(["b"])
        return found._replace(columns=("copied",))

    def keep(self) -> None:
        self.order.append("kept")


def read_kept(columns: Columns, execution: Any, monkeypatch: pytest.MonkeyPatch) -> Arguments:
    execution.columns, execution.join = columns.kept, lambda found: columns.order.append([*found])
    execution.asked = Asked((("/x", None, ()),), ("a", "b"))
    return read(execution, MagicMock(set_column_names=columns.order.append), monkeypatch=monkeypatch)


def test_columns_are_kept_once_the_users_stream_waits_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    columns, execution = Columns(monkeypatch), Execution()
    assert read_kept(columns, execution, monkeypatch)[1] == "own stream"
    assert columns.order == [["b"], ["a", "b"], ["copied", "kept"], "kept"]
    assert execution.asked is None
    assert execution.counted == 1


def test_without_the_cache_of_columns_the_library_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    columns, execution = Columns(monkeypatch, RuntimeError("none")), Execution()
    assert read_kept(columns, execution, monkeypatch)[1:] == ("own stream", None, None)
    assert columns.order == [[], ["a", "b"]]
    assert Fallback.READS_NOT_KEPT.id in columns.metrics.fallbacks()


def test_a_read_through_the_cache_that_has_no_memory_is_not_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    columns = Columns(monkeypatch, MemoryError("none"))
    with pytest.raises(MemoryError):
        read_kept(columns, Execution(), monkeypatch)
    assert columns.order == [[]]


def test_what_a_call_of_cudf_asks_for_is_known_within_it_only(monkeypatch: pytest.MonkeyPatch) -> None:
    execution: Any = Execution()
    monkeypatch.setattr(reading._thread, "execution", execution)
    noted = reading._noting(lambda *args, **kwargs: execution.asked)
    for columns, expected in ((None, None), (object(), Asked((("/x", None, (False, True)),), ("a",)))):
        execution.columns = columns
        assert noted(["/x"], "cudf", columns=["a"]) == expected
        assert execution.asked is None


@pytest.fixture
def reads() -> reading.WorkerReads:
    """Return the reads of a worker on a device with streams that keeps columns."""
    worker, columns = MagicMock(**{"state.nthreads": 1}), MagicMock()
    found = reading.WorkerReads(worker, FarDevice(), ReadSettings(None, None), Metrics(), columns)
    found.columns, found.streams = columns, MagicMock()
    return found


def test_a_read_of_kept_columns_is_not_timed(reads: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads that touch no file tell nothing about waits for files, and clocks take system calls."""
    execution: Any = MagicMock(begins_with_read=False, turn=Turn("key"), tables=[])
    monkeypatch.setattr(reading, "call_of", lambda args, kwargs: args)
    monkeypatch.setattr(reading.ThreadTime, "now", lambda: pytest.fail("timed"))
    reads.columns.frame.return_value = "kept"
    assert reads.read(execution, lambda part: pytest.fail("read"), "part") == "kept"
    reads.columns.frame.assert_called_once_with(("part",), reads.streams.beside)
    execution.times.add.assert_not_called()


def test_what_a_call_has_read_is_noted_and_released(reads: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    execution: Any = MagicMock(begins_with_read=False, turn=Turn("key"), tables=[])
    monkeypatch.setattr(reading, "call_of", lambda args, kwargs: args)
    reads.columns.frame.return_value = None
    noted: list[Any] = []
    reads.columns.made = lambda call, tables, frame: noted.append((call, [*tables], frame))
    assert reads.read(execution, lambda part: execution.tables.append("table") or "frame", "part") == "frame"
    assert noted == [(("part",), ["table"], "frame")]
    assert execution.tables == []
    execution.times.add.assert_called_once()
