"""Feed a sampler from a scheduler: with events as they happen, and with a sample every second."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from dask.typing import Key
from distributed import SchedulerPlugin

from dask_gpurt.dask_hooks.shuffle import barrier_key
from dask_gpurt.dask_hooks.types import SchedulerServer
from dask_gpurt.memory.ledger import rows, shared_memory
from dask_gpurt.monitor.dashboard.sampler import Sampler
from dask_gpurt.observe.metrics import shown_tiers
from dask_gpurt.scheduler.plugin import GpurtSchedulerPlugin
from dask_gpurt.scheduler.recovery import SHUFFLE_TOPIC

#: Interval between two samples, in seconds.
SAMPLE_INTERVAL_S = 1.0
#: Maximum fraction of a core for sampling: after an expensive sample the next is delayed.
MAX_SHARE = 0.005
NAME = "gpurt-dashboard"


class Collector(SchedulerPlugin):
    """Keep a sampler up to date with a scheduler.

    ``seconds``: CPU time of the last sample, in seconds.
    """

    name = NAME

    def __init__(self, runtime: GpurtSchedulerPlugin, clock: Callable[[], float] = time.time):
        self.runtime = runtime
        self.sampler = Sampler()
        self.seconds = 0.0
        self._scheduler: SchedulerServer = runtime.scheduler
        self._clock = clock
        self._timer: Any = None

    # ---- on and off ----------------------------------------------------------------------

    def install(self) -> None:
        """Start collecting."""
        self._scheduler.add_plugin(self, name=NAME)
        self._tick()

    def uninstall(self) -> None:
        """Stop collecting, and keep the history."""
        if self._timer is not None:
            self._scheduler.loop.remove_timeout(self._timer)
            self._timer = None
        if self._scheduler.plugins.get(NAME) is self:
            del self._scheduler.plugins[NAME]

    def _tick(self) -> None:
        began = time.thread_time()
        self.sample(self._clock())
        self.seconds = time.thread_time() - began
        pause = max(SAMPLE_INTERVAL_S, self.seconds / MAX_SHARE)
        self._timer = self._scheduler.loop.call_later(pause, self._tick)

    def sample(self, at: float) -> None:
        """Take a sample, at a time in seconds since the epoch."""
        names = {address: str(ws.name) for address, ws in self._scheduler.workers.items()}
        beats = self.runtime.beats()
        ledgers = {address: beat["memory"] for address, beat in beats.items()}
        self.sampler.sample(at, names, shown_tiers(rows(ledgers), shared_memory(ledgers)), beats)

    # ---- events ----------------------------------------------------------------------------

    def transition(self, key: Key, start: str, finish: str, *_: Any, **kwargs: Any) -> None:
        """Handle a transition of a task."""
        self.sampler.shuffles.transition(key, finish, self._clock())

    def remove_worker(self, scheduler: SchedulerServer, worker: str, **_: Any) -> None:
        """Handle the removal of a worker."""
        self.sampler.shuffles.removed(worker)

    def restart(self, scheduler: SchedulerServer) -> None:
        """Handle a restart, which forgets all tasks."""
        self.sampler.shuffles.restart(self._clock())

    def log_event(self, topic: str, msg: Any) -> None:
        """Handle events of shuffles."""
        if topic != SHUFFLE_TOPIC:
            return
        if msg["action"] != "begins":
            self.sampler.shuffles.event(msg["action"], msg["shuffle"], msg["reason"], msg.get("outputs", 0))
        elif (barrier := self._scheduler.tasks.get(barrier_key(msg["shuffle"]))) is not None:
            inputs = [task.key for task in barrier.dependencies]
            outputs = [task.key for task in barrier.dependents]
            at = self._clock()
            label = self.runtime.computations.purpose(_name(outputs), _label(barrier.run_spec))
            self.sampler.shuffles.begins(msg["shuffle"], msg["run"], at, inputs, barrier.key, outputs, label)
            for task in (*barrier.dependencies, *barrier.dependents):
                if task.state == "memory":
                    self.sampler.shuffles.transition(task.key, "memory", at)


def _name(outputs: Sequence[Key]) -> str:
    """Return the name in the keys of the outputs of a shuffle."""
    key = next(iter(outputs), "")
    return str(key[0] if isinstance(key, tuple) else key)


def _label(barrier: Any) -> str:
    """Return the operation that a barrier belongs to, as far as its task tells."""
    return str(getattr(getattr(barrier, "spec", None), "label", "rechunk"))
