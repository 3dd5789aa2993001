"""A worker with the runtime's tiers in virtual time: who finds no room waits, as on a real one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from dask.typing import Key
from dask.utils import key_split
from distributed.worker_state_machine import GatherDep, GatherDepDoneEvent, StateMachineEvent

from dask_gpurt.memory.admission import FETCH, SEND, TASK, Admission, MemoryEstimator, MemoryRequest
from dask_gpurt.simulate.work import Work
from dask_gpurt.simulate.worker import VirtualWorker

#: Whether there is room, and what to do then.
Turn = tuple[Callable[[], bool], Callable[[], None]]


class TieredWorker(VirtualWorker):
    """Decides with the runtime's own :class:`Admission` and :class:`MemoryEstimator` who may take memory.

    What is sent is read from where it lies.
    """

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self._estimator = MemoryEstimator()
        # Simulated tasks never wait for each other, and take as long as the workload says.
        self._admission = Admission(patience=math.inf)
        self._numbers = itertools.count()
        self._turns: dict[MemoryRequest, Turn] = {}
        #: The one fetch from a peer that is on its way, and what is being sent.
        self._fetches: dict[str, MemoryRequest] = {}
        #: What they will take, by peer.
        self._promised: dict[str, int] = {}

    # ---- tasks -----------------------------------------------------------------------

    def _execute(self, key: str) -> None:
        work = self._peers.works[key]
        need = min(self._estimator.estimate(key_split(key), self._inputs(work)), self.tiers.capacity.live)
        begin = partial(super()._execute, key)
        self._admit(MemoryRequest(TASK, key), (partial(self.tiers.fits, work.needs, need), begin))

    def _finish(self, work: Work, run_id: int, start: float) -> None:
        if not self.gone:
            self._estimator.learn(key_split(work.key), self._inputs(work), work.nbytes + work.workspace)
        super()._finish(work, run_id, start)
        self._leave(MemoryRequest(TASK, work.key))

    def _inputs(self, work: Work) -> int:
        return sum(self.tiers[key] for key in work.needs if key in self.tiers)

    # ---- transfers -------------------------------------------------------------------

    def _gather(self, asked: GatherDep) -> None:
        self._fetches[asked.worker] = who = MemoryRequest(FETCH, next(self._numbers))
        self._admit(who, (partial(self.tiers.fits, (), asked.total_nbytes), partial(self._ask_now, asked)))

    def _ask_now(self, asked: GatherDep) -> None:
        """The room is promised at once: until the peer has read the request others would take it."""
        self._promised[asked.worker] = asked.total_nbytes
        ready = self._after_moves(self.tiers.hold((), asked.total_nbytes))
        self._clock.at(ready, super()._gather, asked)

    def _expect(self, nbytes: int) -> float:
        return 0.0

    def _expect_no_more(self, nbytes: int) -> None:
        """That is known when the fetch is over."""

    def _stimulate(self, event: StateMachineEvent) -> None:
        over = None
        if isinstance(event, GatherDepDoneEvent):
            over = self._fetches.pop(event.worker)
            self.tiers.let_go((), self._promised.pop(event.worker, 0))
        super()._stimulate(event)
        if over is not None:
            self._leave(over)

    def busy_for(self, host: str) -> bool:
        """Peers are told to ask later, too, while a task waits for what is being sent."""
        return self._admission.short or super().busy_for(host)

    def _lend(self, keys: Collection[Key]) -> tuple[Any, float]:
        held, seconds = self.tiers.lend(keys)
        who = MemoryRequest(SEND, next(self._numbers))
        self._admission.ask(who, True, self._clock.now)
        return (who, held), seconds

    def _get_back(self, lent: Any) -> None:
        who, held = lent
        super()._get_back(held)
        self._leave(who)

    # ---- admission -------------------------------------------------------------------

    def _admit(self, who: MemoryRequest, turn: Turn) -> None:
        fits, begin = turn
        if self._admission.ask(who, fits(), self._clock.now):
            self._turns.pop(who, None)
            begin()
        else:
            self._turns[who] = turn

    def _leave(self, who: MemoryRequest) -> None:
        """Something is over: those that wait have their turns, until one has to go on waiting."""
        following = self._admission.leave(who, self._clock.now)
        while following in self._turns and not self.gone:
            self._admit(following, self._turns[following])
            following = None if following in self._turns else self._admission.first
