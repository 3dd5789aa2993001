"""Add a library of dataframes by a module and a row in the registry: here frames of plain lists."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from distributed.shuffle._core import ShuffleId

from dask_gpurt.device import Device
from dask_gpurt.frames import BlockAllocator, Packed, Part, Piece, backend_for, library
from dask_gpurt.frames.backend import giving_back
from dask_gpurt.frames.registry import LIBRARIES, FrameLibrary, device_kind, import_backends, warm_up
from dask_gpurt.memory import accounting
from tests.helpers import exchange_scheduler, exchanges
from tests.helpers.exchange_scheduler import TARGET
from tests.helpers.exchanges import Cluster, in_process

NAME = "lists_of_this_test"


@dataclass
class Lists:
    """A frame of lists by column, of as many rows each."""

    of: dict[str, list[int]]

    @property
    def columns(self) -> list[str]:
        return list(self.of)

    @property
    def dtypes(self) -> list[str]:
        return ["int"] * len(self.of)

    def __len__(self) -> int:
        return len(next(iter(self.of.values())))

    def __getitem__(self, name: str) -> list[int]:
        return self.of[name]

    def take(self, at: Sequence[int], names: Sequence[str]) -> Lists:
        return Lists({name: [self.of[name][row] for row in at] for name in names})


class ListsTable:
    """Pack rows with pickle, for each output partition by itself."""

    name = NAME

    def __init__(self, device: Device):
        self.device = device

    def split(
        self, frame: Any, column: str, groups: Any, npartitions: int, *, drop_column: bool, **_: bool
    ) -> list[Piece | None]:
        names = [name for name in frame.columns if name != column or not drop_column]
        pieces: list[Piece | None] = []
        for group in groups:
            rows = [[row for row, at in enumerate(frame[column]) if at == partition] for partition in group]
            offsets = (0, *np.cumsum([len(each) for each in rows]).tolist())
            taken = frame.take([row for each in rows for row in each], names)
            pieces.append(Piece(taken, tuple(group), offsets) if offsets[-1] else None)
        return pieces

    def cut(self, rows: Lists, start: int, stop: int) -> Lists:
        return rows.take(range(start, stop), rows.columns)

    def pack(self, piece: Piece, allocator: BlockAllocator) -> Packed:
        body = pickle.dumps(piece.rows)
        block = allocator.allocate(len(body))
        with giving_back(block, allocator):
            block.buffer[:] = np.frombuffer(body, np.uint8)
        return Packed(block, b"")

    def settle(self) -> None:
        pass

    def assemble(self, parts: Sequence[Part], meta: Lists, *, ignore_index: bool) -> Lists:
        found: dict[str, list[int]] = {name: [] for name in meta.columns}
        for part in parts:
            start, stop = part.offsets[part.index : part.index + 2]
            rows = self.cut(pickle.loads(bytes(part.buffer)), start, stop)
            found = {name: [*values, *rows[name]] for name, values in found.items()}
        return Lists(found)

    def fence(self) -> None:
        return None


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the library. Its module is this one, under the library's name."""
    monkeypatch.setitem(sys.modules, NAME, sys.modules[__name__])
    monkeypatch.setattr(Lists, "__module__", NAME)
    monkeypatch.setitem(LIBRARIES, NAME, FrameLibrary("host", NAME, "ListsTable"))


def lists_of(rows: Sequence[int], outputs: int) -> Lists:
    return Lists({"row": list(rows), TARGET: [row % outputs for row in rows]})


def test_a_shuffle_of_a_registered_library(monkeypatch: pytest.MonkeyPatch) -> None:
    spec_of = exchange_scheduler.spec_of
    meta = pickle.dumps(Lists({"row": []}))
    monkeypatch.setattr(exchanges, "frame_of", lists_of)
    monkeypatch.setattr(exchanges, "spec_of", lambda *given: replace(spec_of(*given), meta=meta))

    async def session() -> None:
        cluster = Cluster("tcp://a:1", "tcp://b:2", "tcp://c:3")
        found = await cluster.shuffle("of lists")
        assert {output: sorted(rows) for output, rows in found.items()} == cluster.expected()
        frames = [frame for _, frame in cluster.scheduler.active[ShuffleId("of lists")].outputs.values()]
        assert {type(frame) for frame in frames} == {Lists}
        await cluster.end("of lists")
        cluster.close()

    in_process(session)()


def test_a_registered_library_is_known_everywhere() -> None:
    frame = Lists({"row": [1, 2]})
    device: Any = object()
    assert library(frame) == NAME
    assert device_kind(frame) == "host"
    import_backends({"host": device})
    warm_up({"host": device})  # it has nothing to warm up
    assert backend_for(frame, lambda kind: device).device is device


def test_frames_of_another_library_are_refused_by_the_names_of_those_that_are_known() -> None:
    with pytest.raises(TypeError, match=f"expected a frame of pandas or cudf or {NAME}"):
        backend_for([1], lambda kind: pytest.fail(kind))


def test_a_library_accounts_for_its_frames_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounting, "_registered", {})
    frame = Lists({"row": [1, 2]})
    accounting.register(NAME, lambda value: [(1, 100), (2, 50)] if value is frame else None)
    assert accounting.owned(frame) == {1: 100, 2: 50}
    assert accounting.owned({"held": frame}).keys() >= {1, 2}
    assert sum(accounting.owned(Lists({})).values()) > 0
