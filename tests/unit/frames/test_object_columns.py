"""Pack Python objects and other non-numeric columns: all their bytes are in the pool.

Headers are part of offers, which the event loop unpickles: their size does not depend on the data.
"""

from __future__ import annotations

import decimal
import gc
import pickle
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pandas.testing import assert_frame_equal, assert_series_equal
from pandas.tests.extension.decimal import DecimalArray, DecimalDtype

from dask_gpurt.dask_hooks.types import concat
from dask_gpurt.device import Block, PoolFull
from dask_gpurt.device.host import HostDevice
from dask_gpurt.exchange.incoming import Landing
from dask_gpurt.exchange.shard import Section, Shard
from dask_gpurt.frames import Packed, Part, Piece
from dask_gpurt.frames.pandas import PandasTable
from dask_gpurt.frames.pickled import Chunks, Pickled, own_rest
from dask_gpurt.memory.accounting import owned
from dask_gpurt.memory.ledger import SHARDS, Limits, Tier
from dask_gpurt.observe import Metrics
from tests.helpers.tiered_buffers import new_tiered_buffer

OUTPUTS = 5
ROWS = 10_000
KIB, MIB = 2**10, 2**20


class Heap:
    """Fake an unlimited pool that refuses the given number of first requests."""

    def __init__(self, refusals: int = 0) -> None:
        self.refusals = refusals

    def allocate(self, nbytes: int) -> Block:
        if self.refusals:
            self.refusals -= 1
            raise PoolFull(nbytes)
        return Block(0, nbytes, np.empty(nbytes, np.uint8))

    def give_back(self, block: Block) -> None:
        pass


@pytest.fixture(scope="module")
def table() -> PandasTable:
    return PandasTable(HostDevice(1 << 30))


def pieces(
    table: PandasTable, frame: pd.DataFrame, groups: list[list[int]], *, ignore_index: bool = False
) -> list[Piece]:
    how: Any = {"drop_column": True, "ignore_index": ignore_index}
    split = table.split(frame, "_partitions", groups, OUTPUTS, **how)
    return [piece for piece in split if piece is not None]


def one_piece(table: PandasTable, frame: pd.DataFrame) -> Piece:
    """Return all rows, evenly distributed over the outputs."""
    targets = np.arange(len(frame)) * OUTPUTS // max(1, len(frame))
    (piece,) = pieces(table, frame.assign(_partitions=targets), [list(range(OUTPUTS))])
    return piece


def parts_of(piece: Piece, packed: Packed) -> dict[int, Part]:
    return {
        output: Part(packed.header, packed.block.buffer, piece.offsets, at, {})
        for at, output in enumerate(piece.partitions)
    }


def objects(values: Sequence[Any]) -> np.ndarray:
    """Return an array of arbitrary objects; numpy would descend into lists."""
    array = np.empty(len(values), object)
    for at, value in enumerate(values):
        array[at] = value
    return array


def column(values: Sequence[Any]) -> pd.Series:
    """Return a column of dtype object, also for strings, for which pandas would infer its own dtype."""
    return pd.Series(objects(values), dtype=object)


# ---- rows ----------------------------------------------------------------------------------

LEAVES = st.one_of(
    st.none(),
    st.just(float("nan")),
    st.integers(),
    st.booleans(),
    st.text(max_size=3),
    st.text(min_size=50, max_size=300),
    st.binary(max_size=9),
    st.decimals(allow_nan=False),
    st.dates(),
    st.just(pd.NaT),
)
CELLS = LEAVES | st.lists(LEAVES, max_size=2) | st.tuples(LEAVES, st.lists(LEAVES, max_size=1))
NAMES = ("a", "number", "b", "text", "when", "kind")
ROW = st.tuples(st.integers(0, OUTPUTS - 1), CELLS, CELLS)


def mixed(rows: Sequence[tuple[int, Any, Any]], names: Sequence[str]) -> pd.DataFrame:
    """Draw object columns next to others."""
    numbers = np.arange(len(rows))
    made = {
        "a": column([a for _, a, _ in rows]),
        "number": numbers / 7,
        "b": column([b for _, _, b in rows]),
        "text": pd.array([f"text {at}" for at in numbers], dtype="string"),
        "when": pd.Timestamp("2020") + pd.to_timedelta(numbers, "D"),
        "kind": pd.Categorical([["u", "v", None][at % 3] for at in numbers], categories=["u", "v"]),
    }
    targets = np.array([target for target, _, _ in rows], int)
    return pd.DataFrame({"_partitions": targets, **{name: made[name] for name in names}})


@given(
    st.lists(st.lists(ROW, max_size=6), min_size=1, max_size=3),
    st.lists(st.sampled_from(NAMES), unique=True),
    st.sampled_from(["counted", "of objects"]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_rows_of_objects_are_those_of_pandas(
    drawn: list[list[Any]], names: list[str], index: str, twice: bool, ignore_index: bool, halves: bool
) -> None:
    inputs = [mixed(rows, names) for rows in drawn]
    for frame in inputs:
        if index == "of objects":
            frame.index = pd.Index([f"row {at}" for at in range(len(frame))], object, name="row")
        if twice:  # labels may be duplicated
            frame.columns = pd.Index(["_partitions", *("same" for _ in names)])
    table, groups = PandasTable(HostDevice(1 << 30)), [[3, 0], [1, 2, 4]]
    parts: dict[int, list[Part]] = {output: [] for output in range(OUTPUTS)}
    for frame in inputs:
        for whole in pieces(table, frame, groups, ignore_index=ignore_index):
            for piece in whole.halves(table.cut) if halves else [whole]:
                if not len(piece):
                    continue
                for output, part in parts_of(piece, table.pack(piece, Heap())).items():
                    start, stop = part.offsets[part.index : part.index + 2]
                    if start < stop:
                        parts[output].append(part)
    meta = inputs[0].iloc[:0].drop(columns="_partitions")
    for output, mine in parts.items():
        found = table.assemble(mine, meta, ignore_index=ignore_index)
        rows = [frame[frame["_partitions"] == output].drop(columns="_partitions") for frame in inputs]
        wanted = pd.concat([frame for frame in rows if len(frame)] or rows[:1])
        if ignore_index:
            wanted = wanted.reset_index(drop=True)
        assert cells(found) == cells(wanted)
        if mine:
            assert found.dtypes.tolist() == wanted.dtypes.tolist()


def cells(frame: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    """Return a frame's cells, so that nan equals nan, and 1 equals neither 1.0 nor True."""
    return list(frame.columns), [[repr(cell) for cell in row] for row in frame.itertuples(name=None)]


# ---- every dtype ---------------------------------------------------------------------------


class DecimalsDtype(DecimalDtype):
    @classmethod
    def construct_array_type(cls) -> type:
        return Decimals


class Decimals(DecimalArray):
    """An extension array of another library, not known to hold objects."""

    dtype = DecimalsDtype()


class Subclass(pd.DataFrame):
    """A frame with its own pickling."""

    @property
    def _constructor(self) -> Any:
        return Subclass

    def __reduce__(self) -> Any:
        return Subclass, (dict(self.items()),)


TEXTS = [f"a text of row {at}, not a short one" for at in range(ROWS)]
DAYS = pd.Timestamp("2020") + pd.to_timedelta(np.arange(ROWS), "s")
COLUMNS: dict[str, Any] = {
    "objects": column(TEXTS),
    "lists": column([[at, str(at)] for at in range(ROWS)]),
    "bytes": column([bytes(50) for _ in range(ROWS)]),
    "python strings": pd.array(TEXTS, dtype=pd.StringDtype("python")),
    "arrow strings": pd.array(TEXTS, dtype=pd.StringDtype("pyarrow")),
    "arrow": pd.array(np.arange(ROWS), dtype=pd.ArrowDtype(pa.int64())),
    "arrow lists": pd.array([["x", "y"]] * ROWS, dtype=pd.ArrowDtype(pa.list_(pa.string()))),
    "nullable": pd.array(np.arange(ROWS), dtype="Int64"),
    "category": pd.Categorical(TEXTS),
    "category of objects": pd.Categorical(pd.Index(TEXTS, dtype=object)),
    "category of days": pd.Categorical(DAYS),
    "days": DAYS,
    "days somewhere": DAYS.tz_localize("CET"),
    "months": pd.period_range("2020", periods=ROWS, freq="h"),
    "intervals": pd.IntervalIndex.from_breaks(np.arange(ROWS + 1)),
    "sparse": pd.arrays.SparseArray(np.arange(ROWS) % 3),
    "another library's": Decimals([decimal.Decimal(at) for at in range(ROWS)]),
}
INDEXES: dict[str, Any] = {
    "index of objects": pd.Index(TEXTS, dtype=object),
    "index of strings": pd.Index(TEXTS, dtype="str"),
    "index of days": DAYS,
    "levels": pd.MultiIndex.from_arrays(
        [pd.Index(TEXTS, dtype=object), np.arange(ROWS)], names=["text", "n"]
    ),
}


def frame_of(name: str) -> pd.DataFrame:
    numbers = np.arange(ROWS)
    if name in INDEXES:
        return pd.DataFrame({"number": numbers}, index=INDEXES[name])
    if name == "subclass":
        return Subclass({"number": numbers, "text": COLUMNS["objects"]})
    return pd.DataFrame({"number": numbers, "it": COLUMNS[name]})


@pytest.mark.parametrize("name", [*COLUMNS, *INDEXES, "subclass"])
def test_the_header_is_small_and_rows_are_their_own(table: PandasTable, name: str) -> None:
    frame = frame_of(name)
    piece = one_piece(table, frame)
    packed = table.pack(piece, Heap())
    assert len(packed.header) < KIB
    part = parts_of(piece, packed)[2]
    start, stop = piece.offsets[2:4]
    found = table.assemble([part], frame[:0], ignore_index=False)
    whole = table.assemble(list(parts_of(piece, packed).values())[:2], frame[:0], ignore_index=False)
    packed.block.buffer[:] = 255  # as when a pool reuses the block for another shard
    assert_frame_equal(found, frame.iloc[start:stop])
    wanted = pd.concat([frame[a:b] for a, b in list(pairwise(piece.offsets))[:2]])  # with its own dtypes
    assert_frame_equal(whole, wanted, check_categorical=False)


def test_an_index_that_is_that_of_the_columns_too() -> None:
    labels = pd.Index(["a", "b", "c"], dtype=object)
    frame = pd.DataFrame(objects(range(9)).reshape(3, 3))
    frame._mgr.axes = [labels, labels]  # as some pandas versions do if both axes share an index
    packed = Chunks(frame, (0, 2, 3)).pack(Heap())
    read: Pickled = pickle.loads(packed.header)
    for at, rows in enumerate((frame[:2], frame[2:])):
        assert_frame_equal(read.read(Part(packed.header, packed.block.buffer, (0, 2, 3), at, {})), rows)


# ---- objects -------------------------------------------------------------------------------

made, pickled = list[int](), list[int]()


class Counted:
    """An object that counts its picklings and unpicklings."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        pickled.append(self.number)
        return make, (self.number,)


def make(number: int) -> Counted:
    made.append(number)
    return Counted(number)


@pytest.fixture(autouse=True)
def _nothing_was_made() -> None:
    made.clear()
    pickled.clear()


def test_one_output_is_read_without_the_objects_of_others(table: PandasTable) -> None:
    frame = pd.DataFrame({"a": [Counted(at) for at in range(50)]})
    piece = one_piece(table, frame)
    parts = parts_of(piece, table.pack(piece, Heap()))
    pickle.loads(pickle.dumps([part.header for part in parts.values()]))  # as the event loop does
    assert made == []
    for output, (start, stop) in enumerate(pairwise(piece.offsets)):
        made.clear()
        found = table.assemble([parts[output]], frame[:0], ignore_index=False)
        assert made == [one.number for one in found["a"]] == list(range(start, stop))


def test_objects_are_pickled_once_however_often_the_pool_is_full(table: PandasTable) -> None:
    piece = one_piece(table, pd.DataFrame({"a": [Counted(at) for at in range(50)]}))
    room = Heap(refusals=3)
    for _ in range(3):
        with pytest.raises(PoolFull):
            table.pack(piece, room)
    table.pack(piece, room)
    assert sorted(pickled) == list(range(50))
    for half in piece.halves(table.cut):  # whose rows differ from the pickled ones
        (part, *_) = parts_of(half, table.pack(half, Heap())).values()
        start, stop = part.offsets[:2]
        assert len(table.assemble([part], piece.rows.frame[:0], ignore_index=False)) == stop - start


def test_objects_beside_what_has_to_be_copied_are_not_pickled_again(table: PandasTable) -> None:
    """Arrow's memory is still in the buffer after rows were concatenated."""
    frame = pd.DataFrame({"a": [Counted(at) for at in range(2000)], "text": COLUMNS["arrow strings"][:2000]})
    piece = one_piece(table, frame)
    parts = list(parts_of(piece, table.pack(piece, Heap())).values())
    pickled.clear()
    found = table.assemble(parts, frame[:0], ignore_index=False)
    assert (len(found), pickled, len(made)) == (2000, [], 2000)


def test_classes_that_only_cloudpickle_knows(table: PandasTable) -> None:
    class Local:
        pass

    frame = pd.DataFrame({"a": [Local() for _ in range(10)]})
    piece = one_piece(table, frame)
    parts = parts_of(piece, table.pack(piece, Heap()))
    found = table.assemble(list(parts.values()), frame[:0], ignore_index=False)
    assert [type(one).__name__ for one in found["a"]] == ["Local"] * 10


# ---- accounting ----------------------------------------------------------------------------


def shard_of(piece: Piece, packed: Packed) -> Shard:
    section = Section(piece.partitions, piece.offsets, 0, packed.block.nbytes, packed.header)
    return Shard(0, "tcp://a", "host", 0, 0, 0, 0, (section,))


def test_the_ledger_sees_shards_of_objects(table: PandasTable, tmp_path: Any) -> None:
    """10 MB of bytes: their offer is small, and in the owner's tiers they are 10 MB."""
    piece = one_piece(table, pd.DataFrame({"a": objects([bytes(at % 2000) for at in range(10_000)])}))
    packed = table.pack(piece, Heap())
    shard = shard_of(piece, packed)
    assert shard.nbytes > 9 * MIB
    assert len(pickle.dumps([shard])) < 2 * KIB
    tiered_buffer, device = (
        new_tiered_buffer(str(tmp_path), Limits(12 * MIB, 0, 0, None)),
        HostDevice(1 << 30),
    )
    landing = Landing(tiered_buffer, "host", Metrics())
    for number in range(2):  # the second finds no room next to the first
        landing.put(f"shard-{number}", shard, [packed.block.buffer], device, device.land)
    assert tiered_buffer.ledger.cell(Tier.DEVICE, SHARDS) > 9 * MIB
    assert tiered_buffer.ledger.cell(Tier.DISK, SHARDS) > 9 * MIB
    tiered_buffer.close()


def truth(value: Any, seen: set[int]) -> int:
    """Return the bytes of an object and of everything that it refers to, each counted once."""
    if id(value) in seen:
        return 0
    seen.add(id(value))
    inner: Iterator[Any] = iter(())
    if isinstance(value, dict):
        inner = iter([*value, *value.values()])
    elif isinstance(value, (list, tuple, set)):
        inner = iter(value)
    return sys.getsizeof(value) + sum(truth(each, seen) for each in inner)


SHARED = [f"one of a few values, {at}" for at in range(2000)]
SIZED: dict[str, Any] = {
    "strings": [f"a text {at}" for at in range(20_000)],
    "all are missing": [None] * 20_000,
    "the same again": [SHARED[at * 7919 % 2000] for at in range(20_000)],
    "bytes": [bytes(at % 1000) for at in range(20_000)],
    "large ones": ["x" * 10**6 + str(at) for at in range(20)],
    "lists": [[str(at)] * (at % 3) + [float(at)] for at in range(20_000)],
    "dictionaries": [{"key": str(at), "other": [at + 0.5]} for at in range(2000)],
    "decimals": [decimal.Decimal(at) for at in range(20_000)],
    "arrays": [np.full(100, at) for at in range(2000)],
    "of all kinds": [[at * 1000, str(at), bytes(200), None, (at, str(at))][at % 5] for at in range(20_000)],
    "none at all": [],
}


@pytest.mark.parametrize("name", SIZED)
def test_sizes_of_objects_are_about_right(name: str) -> None:
    array = objects(SIZED[name])
    seen: set[int] = set()
    real = 8 * len(array) + sum(truth(value, seen) for value in array)
    values = (
        array,
        pd.Series(array, dtype=object),
        pd.Index(array, dtype=object),
        pd.DataFrame({"a": array}, dtype=object),
    )
    for value in values:
        told = sum(owned(value).values())
        assert real / 2 <= told <= 2 * real + 10_000
        assert owned(value) == owned(value)


# ---- nothing of received buffers stays in what pandas has concatenated -----------------------------

RECEIVED = 2_000
OF_MESSAGES: dict[str, Callable[[pd.DataFrame], Any]] = {
    "frame": lambda frame: frame,
    "objects": lambda frame: frame.assign(objects=[(row,) for row in range(RECEIVED)]),
    "strings": lambda frame: frame["strings"],
    "levels": lambda frame: frame.set_index(["row", "strings"]),
    "rows of strings": lambda frame: frame.set_index("strings")[["row"]],
}


class Message(np.ndarray):
    """View a received message; everything that is read from it keeps this view alive."""


def received(part: Any) -> tuple[Any, weakref.ref[Message]]:
    """Return a frame as it comes from a worker, and a reference to the message."""
    buffers: list[pickle.PickleBuffer] = []
    whole = pickle.dumps(part, protocol=5, buffer_callback=buffers.append)
    sizes = [buffer.raw().nbytes for buffer in buffers]
    joined = bytearray(b"".join(bytes(buffer.raw()) for buffer in buffers))
    message = np.frombuffer(joined, np.uint8).view(Message)
    ends = np.cumsum(sizes)
    views = [message[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    return pickle.loads(whole, buffers=views), weakref.ref(message)


def rows_of(part: int) -> pd.DataFrame:
    rows = np.arange(part, part + RECEIVED)
    columns = {
        "row": rows,
        "half": rows / 2,
        "strings": pd.array([f"x{row}" for row in rows], "str"),
        "categories": pd.Categorical.from_codes(rows % 2, [f"of {part}", "of all"]),
        "times": pd.to_datetime(rows),
        "integers": pd.array(rows, "Int64"),
    }
    return pd.DataFrame(columns, index=pd.Index(rows[::-1], name="at"))


@pytest.mark.parametrize("kind", OF_MESSAGES)
def test_nothing_of_the_messages_stays(kind: str) -> None:
    parts = [OF_MESSAGES[kind](rows_of(part)) for part in range(3)]
    expected = concat(parts)
    frames, messages = map(list, zip(*map(received, parts), strict=True))
    found = own_rest(concat(frames))
    del frames
    gc.collect()
    assert [message() for message in messages] == [None] * 3
    (assert_frame_equal if isinstance(expected, pd.DataFrame) else assert_series_equal)(found, expected)


def test_numbers_are_not_copied_again() -> None:
    whole = concat([rows_of(0)[["half"]], rows_of(1)[["half"]]])
    found = own_rest(whole)
    assert np.shares_memory(found["half"].to_numpy(), whole["half"].to_numpy())
    found.iloc[0, 0] = -1.0  # which may be written to


def test_what_cannot_be_pickled_stays_as_it_is() -> None:
    whole = concat([rows_of(0), rows_of(1)])
    whole.attrs["unit"] = lambda: None
    assert own_rest(whole) is whole
