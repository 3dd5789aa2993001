"""Balance the outputs of a run over its workers, by what is known once inputs have been split. Pure.

As a run begins nothing is known of the sizes of its outputs, and each worker owns as many. With the end of
each transfer its worker tells the bytes of the heaviest outputs in that input, and how long it took. From
these follow the bytes of each output (:class:`OutputBytes`), and the outputs that have to get other owners
for all workers to be done at about the same time (:func:`balanced`).

A move is paid for with messages, and with shards that are read once more. So even outputs never move,
and uneven ones as few as will do.
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

#: The most outputs of which a transfer tells the bytes, and how many times the mean these have at least.
MAX_TOLD, HEAVY = 32, 1.25
#: Standard errors of an estimate that count as chance.
CHANCE_ERRORS = 2.0
#: The last transfers that the speed of a worker is estimated from; how many of the run that asks are among
#: them at least, and how many seconds all usually take together.
SPEED_WINDOW_TRANSFERS, MIN_TRANSFERS, MIN_USUAL_S = 32, 3, 0.02
#: Limits to a slowdown.
FASTEST, SLOWEST = 0.25, 10.0
#: Outputs move if the last worker is done so many times as early thereby, and so many bytes of one thread.
MIN_GAIN, MIN_GAIN_BYTES = 1.2, 2**20
#: How much later than possible the last worker may be done, for fewer moves.
SLACK = 1.03
#: Halvings of the range in which the earliest possible end lies.
SEARCH_STEPS = 12


# ---- bytes of outputs ----------------------------------------------------------------------------------


class InputSizes(NamedTuple):
    """Tell what is learnt of outputs as an input is split.

    Attributes
    ----------
    nbytes
        Of all outputs, packed.
    heavy
        The bytes of outputs that are far above the mean, at most :data:`MAX_TOLD` of them.
    seconds
        That a thread took to split and pack it, without waiting for room.
    whole
        Whether all that its worker has published in the run is still there to be offered to others.
    arriving
        Bytes per second that can come to its worker from other hosts, as the run has shown; 0 where that is
        not known.
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
        """Return the sizes of an input.

        Parameters
        ----------
        sections
            All that it was packed into. Rows of one section count as equally large.
        outputs
            The number of outputs that it was cut for.
        """
        total, found = 0, Counter[int]()
        for section in sections:
            total += int(section.nbytes)
            per_row = section.nbytes / max(1, section.offsets[-1])
            for output, (start, stop) in zip(section.partitions, pairwise(section.offsets), strict=True):
                found[output] += int((stop - start) * per_row)
        least = HEAVY * total / max(1, outputs)
        heavy = {output: nbytes for output, nbytes in found.most_common(MAX_TOLD) if nbytes > least}
        return cls(total, heavy, seconds, whole, arriving)


@dataclass
class _Sums:
    """Sum up the bytes of an output over the inputs that tell it: x, x², and x times bytes of the input."""

    x: float = 0.0
    squares: float = 0.0
    products: float = 0.0

    def add(self, x: float, nbytes: float) -> None:
        self.x += x
        self.squares += x * x
        self.products += x * nbytes


class OutputBytes:
    """Estimate the bytes of each output from the inputs that have been split so far.

    Where one output is heavy in all of these inputs it will be in the others. Where each input has other
    heavy outputs, as in data that are sorted already, those of the inputs to come are not known. So only the
    part of an output counts as its own that is beyond chance; the rest counts as spread evenly. Once all
    inputs are known nothing is left to chance.

    Parameters
    ----------
    outputs
        Those that are received.
    inputs
        How many there are in all.
    """

    def __init__(self, outputs: Collection[int], inputs: int):
        self._outputs = sorted(outputs)
        self._inputs = inputs
        self._told: dict[int, InputSizes] = {}

    def __len__(self) -> int:
        return len(self._told)

    def add(self, source: int, sizes: InputSizes) -> None:
        """Take what an input tells, in the place of what it has told before: it may be transferred again."""
        self._told[source] = sizes

    def estimate(self) -> dict[int, float]:
        """Return the bytes of each output over all inputs, those to come included."""
        nbytes = sum(sizes.nbytes for sizes in self._told.values())
        if not nbytes:
            return dict.fromkeys(self._outputs, 0.0)
        shares = self._shares(nbytes)
        certain = {
            output: max(0.0, share - CHANCE_ERRORS * error) for output, (share, error) in shares.items()
        }
        told = sum(share for share, _ in shares.values())
        by_chance = (told - sum(certain.values())) / len(self._outputs)
        others = max(0.0, 1 - told) / max(1, len(self._outputs) - len(shares))
        scale = nbytes * self._inputs / len(self._told)
        return {output: scale * (certain.get(output, others) + by_chance) for output in self._outputs}

    def _shares(self, nbytes: float) -> dict[int, tuple[float, float]]:
        """Return the share of the bytes of each output that was told of, with its standard error."""
        # An input that does not tell of an output has a mean one of those that it does not tell of: all are
        # summed up for that case first, and those that do tell are corrected for.
        mean, told = _Sums(), defaultdict[int, _Sums](_Sums)
        for sizes in self._told.values():
            untold = max(1, len(self._outputs) - len(sizes.heavy))
            rest = max(0.0, sizes.nbytes - sum(sizes.heavy.values())) / untold
            mean.add(rest, sizes.nbytes)
            for output, x in sizes.heavy.items():
                sums = told[output]
                sums.x += x - rest
                sums.squares += x * x - rest * rest
                sums.products += (x - rest) * sizes.nbytes
        number, squares = len(self._told), sum(sizes.nbytes**2 for sizes in self._told.values())
        unseen = max(0.0, 1 - number / self._inputs)
        shares = {}
        for output, sums in told.items():
            share = (mean.x + sums.x) / nbytes
            # Of a share that is estimated as a ratio, with the correction for a finite population.
            residual = (
                mean.squares + sums.squares - 2 * share * (mean.products + sums.products) + share**2 * squares
            )
            variance = max(0.0, residual) / (number * (number - 1)) if number > 1 else math.inf
            error = math.sqrt(variance * unseen) / (nbytes / number) if unseen else 0.0
            shares[output] = share, error
        return shares


# ---- speeds of workers ---------------------------------------------------------------------------------


class _Pace(NamedTuple):
    """A transfer of a run took so many seconds, where such ones usually take others."""

    run: int
    seconds: float
    usual: float


class WorkerSpeeds:
    """Estimate how fast the threads of workers are, relative to the usual, from how long transfers took.

    A worker that is stopped, and goes on, many times a second is found to be either by each of its transfers.
    So the sums of them are compared; and of the difference only what is beyond chance counts, else outputs
    would move to whichever of equal workers was luckier.

    Transfers of earlier runs make the estimate surer, where the run that asks confirms it: a worker
    that was slow may not be so any more, and one that was not may be now.
    """

    def __init__(self) -> None:
        self._workers: dict[str, deque[_Pace]] = {}

    def observe(self, worker: str, seconds: float, usual: float, run: int) -> None:
        """Learn from a transfer of a run that took ``seconds`` where such ones usually take ``usual``."""
        if usual > 0:
            known = self._workers.setdefault(worker, deque(maxlen=SPEED_WINDOW_TRANSFERS))
            known.append(_Pace(run, seconds, usual))

    def of(self, worker: str, runs: Collection[int]) -> float:
        """Return the speed of a worker, as far as some runs show it; 1 if they do not, below 1 is slow."""
        known = self._workers.get(worker, ())
        own = [pace for pace in known if pace.run in runs]
        if len(own) < MIN_TRANSFERS:
            return 1.0
        # It may have changed since the runs before: these make surer of what the run itself shows, and what
        # is sure without them counts too.
        shown, before = _excess(own), _beyond_chance(known)
        confirmed = min(before, shown, key=abs) if before * shown > 0 else 0.0
        excess = max(confirmed, _beyond_chance(own), key=abs)
        return 1 / min(max(1 + excess, FASTEST), SLOWEST)

    def on_worker_removed(self, worker: str) -> None:
        """Forget a worker."""
        self._workers.pop(worker, None)


def _excess(paces: Collection[_Pace]) -> float:
    """Return how much longer than usual some transfers took together, as a share of the usual time."""
    usual = sum(pace.usual for pace in paces)
    return sum(pace.seconds for pace in paces) / usual - 1 if usual else 0.0


def _beyond_chance(paces: Collection[_Pace]) -> float:
    """Return the excess closest to 0 within the confidence margin."""
    number, usual = len(paces), sum(pace.usual for pace in paces)
    if usual < MIN_USUAL_S:
        return 0.0
    excess = _excess(paces)
    residual = sum((pace.seconds - (1 + excess) * pace.usual) ** 2 for pace in paces)
    error = math.sqrt(residual * number / (number - 1)) / usual
    return math.copysign(max(0.0, abs(excess) - CHANCE_ERRORS * error), excess)


# ---- owners --------------------------------------------------------------------------------------------


class Capacity(NamedTuple):
    """Describe what a worker can take.

    Attributes
    ----------
    worker
        Its address.
    threads
        Outputs that it puts together at once.
    speed
        Of one thread, relative to the others: 1 as these.
    room
        Bytes of outputs that it may get besides its own; 0 for a worker that may get none.
    """

    worker: str
    threads: float = 1.0
    speed: float = 1.0
    room: float = math.inf


class Moves(NamedTuple):
    """Name outputs that get other owners.

    Attributes
    ----------
    to
        The new owner of each.
    before, after
        When the last worker is done with its outputs, in bytes of one thread.
    """

    to: dict[int, str]
    before: float = 0.0
    after: float = 0.0


def balanced(
    nbytes: Mapping[int, float],
    owners: Mapping[int, str],
    capacities: Iterable[Capacity],
    *,
    gain: float = MIN_GAIN,
    least: float = MIN_GAIN_BYTES,
) -> Moves:
    """Return the outputs that have to move for the last worker to be done much earlier; none where it is not.

    Parameters
    ----------
    nbytes
        Bytes of each output, on all sides of a join together.
    owners
        The owner of each.
    capacities
        Of all owners, and of whatever worker may become one.
    gain, least
        How many times as early it has to be done for that, and by how many bytes of one thread.
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
    """Return the earliest end in a range for which moves are found, and these; none for its upper end."""
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
    """Keep the outputs of one worker: the heaviest first, of equal ones the last, so that neighbours move."""

    capacity: Capacity
    outputs: list[tuple[float, int]] = field(default_factory=list)
    nbytes: float = 0.0

    @property
    def rate(self) -> float:
        return self.capacity.threads * self.capacity.speed

    @property
    def end(self) -> float:
        """Return when it is done: not before its heaviest output, which one thread puts together."""
        heaviest = self.outputs[0][0] if self.outputs else 0.0
        return max(self.nbytes / self.rate, heaviest / self.capacity.speed)

    def without(self, outputs: Collection[int]) -> _Load:
        """Return what is left without some outputs."""
        kept = [(size, output) for size, output in self.outputs if output not in outputs]
        return _Load(self.capacity, kept, sum(size for size, _ in kept))


class _Loads:
    """Keep the outputs of all workers."""

    def __init__(
        self, nbytes: Mapping[int, float], owners: Mapping[int, str], capacities: Iterable[Capacity]
    ):
        self._nbytes, self._owners = nbytes, owners
        self._workers = {capacity.worker: _Load(capacity) for capacity in capacities}
        for output, owner in owners.items():
            self._workers[owner].outputs.append((nbytes.get(output, 0.0), output))
        for load in self._workers.values():
            load.outputs.sort(reverse=True)
            load.nbytes = sum(size for size, _ in load.outputs)

    def end(self) -> float:
        """Return when the last worker is done."""
        return max(load.end for load in self._workers.values())

    def lower_bound(self) -> float:
        """Return when the last worker could be done if outputs could be divided."""
        workers = self._workers.values()
        heaviest = max((load.outputs[0][0] for load in workers if load.outputs), default=0.0)
        fastest = max(load.capacity.speed for load in workers)
        return max(
            sum(load.nbytes for load in workers) / sum(load.rate for load in workers), heaviest / fastest
        )

    def moves_within(self, bound: float) -> dict[int, str] | None:
        """Return moves after which all workers are done by some time; None where none are found."""
        late = [load for load in self._workers.values() if load.end > bound]
        takers = _Takers([load for load in self._workers.values() if load.end <= bound], bound)
        moves: dict[int, str] = {}
        for load in sorted(late, key=lambda load: (-load.end, load.capacity.worker)):
            if not _shed(load, bound, takers, moves):
                return None
        return moves

    def spread(self, moves: Mapping[int, str]) -> dict[int, str]:
        """Return moves of the same outputs after which their new owners are done as early as possible.

        Those are left out that could as well stay.
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
    """Move outputs of a worker to others until it is done in time; False where they have no room."""
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
    for size, output in reversed(kept):  # the lightest that is enough
        if size >= excess and (taker := takers.take(size)) is not None:
            moves[output] = taker
            return True
    return False


class _Takers:
    """Give outputs to workers that are done early, each as many as it can take."""

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
        """Return the worker that takes an output, the one that took the last if it can; None for none."""
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
            if -left > now:  # it has taken something since
                heapq.heappush(self._by_room, (-now, worker))
                continue
            passed.append((left, worker))
            if self._fits(size, worker):
                found = worker
                break
            if now < size:  # so has no other
                break
        for each in passed:
            heapq.heappush(self._by_room, each)
        return found
