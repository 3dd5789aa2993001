"""Pack cudf partitions column by column, or with libcudf's contiguous split.

Splitting and packing run on the communication stream, ordered after the user's work. Outputs are assembled on
the user's stream, since that is where their memory is freed.

Decisions and their figures: ``docs/decisions/shuffle.md``.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, product
from typing import Any

import cudf
import pandas as pd
import pylibcudf as plc
import rmm
from cudf.core.column import ColumnBase, NumericalColumn, StringColumn
from cudf.core.column.utils import access_columns
from pylibcudf.libcudf.partitioning import hash_id
from rmm.pylibrmm.stream import DEFAULT_STREAM

from dask_gpurt.dask_hooks.types import concat
from dask_gpurt.device import Block, Device, Pool, PoolFull
from dask_gpurt.device.copies import Copy, DeviceSpan, address
from dask_gpurt.device.cuda import CudaDevice
from dask_gpurt.device.cuda_memory import copy_on_device
from dask_gpurt.device.pool import ALIGNMENT, Buffer
from dask_gpurt.frames.backend import (
    BlockAllocator,
    Hashed,
    Packed,
    Part,
    Piece,
    Routed,
    giving_back,
)
from dask_gpurt.frames.key_values import NANOSECONDS, unit_of

IDENTITY, MURMUR = hash_id.HASH_IDENTITY, hash_id.HASH_MURMUR3
FIRST_TO_LAST = [plc.types.Order.ASCENDING], [plc.types.NullOrder.AFTER]
DONT_CHECK = plc.copying.OutOfBoundsPolicy.DONT_CHECK


@dataclass(frozen=True)
class _CudfRows:
    """Hold columns without names, and the header to restore names and dtypes."""

    table: plc.Table
    header: bytes


@dataclass(frozen=True)
class _Schema:
    """Hold the metadata of a frame that a ``plc.Table`` does not have."""

    columns: tuple[Any, ...]
    #: Names of the index; None if the index was dropped.
    index: tuple[Any, ...] | None
    dtypes: tuple[Any, ...]

    @classmethod
    def of(cls, frame: cudf.DataFrame, columns: Sequence[Any], *, index: bool) -> _Schema:
        names = tuple(frame._index_names) if index else None
        return cls(tuple(frame._column_names), names, tuple(_portable(column.dtype) for column in columns))

    def frame(self, table: plc.Table, like: cudf.DataFrame) -> cudf.DataFrame:
        dtypes = [dtype() if isinstance(dtype, _Nested) else dtype for dtype in self.dtypes]
        columns = [
            ColumnBase.create(column, dtype) for column, dtype in zip(table.columns(), dtypes, strict=True)
        ]
        return like._from_columns_like_self(columns, self.columns, self.index)


@dataclass(frozen=True)
class _Nested:
    """Describe a list or struct dtype as an Arrow type; cudf cannot pickle those that contain strings."""

    kind: type[cudf.ListDtype] | type[cudf.StructDtype]
    arrow: Any

    def __call__(self) -> Any:
        return self.kind.from_arrow(self.arrow)


def _portable(dtype: Any) -> Any:
    if type(dtype) in (cudf.ListDtype, cudf.StructDtype):
        return _Nested(type(dtype), dtype.to_arrow())
    return dtype


class CudfTable:
    """Split, pack and assemble cudf frames in the memory of one GPU."""

    name = "cudf"

    def __init__(self, device: Device):
        assert isinstance(device, CudaDevice)
        self.device = device
        #: Copies into blocks, deferred to the next `settle`.
        self._copies: list[Copy] = []

    def split(
        self,
        frame: cudf.DataFrame | Routed,
        column: str,
        groups: Sequence[Sequence[int]],
        npartitions: int,
        *,
        drop_column: bool,
        ignore_index: bool,
        in_order: bool = False,
    ) -> list[Piece | None]:
        if in_order and isinstance(frame, Routed):
            frame = frame.assigned()
        frame, keys, function = _hashing(frame, column, drop_column=drop_column)
        index = [] if ignore_index and frame._columns else self._index_of(frame)
        columns = [*index, *frame._columns]
        header = pickle.dumps(_Schema.of(frame, columns, index=bool(index)))
        table, ends = self._partitioned(columns, keys, function, npartitions, in_order=in_order)
        layout = CudfLayout.of(table, header)
        header = pickle.dumps(layout) if layout else header
        return [self._piece(table, header, layout, partitions, ends) for partitions in groups]

    def _index_of(self, frame: cudf.DataFrame) -> list[ColumnBase]:
        """Return the columns of an index.

        For a range, cudf would materialise them on the user's stream, and synchronise with it.
        """
        index = frame.index
        if not isinstance(index, cudf.RangeIndex) or not len(index):
            return list(index._columns)
        stream, _ = self.device.stream()
        int64 = plc.DataType(plc.TypeId.INT64)
        first, step = (plc.Scalar.from_py(n, int64, stream=stream) for n in (index.start, index.step))
        return [ColumnBase.create(plc.filling.sequence(len(index), first, step, stream=stream), index.dtype)]

    def _partitioned(
        self,
        columns: list[ColumnBase],
        keys: list[ColumnBase],
        function: hash_id,
        npartitions: int,
        *,
        in_order: bool,
    ) -> tuple[plc.Table, list[int]]:
        """Sort the rows of ``columns`` by output partition; return them, and the end of each partition.

        ``in_order``: whether rows of a partition keep their order, which they do not in libcudf's hash
        partitioning: threads of a block race. ``keys`` is then the column of output partitions.
        """
        stream, raw = self.device.after_compute()
        with access_columns(*columns, *keys, mode="read", scope="internal") as accessed:
            plain = [c.plc_column for c in accessed]
            kept, by = plc.Table(plain[: len(columns)]), plain[len(columns) :]
            if function == MURMUR:
                by = _as_dask_casts(by, stream)
            table, offsets = plc.partitioning.hash_partition(
                plc.Table(by) if in_order else kept, plc.Table(by), npartitions, function, stream=stream
            )
            if in_order:
                order = plc.sorting.stable_sorted_order(plc.Table(by), *FIRST_TO_LAST, stream=stream)
                table = plc.copying.gather(kept, order, DONT_CHECK, stream=stream)
            raw.synchronize()
        ends = [*list(offsets)[1:npartitions], table.num_rows()]
        return table, ends + [table.num_rows()] * (npartitions - len(ends))

    def _piece(
        self,
        table: plc.Table,
        header: bytes,
        layout: CudfLayout | None,
        partitions: Sequence[int],
        ends: list[int],
    ) -> Piece | None:
        spans = [(ends[p - 1] if p else 0, ends[p]) for p in partitions]
        offsets = [0]
        for start, stop in spans:
            offsets.append(offsets[-1] + stop - start)
        if not offsets[-1]:
            return None
        if layout is not None:
            return Piece(PlainRows.of(table, layout, header, spans), tuple(partitions), tuple(offsets))
        stream, _ = self.device.stream()
        if all(left[1] == right[0] for left, right in pairwise(spans)):
            (rows,) = plc.copying.slice(table, [spans[0][0], spans[-1][1]], stream=stream)
        else:
            cuts = [edge for span in spans for edge in span]
            rows = plc.concatenate.concatenate(plc.copying.slice(table, cuts, stream=stream), stream=stream)
        return Piece(_CudfRows(rows, header), tuple(partitions), tuple(offsets))

    def cut(self, rows: _CudfRows | PlainRows, start: int, stop: int) -> _CudfRows | PlainRows:
        if isinstance(rows, PlainRows):
            return rows.between(start, stop)
        stream, _ = self.device.stream()
        (part,) = plc.copying.slice(rows.table, [start, stop], stream=stream)
        return _CudfRows(part, rows.header)

    def pack(self, piece: Piece, allocator: BlockAllocator) -> Packed:
        if isinstance(piece.rows, PlainRows):
            block = allocator.allocate(piece.rows.layout.starts(len(piece))[-1])
            with giving_back(block, allocator):
                self._copies += list(piece.rows.copies(block.buffer.ptr))
            return Packed(block, piece.rows.header)
        return self._split_contiguously(piece, allocator)

    def _split_contiguously(self, piece: Piece, allocator: BlockAllocator) -> Packed:
        stream, _ = self.device.stream()
        blocks: dict[int, Block] = {}
        full: list[PoolFull] = []

        def take(nbytes: int, _stream: Any) -> int:
            try:
                block = allocator.allocate(nbytes)
            except PoolFull as error:
                full.append(error)  # libcudf converts all exceptions to its own
                raise MemoryError from error
            blocks[block.buffer.ptr] = block
            return int(block.buffer.ptr)

        def drop(ptr: int, _nbytes: int, _stream: Any) -> None:
            if ptr in blocks:
                allocator.give_back(blocks.pop(ptr))

        memory = rmm.mr.CallbackMemoryResource(take, drop)
        try:
            metadata, data = plc.contiguous_split.pack(piece.rows.table, stream=stream, mr=memory).release()
        except MemoryError:
            if full:
                raise full[0] from None
            raise
        # This block is not freed by `drop` any more; libcudf frees all other allocations.
        block = blocks.pop(data.ptr) if len(data) else allocator.allocate(0)
        del data
        with giving_back(block, allocator):
            header = pickle.dumps((bytes(metadata), piece.rows.header))
        return Packed(block, header)

    def settle(self) -> None:
        _, raw = self.device.stream()
        copies, self._copies = self._copies, []
        copy_on_device(copies, raw)
        raw.synchronize()

    def assemble(self, parts: Sequence[Part], meta: cudf.DataFrame, *, ignore_index: bool) -> cudf.DataFrame:
        if not parts:
            return meta.copy()
        read = pickle.loads(parts[0].header)
        if isinstance(read, CudfLayout) and len({part.header for part in parts}) == 1:
            table = read.read(parts, self.device)
            plain: cudf.DataFrame = pickle.loads(read.schema).frame(table, meta)
            return plain
        opened = [_opened(part) for part in parts]
        tables = [tables[part.index] for part, (_, tables) in zip(parts, opened, strict=True)]
        headers = [header for header, _ in opened]
        if len(set(headers)) == 1:
            return pickle.loads(headers[0]).frame(_concatenated(tables), meta)
        # Categories or dtypes differ: let cudf unify them.
        frames = [
            pickle.loads(header).frame(_concatenated([table]), meta)
            for header, table in zip(headers, tables, strict=True)
        ]
        return concat(frames, ignore_index)

    def fence(self) -> Callable[[], None]:
        wait: Callable[[], None] = self.device.compute_event().synchronize
        return wait

    def warm_up(self) -> None:
        """Load the kernels that every shuffle needs, which libcudf would otherwise load on first use."""
        frame = cudf.DataFrame({"_partitions": [0, 1], "a": [0, 1], "b": [0.0, 1.0]})
        pool = self.device.create_pool(1 << 16)
        for piece in self.split(frame, "_partitions", [[0, 1]], 2, drop_column=True, ignore_index=False):
            assert piece is not None
            packed = self.pack(piece, _Spare(pool))
            self.settle()
            part = Part(packed.header, packed.block.buffer, piece.offsets, 0, {})
            self.assemble([part, part], frame[["a", "b"]], ignore_index=False)
            self.fence()()
        pool.close()

    def warm_up_operators(self, until: Callable[[], bool]) -> None:
        """Compile the kernels that cudf's operators would compile on first use; they are cached on disk.

        Stops between two operations once ``until`` returns True.

        Division checks for zeros and infinities with cupy, whose reductions take seconds to compile: the
        first mean of a groupby took 8 s on an H200. cupy compiles them separately for thread blocks of 32,
        64, … and 512 threads. This compiles the smallest, for results of up to 128 groups, and the largest,
        for partitions of more than 1,024 rows.
        """
        for length in (2, 2048):
            counts = cudf.Series(range(1, length + 1))
            numbers = counts.astype("float64")
            for dividend, divisor in product((numbers, counts), (numbers, counts, 2.0)):
                if until():
                    return
                dividend / divisor


class _Spare:
    """Allocate blocks from a separate pool."""

    def __init__(self, pool: Pool):
        self.allocate, self.give_back = pool.allocate, pool.free


def _hashing(
    frame: cudf.DataFrame | Routed, column: str, *, drop_column: bool
) -> tuple[cudf.DataFrame, list[ColumnBase], hash_id]:
    """Return the rows to split, the columns to hash, and the hash function, for libcudf's hash partitioning.

    The output partition is the hash, which equals that of `hash_values`, or the identity of a number, modulo
    the number of partitions. This is many times as fast as libcudf's partitioning by a map.
    """
    if isinstance(frame, Hashed):
        keys = _hashable(frame) if drop_column else None
        if keys is not None:
            return frame.frame, keys, MURMUR
    if isinstance(frame, Routed):
        frame = frame.assigned()
    target = frame[column]._column
    numbers = target if target.dtype.kind in "iu" else target.astype("int32")
    # Not with ``drop``, which copies the other columns.
    others = frame[[name for name in frame._column_names if name != column]] if drop_column else frame
    return others, [numbers], IDENTITY


def _hashable(hashed: Hashed) -> list[ColumnBase] | None:
    """Return the key columns if Dask just hashes them with libcudf; else None."""
    if not hashed.by:
        return None
    columns, expected = ([frame._data[name] for name in hashed.by] for frame in (hashed.keys, hashed.like))
    # This excludes above all categoricals, of which Dask hashes the categories, or the codes without a cast.
    for plain in (NumericalColumn, StringColumn):
        if all(type(column) is plain for column in (*columns, *expected)):
            return columns
    return None


def _as_dask_casts(keys: list[plc.Column], stream: Any) -> list[plc.Column]:
    """Cast numbers to float64, as Dask does, so that equal keys of different dtypes have the same hash."""
    float64 = plc.DataType(plc.TypeId.FLOAT64)
    return [plc.unary.cast(k, float64, stream=stream) if plc.traits.is_numeric(k.type()) else k for k in keys]


def _opened(part: Part) -> tuple[bytes, list[plc.Table]]:
    """Return the schema of a packed piece and a table for each output partition, cached in the memo."""
    if "opened" not in part.memo:
        read = pickle.loads(part.header)
        if isinstance(read, CudfLayout):
            header, table = read.schema, read.view(part.buffer, part.offsets[-1])
        else:
            metadata, header = read
            table = plc.contiguous_split.unpack_from_memoryviews(
                memoryview(metadata), plc.gpumemoryview(part.buffer), stream=DEFAULT_STREAM
            )
        edges = [edge for pair in pairwise(part.offsets) for edge in pair]
        part.memo["opened"] = header, plc.copying.slice(table, edges, stream=DEFAULT_STREAM)
    opened: tuple[bytes, list[plc.Table]] = part.memo["opened"]
    return opened


def _concatenated(tables: list[plc.Table]) -> plc.Table:
    """Concatenate tables into new memory, even if there is only one."""
    if len(tables) == 1:
        empty = plc.copying.slice(tables[0], [0, 0], stream=DEFAULT_STREAM)[0]
        tables = [tables[0], empty]
    return plc.concatenate.concatenate(tables, stream=DEFAULT_STREAM)


# ---- rows of fixed width and without nulls, column by column ---------------------------------
#
# libcudf's contiguous split takes about a millisecond for each piece, however small it is. Plain copies take
# microseconds, and need no unpacking.

#: The first row, and the end, exclusive.
RowRange = tuple[int, int]


@dataclass(frozen=True)
class CudfLayout:
    """Describe columns that are stored one after the other in a buffer.

    ``types``: the type id, the scale, and the bytes per row of each column.
    ``schema``: the pickled :class:`_Schema`.
    """

    types: tuple[tuple[int, int, int], ...]
    schema: bytes

    @classmethod
    def of(cls, table: plc.Table, schema: bytes) -> CudfLayout | None:
        """Return the layout of a table; None if a column has nulls, or is not of fixed width."""
        columns = table.columns()
        if not columns or not all(
            plc.traits.is_fixed_width(c.type()) and not c.null_count() for c in columns
        ):
            return None
        kinds = [column.type() for column in columns]
        return cls(tuple((int(kind.id()), kind.scale(), plc.types.size_of(kind)) for kind in kinds), schema)

    def starts(self, rows: int) -> list[int]:
        """Return the offset of each column in a buffer of this many rows, followed by the end of the last."""
        sizes = (-(-rows * size // ALIGNMENT) * ALIGNMENT for _, _, size in self.types)
        return list(accumulate(sizes, initial=0))

    def view(self, buffer: Buffer, rows: int) -> plc.Table:
        """Return a view of the columns in a buffer."""
        base = address(buffer)
        return plc.Table(
            [
                plc.Column(kind, rows, DeviceSpan(base + start, rows * size, buffer), None, 0, 0, [])
                for (kind, size), start in zip(self._kinds(), self.starts(rows), strict=False)
            ]
        )

    def read(self, parts: Sequence[Part], device: CudaDevice) -> plc.Table:
        """Concatenate parts into new memory, in the order of the user's stream."""
        rows = sum(part.offsets[part.index + 1] - part.offsets[part.index] for part in parts)
        kinds = list(self._kinds())
        buffers = [rmm.DeviceBuffer(size=rows * size, stream=DEFAULT_STREAM) for _, size in kinds]
        copies: list[Copy] = []
        end = 0
        for part in parts:
            start, stop = part.offsets[part.index : part.index + 2]
            begin, end = end, end + stop - start
            sources = self.starts(part.offsets[-1])
            for (_, size), buffer, source in zip(kinds, buffers, sources, strict=False):
                at = part.buffer.ptr + source + start * size
                copies.append(Copy(buffer.ptr + begin * size, at, size * (stop - start)))
        device.copy_in_order(copies)
        return plc.Table(
            [
                plc.Column.from_rmm_buffer(buffer, kind, rows, [])
                for buffer, (kind, _) in zip(buffers, kinds, strict=True)
            ]
        )

    def _kinds(self) -> Iterator[tuple[plc.DataType, int]]:
        for kind, scale, size in self.types:
            yield plc.DataType(plc.TypeId(kind), scale), size


@dataclass(frozen=True)
class PlainRows:
    """Refer to ranges of rows of a table with a :class:`CudfLayout`; ``header`` is the pickled layout."""

    table: plc.Table
    layout: CudfLayout
    header: bytes
    spans: tuple[RowRange, ...]

    @classmethod
    def of(cls, table: plc.Table, layout: CudfLayout, header: bytes, spans: Sequence[RowRange]) -> PlainRows:
        """Refer to the rows in spans; adjacent spans are merged."""
        joined: list[RowRange] = []
        for start, stop in spans:
            if joined and joined[-1][1] == start:
                joined[-1] = joined[-1][0], stop
            else:
                joined.append((start, stop))
        return cls(table, layout, header, tuple(joined))

    def between(self, start: int, stop: int) -> PlainRows:
        """Return a range of these rows."""
        ends = accumulate((b - a for a, b in self.spans), initial=0)
        cut = [
            (first + max(start - before, 0), last - max(after - stop, 0))
            for (first, last), (before, after) in zip(self.spans, pairwise(ends), strict=True)
        ]
        return PlainRows(self.table, self.layout, self.header, tuple((a, b) for a, b in cut if a < b))

    def copies(self, ptr: int) -> Iterator[Copy]:
        """Yield the copies that write the rows to a buffer at ``ptr``."""
        rows = sum(stop - start for start, stop in self.spans)
        starts = self.layout.starts(rows)
        for column, (_, _, size), into in zip(self.table.columns(), self.layout.types, starts, strict=False):
            base = column.data().ptr + column.offset() * size
            for first, last in self.spans:
                yield Copy(ptr + into, base + first * size, (last - first) * size)
                into += (last - first) * size


def partitions_by_value(keys: cudf.DataFrame, npartitions: int) -> cudf.Series:
    """Return the output partition of each row, as the function of this name in ``frames.key_values``."""
    comparable = {at: _comparable(keys.iloc[:, at]) for at in range(keys.shape[1])}
    return type(keys)(comparable).hash_values() % npartitions


def _comparable(values: cudf.Series) -> cudf.Series:
    """Return values of a dtype by which equal ones have equal hashes."""
    if str(values.dtype) == "category":
        values = values.astype(values.cat.categories.dtype)
    if isinstance(values.dtype, pd.DatetimeTZDtype):
        values = values.dt.tz_convert(None)
    if (unit := unit_of(values.dtype)) is not None:
        return values.astype("int64") * NANOSECONDS[unit]
    is_text = str(values.dtype) in ("object", "str", "string")
    return values if is_text else values.astype("float64") + 0.0
