"""Balance the outputs of a run across workers, once the sizes of split inputs are known. Pure.

When a run starts, the sizes of its outputs are unknown, and all workers own equally many. At the end of each
transfer, the worker reports the bytes of the heaviest outputs in that input, and how long the transfer took.
From these reports, :class:`OutputBytes` estimates the bytes of each output, and :func:`balanced` chooses new
owners, so that all workers finish at about the same time.

Moving an output costs messages, and shards that are read again. Evenly sized outputs are therefore never
moved, and of uneven ones as few as possible.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from dask_gpurt.exchange.shard import Section

#: The most outputs whose bytes a transfer reports, and the least multiple of the mean that is reported.
MAX_HEAVY, HEAVY = 32, 1.25
#: Deviations up to this many standard errors count as chance.
CHANCE_ERRORS = 2.0
#: Transfers that the speed of a worker is estimated from: the most, the fewest that have to be of the run in
#: question, and the least total of their usual durations in seconds.
SPEED_WINDOW_TRANSFERS, MIN_TRANSFERS, MIN_USUAL_S = 32, 3, 0.02
#: Limits of the slowdown factor of a worker.
FASTEST, SLOWEST = 0.25, 10.0
#: Outputs move only if the makespan shrinks by this factor, and by this many bytes of one thread.
MIN_GAIN, MIN_GAIN_BYTES = 1.2, 2**20
#: Factor by which the makespan may exceed the best one found, for fewer moves.
SLACK = 1.03
#: Bisection steps in the search for the best makespan.
SEARCH_STEPS = 12


# ---- bytes of outputs ----------------------------------------------------------------------------------


class InputSizes(NamedTuple):
    """Report the sizes of outputs in one input.

    Attributes
    ----------
    nbytes
        Packed bytes of all outputs.
    heavy
        Bytes of the outputs far above the mean, at most :data:`MAX_HEAVY` of them.
    seconds
        Time to split and pack the input, excluding waits for room, in seconds.
    whole
        Whether the worker still has all blocks that it published in the run, and could offer them again.
    arriving
        Measured rate at which the worker receives from other hosts during the run, in bytes per second;
        0 if unknown.
    """

    nbytes: int
    heavy: Mapping[int, int]
    seconds: float
    whole: bool
    arriving: float = 0.0

    @classmethod
    def of(
        cls,
        sections: Iterable[Section],
        outputs: int,
        *,
        seconds: float = 0.0,
        whole: bool = True,
        arriving: float = 0.0,
    ) -> InputSizes:
        """Compute the sizes from the packed sections of an input.

        Parameters
        ----------
        sections
            All sections of the input. Rows of the same section count as equally large.
        outputs
            The number of outputs that the input was split for.
        """
        total, found = 0, Counter[int]()
        for section in sections:
            total += int(section.nbytes)
            per_row = section.nbytes / max(1, section.offsets[-1])
            for output, (start, stop) in zip(section.partitions, pairwise(section.offsets), strict=True):
                found[output] += int((stop - start) * per_row)
        least = HEAVY * total / max(1, outputs)
        heavy = {output: nbytes for output, nbytes in found.most_common(MAX_HEAVY) if nbytes > least}
        return cls(total, heavy, seconds, whole, arriving)


@dataclass
class _Sums:
    """Sum the bytes x of an output over the inputs that report it: x, x², and x times the input's bytes."""

    x: float = 0.0
    squares: float = 0.0
    products: float = 0.0

    def add(self, x: float, nbytes: float) -> None:
        self.x += x
        self.squares += x * x
        self.products += x * nbytes


class OutputBytes:
    """Estimate the bytes of each output from the inputs split so far.

    An output that is heavy in all reported inputs will be heavy in the remaining ones. If each input has
    different heavy outputs, as in sorted data, nothing is known about those of the remaining inputs.
    Therefore only the part of an output beyond the confidence margin is attributed to it; the rest is spread
    evenly. Once all inputs have been reported, the margin is zero.

    Parameters
    ----------
    outputs
        The outputs received in the run.
    inputs
        The total number of inputs.
    """

    def __init__(self, outputs: Collection[int], inputs: int):
        self._outputs = sorted(outputs)
        self._inputs = inputs
        self._reported: dict[int, InputSizes] = {}

    def __len__(self) -> int:
        return len(self._reported)

    def add(self, source: int, sizes: InputSizes) -> None:
        """Add the report of an input, replacing an earlier one: the input may be transferred again."""
        self._reported[source] = sizes

    def estimate(self) -> dict[int, float]:
        """Return the estimated bytes of each output over all inputs, reported or not."""
        nbytes = sum(sizes.nbytes for sizes in self._reported.values())
        if not nbytes:
            return dict.fromkeys(self._outputs, 0.0)
        shares = self._shares(nbytes)
        certain = {
            output: max(0.0, share - CHANCE_ERRORS * error) for output, (share, error) in shares.items()
        }
        known = sum(share for share, _ in shares.values())
        by_chance = (known - sum(certain.values())) / len(self._outputs)
        others = max(0.0, 1 - known) / max(1, len(self._outputs) - len(shares))
        scale = nbytes * self._inputs / len(self._reported)
        return {output: scale * (certain.get(output, others) + by_chance) for output in self._outputs}

    def _shares(self, nbytes: float) -> dict[int, tuple[float, float]]:
        """Return the share of all bytes of each reported output, with its standard error."""
        # An output that an input does not report counts as the mean of that input's unreported outputs. These
        # means are summed first, as if nothing were reported, and then corrected for each reported output.
        mean, reported = _Sums(), defaultdict[int, _Sums](_Sums)
        for sizes in self._reported.values():
            unreported = max(1, len(self._outputs) - len(sizes.heavy))
            rest = max(0.0, sizes.nbytes - sum(sizes.heavy.values())) / unreported
            mean.add(rest, sizes.nbytes)
            for output, x in sizes.heavy.items():
                sums = reported[output]
                sums.x += x - rest
                sums.squares += x * x - rest * rest
                sums.products += (x - rest) * sizes.nbytes
        number, squares = len(self._reported), sum(sizes.nbytes**2 for sizes in self._reported.values())
        unseen = max(0.0, 1 - number / self._inputs)
        shares = {}
        for output, sums in reported.items():
            share = (mean.x + sums.x) / nbytes
            # Standard error of a ratio estimate, with the finite population correction.
            residual = (
                mean.squares + sums.squares - 2 * share * (mean.products + sums.products) + share**2 * squares
            )
            variance = max(0.0, residual) / (number * (number - 1)) if number > 1 else math.inf
            error = math.sqrt(variance * unseen) / (nbytes / number) if unseen else 0.0
            shares[output] = share, error
        return shares


# ---- speeds of workers ---------------------------------------------------------------------------------


class _ComparedTransfer(NamedTuple):
    """Record the duration of a transfer of a run, and the usual duration of such transfers, in seconds."""

    run: int
    seconds: float
    usual: float


class WorkerSpeeds:
    """Estimate the speed of workers' threads, relative to the usual, from the durations of transfers.

    Single transfers are too noisy: a worker that is paused and resumed many times a second looks either fast
    or stopped in each of them. So their sums are compared, and only a difference beyond the confidence margin
    counts. Otherwise outputs would move to whichever of equal workers was luckier.

    Transfers of earlier runs narrow the margin, but count only if the current run agrees: a worker that was
    slow before may be fast now, and vice versa.
    """

    def __init__(self) -> None:
        self._workers: dict[str, deque[_ComparedTransfer]] = {}

    def observe(self, worker: str, seconds: float, usual: float, run: int) -> None:
        """Add a transfer that took ``seconds``, where such transfers usually take ``usual``."""
        if usual > 0:
            known = self._workers.setdefault(worker, deque(maxlen=SPEED_WINDOW_TRANSFERS))
            known.append(_ComparedTransfer(run, seconds, usual))

    def of(self, worker: str, runs: Collection[int]) -> float:
        """Return the speed of a worker measured in ``runs``: below 1 is slow; 1 with too few transfers."""
        known = self._workers.get(worker, ())
        own = [transfer for transfer in known if transfer.run in runs]
        if len(own) < MIN_TRANSFERS:
            return 1.0
        # The speed may have changed since the earlier runs. They count only as far as the given runs show the
        # same; what the given runs show beyond chance counts regardless.
        shown, before = _excess(own), _beyond_chance(known)
        confirmed = min(before, shown, key=abs) if before * shown > 0 else 0.0
        excess = max(confirmed, _beyond_chance(own), key=abs)
        return 1 / min(max(1 + excess, FASTEST), SLOWEST)

    def on_worker_removed(self, worker: str) -> None:
        """Forget a worker."""
        self._workers.pop(worker, None)


def _excess(transfers: Collection[_ComparedTransfer]) -> float:
    """Return by how much the total duration of transfers exceeds the usual, as a fraction of the usual."""
    usual = sum(transfer.usual for transfer in transfers)
    return sum(transfer.seconds for transfer in transfers) / usual - 1 if usual else 0.0


def _beyond_chance(transfers: Collection[_ComparedTransfer]) -> float:
    """Return the excess with the smallest magnitude within the confidence interval."""
    number, usual = len(transfers), sum(transfer.usual for transfer in transfers)
    if usual < MIN_USUAL_S:
        return 0.0
    excess = _excess(transfers)
    residual = sum((transfer.seconds - (1 + excess) * transfer.usual) ** 2 for transfer in transfers)
    error = math.sqrt(residual * number / (number - 1)) / usual
    return math.copysign(max(0.0, abs(excess) - CHANCE_ERRORS * error), excess)


# ---- owners --------------------------------------------------------------------------------------------


class OwnerCapacity(NamedTuple):
    """Describe the capacity of a worker.

    Attributes
    ----------
    worker
        The address.
    threads
        The number of outputs assembled in parallel.
    speed
        The speed of one thread, relative to the usual.
    room
        Bytes of outputs that the worker may receive in addition to its own.
    """

    worker: str
    threads: float = 1.0
    speed: float = 1.0
    room: float = math.inf


class Moves(NamedTuple):
    """Assign new owners to outputs.

    Attributes
    ----------
    to
        The new owner of each output that moves.
    before, after
        The makespan without and with the moves, in bytes of one thread.
    """

    to: dict[int, str]
    before: float = 0.0
    after: float = 0.0


def balanced(
    nbytes: Mapping[int, float],
    owners: Mapping[int, str],
    capacities: Iterable[OwnerCapacity],
    *,
    gain: float = MIN_GAIN,
    least: float = MIN_GAIN_BYTES,
) -> Moves:
    """Return few moves of outputs that reduce the makespan; none unless the gain is large enough.

    Parameters
    ----------
    nbytes
        Bytes of each output, summed over both sides of a join.
    owners
        The owner of each output.
    capacities
        The capacities of all owners, and of other workers that may become owners.
    gain, least
        The least reduction of the makespan, as a factor and in bytes of one thread.
    """
    state = _Loads(nbytes, owners, capacities)
    before, low = state.end(), state.lower_bound()
    if before < gain * low or before - low < least:
        return Moves({})
    bound, moves = _earliest(low, before, state.moves_within)
    fewer = state.moves_within(bound * SLACK)
    if fewer is not None and len(fewer) < len(moves):
        moves = fewer
    moves = state.spread(moves)
    after = _Loads(nbytes, {**owners, **moves}, capacities).end()
    if before < gain * after or before - after < least:
        return Moves({})
    return Moves(moves, before, after)


def _earliest(
    low: float, high: float, moves_within: Callable[[float], dict[int, str] | None]
) -> tuple[float, dict[int, str]]:
    """Bisect for the earliest end for which moves are found; return it and the moves, which may be none."""
    found = dict[int, str]()
    for _ in range(SEARCH_STEPS):
        middle = (low + high) / 2
        moves = moves_within(middle)
        if moves is None:
            low = middle
        else:
            high, found = middle, moves
    return high, found


@dataclass
class _Load:
    """Hold the outputs of one worker, heaviest first; ties in descending order, so that neighbours move."""

    capacity: OwnerCapacity
    outputs: list[tuple[float, int]] = field(default_factory=list)
    nbytes: float = 0.0

    @property
    def rate(self) -> float:
        return self.capacity.threads * self.capacity.speed

    @property
    def end(self) -> float:
        """Return when the worker finishes; its heaviest output, assembled by one thread, is a lower bound."""
        heaviest = self.outputs[0][0] if self.outputs else 0.0
        return max(self.nbytes / self.rate, heaviest / self.capacity.speed)

    def without(self, outputs: Collection[int]) -> _Load:
        """Return the load without some outputs."""
        kept = [(size, output) for size, output in self.outputs if output not in outputs]
        return _Load(self.capacity, kept, sum(size for size, _ in kept))


class _Loads:
    """Hold the outputs of all workers."""

    def __init__(
        self, nbytes: Mapping[int, float], owners: Mapping[int, str], capacities: Iterable[OwnerCapacity]
    ):
        self._nbytes, self._owners = nbytes, owners
        self._workers = {capacity.worker: _Load(capacity) for capacity in capacities}
        for output, owner in owners.items():
            self._workers[owner].outputs.append((nbytes.get(output, 0.0), output))
        for load in self._workers.values():
            load.outputs.sort(reverse=True)
            load.nbytes = sum(size for size, _ in load.outputs)

    def end(self) -> float:
        """Return the makespan: when the last worker finishes."""
        return max(load.end for load in self._workers.values())

    def lower_bound(self) -> float:
        """Return a lower bound of the makespan, as if outputs were divisible."""
        workers = self._workers.values()
        heaviest = max((load.outputs[0][0] for load in workers if load.outputs), default=0.0)
        fastest = max(load.capacity.speed for load in workers)
        return max(
            sum(load.nbytes for load in workers) / sum(load.rate for load in workers), heaviest / fastest
        )

    def moves_within(self, bound: float) -> dict[int, str] | None:
        """Return moves with which all workers finish by ``bound``; None if none are found."""
        late = [load for load in self._workers.values() if load.end > bound]
        takers = _Takers([load for load in self._workers.values() if load.end <= bound], bound)
        moves: dict[int, str] = {}
        for load in sorted(late, key=lambda load: (-load.end, load.capacity.worker)):
            if not _shed(load, bound, takers, moves):
                return None
        return moves

    def spread(self, moves: Mapping[int, str]) -> dict[int, str]:
        """Reassign the moved outputs so that their new owners finish as early as possible.

        Moves of outputs that may as well stay are left out.
        """
        kept = [load.without(moves) for load in self._workers.values()]
        moved = sorted(((self._nbytes.get(output, 0.0), output) for output in moves), reverse=True)

        def within(bound: float) -> dict[int, str] | None:
            takers = _Takers([load for load in kept if load.end <= bound], bound)
            given = {output: takers.take(size) for size, output in moved}
            found = {output: worker for output, worker in given.items() if worker is not None}
            return found if len(found) == len(moved) else None

        latest = max((load.end for load in self._workers.values()), default=0.0)
        found = _earliest(0.0, latest, within)[1] or moves
        return {output: worker for output, worker in found.items() if worker != self._owners[output]}


def _shed(load: _Load, bound: float, takers: _Takers, moves: dict[int, str]) -> bool:
    """Move outputs off a worker until it finishes in time; return False if the takers have no room."""
    excess = load.nbytes - bound * load.rate
    kept = list[tuple[float, int]]()
    for at, (size, output) in enumerate(load.outputs):
        too_heavy = size > bound * load.capacity.speed
        if not size or (excess <= 0 and not too_heavy):
            kept += load.outputs[at:]
            break
        if (too_heavy or size <= excess) and (taker := takers.take(size)) is not None:
            moves[output] = taker
            excess -= size
        elif too_heavy:
            return False
        else:
            kept.append((size, output))
    if excess <= bound * load.rate * 1e-9:
        return True
    for size, output in reversed(kept):  # the lightest output that suffices
        if size >= excess and (taker := takers.take(size)) is not None:
            moves[output] = taker
            return True
    return False


class _Takers:
    """Assign outputs to workers that finish early, up to the capacity of each."""

    def __init__(self, loads: Sequence[_Load], bound: float):
        self._bound = bound
        self._speeds = {load.capacity.worker: load.capacity.speed for load in loads}
        self._left = {
            load.capacity.worker: min(bound * load.rate - load.nbytes, load.capacity.room) for load in loads
        }
        self._by_room = [(-left, worker) for worker, left in self._left.items()]
        heapq.heapify(self._by_room)
        self._last: str | None = None

    def take(self, size: float) -> str | None:
        """Assign an output to the last taker if it fits, else to the one with most room, else return None."""
        if self._last is None or not self._fits(size, self._last):
            self._last = self._with_most_room(size)
        if self._last is not None:
            self._left[self._last] -= size
        return self._last

    def _fits(self, size: float, worker: str) -> bool:
        return size <= self._left[worker] and size <= self._bound * self._speeds[worker]

    def _with_most_room(self, size: float) -> str | None:
        found, passed = None, []
        while self._by_room:
            left, worker = heapq.heappop(self._by_room)
            now = self._left[worker]
            if -left > now:  # stale: the worker has taken an output since
                heapq.heappush(self._by_room, (-now, worker))
                continue
            passed.append((left, worker))
            if self._fits(size, worker):
                found = worker
                break
            if now < size:  # no other worker has more room
                break
        for each in passed:
            heapq.heappush(self._by_room, each)
        return found
