"""Simulate the runtime's shuffles: shards move between workers in virtual time, bypassing Dask."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import count

from benchmarks.simulate.network import Network
from benchmarks.simulate.scheduler import VirtualScheduler
from benchmarks.simulate.work import Work


class VirtualShuffles:
    """Send the shards of each transfer to the owners of outputs, which wait for them.

    Owners are chosen when the first transfer of a shuffle starts, as on a real cluster. Both sides of a join
    have the same owners. Shards are sent as soon as their transfer has finished.

    The memory of shards is not modelled.

    ``works``: all tasks. Tasks with :attr:`Work.shards` are outputs, in the order of their partitions.
    """

    def __init__(self, works: Mapping[str, Work], scheduler: VirtualScheduler, network: Network):
        self._scheduler = scheduler
        self._network = network
        #: Bytes of shards by transfer and output; the owner and the number of missing shards of each output.
        self._sent: defaultdict[str, dict[str, int]] = defaultdict(dict)
        self._owners: dict[str, str] = {}
        self._missing: Counter[str] = Counter()
        self._waiting: dict[str, Callable[[], None]] = {}
        self._turns = count()
        for work in works.values():
            self._missing[work.key] = len(work.shards)
            for transfer, nbytes in work.shards.items():
                self._sent[transfer][work.key] = nbytes

    def on_start(self, work: Work) -> None:
        """Choose owners if the task is the first transfer of a shuffle."""
        outputs = self._sent.get(work.key)
        if not outputs or next(iter(outputs)) in self._owners:
            return
        chosen = self._in_ranges(len(outputs))
        for number, output in enumerate(outputs):
            self._owners[output] = chosen[number]
            self._scheduler.set_restrictions({output: chosen[number]})

    def _in_ranges(self, outputs: int) -> dict[int, str]:
        """Return Dask's choice of owners: equal ranges of outputs, with another first worker each time."""
        workers: Sequence[str] = list(self._scheduler.workers)
        first = next(self._turns) % len(workers)
        turned = [*workers[first:], *workers[:first]]
        return {number: turned[len(turned) * number // outputs] for number in range(outputs)}

    def on_end(self, work: Work, worker: str) -> None:
        """Send the shards of a task that has finished on a worker, if it is a transfer."""
        by_owner: defaultdict[str, list[str]] = defaultdict(list)
        for output in self._sent.get(work.key, ()):
            by_owner[self._owners[output]].append(output)
        for owner, outputs in by_owner.items():
            nbytes = sum(self._sent[work.key][output] for output in outputs)
            if owner == worker:
                self._arrived(outputs)
            else:
                self._network.send(worker, owner, nbytes, lambda outputs=outputs: self._arrived(outputs))  # type: ignore[misc]

    def _arrived(self, outputs: Sequence[str]) -> None:
        for output in outputs:
            self._missing[output] -= 1
            if not self._missing[output] and (begin := self._waiting.pop(output, None)) is not None:
                begin()

    def when_there(self, work: Work, begin: Callable[[], None]) -> None:
        """Call ``begin`` once all shards of a task have arrived; immediately if it needs none."""
        if self._missing[work.key] > 0:
            self._waiting[work.key] = begin
        else:
            begin()
