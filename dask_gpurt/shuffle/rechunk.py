"""Describe a rechunk of an array: the old chunks are the inputs of a run, the new chunks its outputs."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from dask_gpurt.dask_hooks.shuffle import ArrayRechunkSpec, old_to_new
from dask_gpurt.frames import ChunkTable, Packer, Part, Piece, array_library
from dask_gpurt.frames.boxes import Chunks, Grid, Plan
from dask_gpurt.frames.chunks import MAX_BOX_BYTES, opened
from dask_gpurt.observe import Metrics
from dask_gpurt.shuffle.spec import RunSpec

if TYPE_CHECKING:
    from dask_gpurt.exchange.exchange import Exchange

#: A small pool has room for at least as many boxes, so that producers do not wait for all of it to be read.
BOXES_IN_POOL = 4


@dataclass(frozen=True)
class RechunkSpec(RunSpec):
    """Describe a rechunk of an array, or of an independent part of it.

    ``old``, ``new``: the sizes of the chunks along each axis.
    """

    old: Chunks
    new: Chunks

    @classmethod
    def of(cls, spec: ArrayRechunkSpec) -> RechunkSpec:
        """Convert a spec of Dask's p2p rechunk."""
        return cls(id=spec.id, disk=False, npartitions=len(Grid.of(spec.new)), old=spec.old, new=spec.new)

    @property
    def ninputs(self) -> int:
        return len(Grid.of(self.old))

    @property
    def output_partitions(self) -> Generator[int, None, None]:
        yield from range(self.npartitions)

    @property
    def smallest(self) -> str:
        return f"a part of a chunk of rechunk {self.id}"

    def source_of(self, input_id: Any) -> int:
        return Grid.of(self.old).number(input_id)

    def output_of(self, output_id: Any) -> int:
        return Grid.of(self.new).number(output_id)

    def input(self, data: Any, source: int, exchange: Exchange) -> ChunkInput:
        self._validate(data, source)
        table = exchange.chunk_table(array_library(data))
        most = min(MAX_BOX_BYTES, exchange.pool_bytes(table.device.kind) // BOXES_IN_POOL)
        return ChunkInput(table, data, source, _plan(self.old, self.new), most)

    def _validate(self, chunk: Any, source: int) -> None:
        """Reject a chunk whose shape differs from that in the array's chunks."""
        index = Grid.of(self.old).index(source)
        known = tuple(axis[at] for axis, at in zip(self.old, index, strict=True))
        # Unknown sizes are NaN, which is not equal to itself.
        if len(chunk.shape) != len(known) or any(
            size != length and size == size for size, length in zip(known, chunk.shape, strict=True)
        ):
            raise ValueError(
                f"chunk {index} of rechunk {self.id} has the shape {chunk.shape}, expected {known}"
            )

    def assembler(self, exchange: Exchange) -> ChunkAssembler:
        return ChunkAssembler(exchange)


@lru_cache(16)
def _plan(old: Chunks, new: Chunks) -> Plan:
    """Return the plan of a rechunk, cached, since it is the same for all inputs and may be large."""
    return Plan(Grid.of(old), Grid.of(new), old_to_new(old, new))


@dataclass(frozen=True)
class ChunkInput:
    """Split an old chunk of a rechunk, into boxes of at most ``most`` bytes."""

    packer: ChunkTable
    data: Any
    source: int
    plan: Plan
    most: int

    def count(self, metrics: Metrics) -> None:
        metrics.add("shuffle.elements", math.prod(self.data.shape))

    def split(self, groups: Sequence[Sequence[int]]) -> list[Piece | None]:
        boxes = self.plan.boxes(self.source, self.data.shape)
        return self.packer.split(self.data, boxes, groups, most=self.most)

    def halves(self) -> Sequence[ChunkInput]:
        return ()  # boxes are views of the chunk: splitting hardly takes memory

    def empty(self) -> None:
        return None


@dataclass(frozen=True)
class ChunkAssembler:
    """Assemble the new chunks of a rechunk."""

    exchange: Exchange

    def assemble(self, parts: Sequence[Part], empty: bytes | None) -> tuple[Any, Packer]:
        """Assemble a new chunk from the boxes of its parts."""
        libraries = {opened(part)[0].library for part in parts}
        if len(libraries) > 1:
            raise TypeError(f"the chunks of an array are of different libraries: {sorted(libraries)}")
        table = self.exchange.chunk_table(libraries.pop())
        return table.assemble(parts), table
