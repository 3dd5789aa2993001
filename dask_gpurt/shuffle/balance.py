"""Balance the outputs of a run across workers, once the sizes of all its inputs are known. Pure.

When a run starts, the sizes of its outputs are unknown, and all workers own equally many. At the end of each
transfer, the worker reports the bytes of the heaviest outputs in that input. Once all inputs have been
reported, :class:`RunSizes` has the bytes of each output, and :func:`balanced` moves outputs away from workers
that would get too many bytes, to workers with free memory.

Moving an output costs messages, and shards that are read again. Evenly sized outputs are therefore never
moved, and of uneven ones as few as possible. Speeds of workers and of links do not count
(docs/decisions/shuffle.md, "Outputs that move for balance").
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from dask_gpurt.exchange.shard import Section

#: The most outputs whose bytes a transfer reports, and the least multiple of the mean that is reported.
MAX_HEAVY, HEAVY = 32, 1.25
#: Outputs move only if the heaviest load shrinks by this factor, and by this many bytes of one thread.
MIN_GAIN, MIN_GAIN_BYTES = 1.2, 2**20
#: Factor by which the heaviest load may exceed the best possible one, for fewer moves.
SLACK = 1.03


# ---- bytes of outputs ----------------------------------------------------------------------------------


class InputSizes(NamedTuple):
    """Report the sizes of outputs in one input.

    ``nbytes``: packed bytes of all outputs.
    ``heavy``: bytes of the outputs far above the mean, at most :data:`MAX_HEAVY` of them.
    ``whole``: whether the worker still has all blocks that it published in the run, and could offer them
    again.
    """

    nbytes: int
    heavy: Mapping[int, int]
    whole: bool

    @classmethod
    def of(cls, sections: Iterable[Section], outputs: int, *, whole: bool = True) -> InputSizes:
        """Compute the sizes from the packed sections of an input.

        ``sections``: all sections of the input. Rows of the same section count as equally large.
        ``outputs``: the number of outputs that the input was split for.
        """
        total, found = 0, Counter[int]()
        for section in sections:
            total += int(section.nbytes)
            per_row = section.nbytes / max(1, section.offsets[-1])
            for output, (start, stop) in zip(section.partitions, pairwise(section.offsets), strict=True):
                found[output] += int((stop - start) * per_row)
        least = HEAVY * total / max(1, outputs)
        heavy = {output: nbytes for output, nbytes in found.most_common(MAX_HEAVY) if nbytes > least}
        return cls(total, heavy, whole)


class RunSizes:
    """Collect the sizes that the transfers of a run report."""

    def __init__(self, run: int, outputs: Collection[int], inputs: int):
        self.run = run
        self._outputs = sorted(outputs)
        self._inputs = inputs
        self._reported: dict[int, InputSizes] = {}

    def add(self, source: int, sizes: InputSizes) -> None:
        """Add the report of an input, replacing an earlier one: the input may be transferred again."""
        self._reported[source] = sizes

    @property
    def is_complete(self) -> bool:
        """Return whether all inputs have been reported."""
        return len(self._reported) == self._inputs

    @property
    def whole(self) -> bool:
        """Return whether every published shard can still be offered to other workers."""
        return all(sizes.whole for sizes in self._reported.values())

    def nbytes(self) -> dict[int, float]:
        """Return the bytes of each output.

        An output that an input does not report counts as the mean of that input's unreported outputs.
        """
        even, beyond = 0.0, defaultdict[int, float](float)
        for sizes in self._reported.values():
            unreported = max(1, len(self._outputs) - len(sizes.heavy))
            rest = max(0.0, sizes.nbytes - sum(sizes.heavy.values())) / unreported
            even += rest
            for output, size in sizes.heavy.items():
                beyond[output] += size - rest
        return {output: even + beyond.get(output, 0.0) for output in self._outputs}


# ---- owners --------------------------------------------------------------------------------------------


class OwnerCapacity(NamedTuple):
    """Describe the capacity of a worker.

    ``threads``: the number of outputs assembled in parallel.
    ``room``: the most bytes that it can take in addition to its present outputs.
    """

    worker: str
    threads: float = 1.0
    room: float = float("inf")


class Moves(NamedTuple):
    """Assign new owners to outputs.

    ``before``, ``after``: the heaviest load without and with the moves, in bytes of one thread.
    """

    to: dict[int, str]
    before: float = 0.0
    after: float = 0.0


def balanced(
    nbytes: Mapping[int, float], owners: Mapping[int, str], capacities: Iterable[OwnerCapacity]
) -> Moves:
    """Return few moves of outputs that make the heaviest load lighter; none unless the gain is large enough.

    ``nbytes``: bytes of each output, summed over both sides of a join.
    ``capacities``: the capacities of all owners, and of other workers that may become owners.
    """
    loads = {worker: _Load(worker, threads, room) for worker, threads, room in capacities}
    for output in sorted(owners, key=lambda output: -nbytes.get(output, 0.0)):
        loads[owners[output]].outputs[output] = nbytes.get(output, 0.0)
    before, best = _heaviest(loads.values()), _lower_bound(loads.values())
    if not _pays(before, best):
        return Moves({}, before, before)
    bound, to = best * SLACK, dict[int, str]()
    takers = [load for load in loads.values() if load.per_thread() <= bound]
    late = [load for load in loads.values() if load.per_thread() > bound]
    for load in sorted(late, key=lambda load: (-load.per_thread(), load.worker)):
        to |= _relieve(load, bound, takers)
    after = _heaviest(loads.values())
    return Moves(to if _pays(before, after) else {}, before, after)


def _pays(before: float, after: float) -> bool:
    return before >= MIN_GAIN * after and before - after >= MIN_GAIN_BYTES


@dataclass(eq=False)
class _Load:
    """Hold the bytes of the outputs of one worker, heaviest first, and what it can still take."""

    worker: str
    threads: float
    room: float
    outputs: dict[int, float] = field(default_factory=dict)

    @property
    def nbytes(self) -> float:
        """Return the bytes of all outputs."""
        return sum(self.outputs.values())

    def per_thread(self, more: float = 0.0) -> float:
        """Return the bytes of the busiest thread, with one more output; one assembles the heaviest output."""
        return max((self.nbytes + more) / self.threads, more, *self.outputs.values())


def _heaviest(loads: Iterable[_Load]) -> float:
    return max(load.per_thread() for load in loads)


def _lower_bound(loads: Collection[_Load]) -> float:
    """Return the least possible load of the busiest thread, if all but the heaviest output were divisible."""
    even = sum(load.nbytes for load in loads) / sum(load.threads for load in loads)
    return max(even, *(size for load in loads for size in load.outputs.values()))


def _relieve(load: _Load, bound: float, takers: Collection[_Load]) -> dict[int, str]:
    """Move the heaviest outputs that fit into the excess over ``bound``, then one that covers the rest."""
    to = dict[int, str]()

    def excess() -> float:
        return load.nbytes - bound * load.threads

    def give(output: int) -> bool:
        """Give an output to the lightest worker with room, unless that would become the heavier one."""
        size = load.outputs[output]
        able = [taker for taker in takers if taker.room >= size]
        lightest = min(able, key=lambda taker: (taker.per_thread(), taker.worker), default=None)
        if lightest is None or lightest.per_thread(size) >= load.per_thread():
            return False
        lightest.outputs[output] = load.outputs.pop(output)
        lightest.room -= size
        to[output] = lightest.worker
        return True

    for output, size in list(load.outputs.items()):
        if 0 < size <= excess():
            give(output)
    for output, size in reversed(list(load.outputs.items())):
        if 0 < excess() <= size and give(output):
            break
    return to
