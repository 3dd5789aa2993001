"""Choose the CUDA stream of a library's read. What the streams do is tested on GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import MagicMock

import pytest

from dask_gpurt.config import ReadSettings
from dask_gpurt.device.host import HostDevice
from dask_gpurt.observe import Metrics
from dask_gpurt.reads.policy import BESIDE_ON_GPU
from dask_gpurt.worker import reading
from tests.helpers.far_device import FarDevice

Arguments = tuple[Any, ...]


class Execution:
    """Stand in for a task that reads, and for the reads and the device of its worker."""

    def __init__(self, *, is_reading: bool = True, has_streams: bool = True, error: Exception | None = None):
        self.is_reading, self.error = is_reading, error
        self.reads = self
        self.streams = self if has_streams else None
        self.told: list[str] = []
        self.inside = False
        self.counted = 0

    def reading(self) -> Any:
        if self.error:
            raise self.error
        return self._body()

    @contextmanager
    def _body(self) -> Iterator[tuple[str, str]]:
        self.inside = True
        yield "own stream", "own memory"
        self.inside = False

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
    """Read in a task; return the arguments that the library gets, and whether the body is open meanwhile."""

    def read_parquet(
        options: Any, stream: Any = None, mr: Any = None, parquet_metadatas: Any = None
    ) -> Arguments:
        return options, stream, mr, parquet_metadatas, execution is not None and execution.inside

    monkeypatch.setattr(reading._thread, "execution", execution)
    found: Arguments = reading._on_own_stream(read_parquet)(*args, **kwargs)
    return found


def test_a_read_beside_compute_has_a_stream_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    found = read(execution := Execution(), "options", parquet_metadatas="known", monkeypatch=monkeypatch)
    assert found == ("options", "own stream", "own memory", "known", True)
    assert not execution.inside
    assert execution.counted == 1
    assert not execution.told


@pytest.mark.parametrize(
    "execution",
    [None, Execution(is_reading=False), Execution(has_streams=False)],
    ids=["outside tasks", "outside readers", "no streams"],
)
def test_other_reads_are_left_alone(execution: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(execution, "options", monkeypatch=monkeypatch) == ("options", None, None, None, False)


@pytest.mark.parametrize("given", [{"stream": "given"}, {"mr": "given"}])
def test_a_given_stream_or_resource_is_used(given: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    found = read(Execution(), "options", monkeypatch=monkeypatch, **given)
    assert found == ("options", given.get("stream"), given.get("mr"), None, False)


def test_without_a_stream_of_its_own_a_read_uses_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    execution = Execution(error=MemoryError("no stream"))
    assert read(execution, "options", monkeypatch=monkeypatch) == ("options", None, None, None, False)
    assert execution.told == ["no stream"]
    assert not execution.counted
