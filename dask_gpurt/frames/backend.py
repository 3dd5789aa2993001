"""Define the interface between the runtime and a dataframe library.

A backend splits a partition into pieces, one for each owner, packs each piece into one buffer, and assembles
output partitions from such buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from dask_gpurt.device import Block, Device
from dask_gpurt.device.pool import Buffer

Frame = Any


@dataclass(frozen=True)
class Piece:
    """Hold the rows of one input partition for one owner, ordered by output partition.

    Attributes
    ----------
    rows
        The rows, in the backend's representation.
    partitions
        The output partitions in it.
    offsets
        The row at which each output partition starts, followed by the number of rows.
    """

    rows: Any
    partitions: tuple[int, ...]
    offsets: tuple[int, ...]

    def __len__(self) -> int:
        return self.offsets[-1]

    def halves(self, cut: Callable[[Any, int, int], Any]) -> tuple[Piece, Piece]:
        """Split the piece into two halves, where ``cut(rows, start, stop)`` selects rows."""
        middle, end = len(self) // 2, len(self)
        first = tuple(min(offset, middle) for offset in self.offsets)
        second = tuple(max(offset - middle, 0) for offset in self.offsets)
        return (
            Piece(cut(self.rows, 0, middle), self.partitions, first),
            Piece(cut(self.rows, middle, end), self.partitions, second),
        )


@dataclass(frozen=True)
class Hashed:
    """Hold a partition to be split by the hash of some columns.

    The hash is Dask's, so that each row goes to the same output partition as with ``tasks``. A backend may
    compute it while splitting; ``assign`` makes Dask compute it, as a column.

    Attributes
    ----------
    frame
        The partition.
    by
        The columns to hash; None if the index is hashed, alone or in addition.
    keys
        The frame with these columns, which ``frame`` need not have.
    like
        The frame whose dtypes determine which columns are cast before hashing.
    assign
        Converts rows of ``keys`` to those of ``frame``, with an added column of output partitions.
    """

    frame: Frame
    by: tuple[str, ...] | None
    keys: Frame
    like: Frame
    assign: Callable[[Frame], Frame]

    def assigned(self) -> Frame:
        """Return ``frame`` with an added column of output partitions."""
        return self.assign(self.keys)

    def between(self, start: int, stop: int) -> Hashed:
        """Return a range of the rows."""
        return replace(self, frame=self.frame.iloc[start:stop], keys=self.keys.iloc[start:stop])


@dataclass(frozen=True)
class Ranged:
    """Hold a partition to be split by ranges of one column, as Dask does to sort.

    Attributes
    ----------
    frame
        The partition.
    by
        The column.
    divisions
        A series of the starts of the ranges, in ascending order, followed by the end of the last one.
    assign
        Makes Dask add a column of output partitions to rows of ``frame``.
    """

    frame: Frame
    by: Any
    divisions: Any
    assign: Callable[[Frame], Frame]

    def assigned(self) -> Frame:
        """Return ``frame`` with an added column of output partitions."""
        return self.assign(self.frame)

    def between(self, start: int, stop: int) -> Ranged:
        """Return a range of the rows."""
        return replace(self, frame=self.frame.iloc[start:stop])


#: A partition without a column of output partitions.
Routed = Hashed | Ranged


def halves(frame: Frame | Routed) -> Sequence[Frame | Routed]:
    """Return the two halves of a partition, as views; empty if it has fewer than two rows."""
    rows = len(frame.frame if isinstance(frame, Routed) else frame)
    if rows < 2:
        return ()
    between = frame.between if isinstance(frame, Routed) else lambda a, b: frame.iloc[a:b]
    return between(0, rows // 2), between(rows // 2, rows)


@dataclass(frozen=True)
class Packed:
    """Describe a packed piece: its block in a pool, and the header needed to read it."""

    block: Block
    header: bytes


@dataclass(frozen=True)
class Part:
    """Describe the rows of one output partition in one packed piece.

    Attributes
    ----------
    header, buffer
        The header and the buffer of the packed piece.
    offsets, index
        The rows at which the output partitions of the piece start, and the index of this one.
    memo
        Lives as long as the buffer; a backend may cache derived data in it.
    """

    header: bytes
    buffer: Buffer
    offsets: tuple[int, ...]
    index: int
    memo: dict[str, Any]


class BlockAllocator(Protocol):
    """Allocate blocks to pack pieces into."""

    def allocate(self, nbytes: int) -> Block:
        """Allocate a block; raise PoolFull if there is no room."""

    def give_back(self, block: Block) -> None:
        """Free a block that was not used."""


@contextmanager
def giving_back(block: Block, allocator: BlockAllocator) -> Iterator[None]:
    """Free a block if the body raises."""
    try:
        yield
    except BaseException:
        allocator.give_back(block)
        raise


class Packer(Protocol):
    """Pack pieces on a device."""

    name: str

    @property
    def device(self) -> Device: ...

    def cut(self, rows: Any, start: int, stop: int) -> Any:
        """Return a range of ``Piece.rows``."""

    def pack(self, piece: Piece, allocator: BlockAllocator) -> Packed:
        """Write a piece to one block; complete after the next :meth:`settle`.

        Raises
        ------
        PoolFull
            If ``allocator`` has no block of the size.
        """

    def settle(self) -> None:
        """Block until everything that this thread has packed can be read by peers."""

    def fence(self) -> Callable[[], None] | None:
        """Return the fence of all reads of the outputs assembled so far; None if they are complete."""


class Table(Packer, Protocol):
    """Split, pack and assemble the frames of a dataframe library on a device."""

    def split(
        self,
        frame: Frame | Routed,
        column: str,
        groups: Sequence[Sequence[int]],
        npartitions: int,
        *,
        drop_column: bool,
        ignore_index: bool,
        in_order: bool = False,
    ) -> list[Piece | None]:
        """Split ``frame`` into a piece for each group of output partitions.

        Parameters
        ----------
        column
            Holds the output partition of each row, from 0 to ``npartitions - 1``. It is added to the frame
            of a :class:`Hashed` or a :class:`Ranged`.
        groups
            The output partitions of each owner. Rows of partitions in no group are dropped.
        drop_column, ignore_index
            Whether to drop ``column`` and the index.
        in_order
            Whether the rows of an output partition have to keep their order.

        Returns
        -------
        list
            A piece for each group; None for groups without rows.
        """

    def assemble(self, parts: Sequence[Part], meta: Frame, *, ignore_index: bool) -> Frame:
        """Concatenate parts; without parts, return a copy of ``meta``.

        The result shares no memory with the buffers. They may be read until the next :meth:`fence` has
        passed.
        """
