"""Switch on and off as transactions: one at a time, on all workers, and ending in one of two states.

A caller that comes in the middle waits for the outcome, and gets its failure too. A worker that joins in the
middle asks before it switches on (:data:`JOIN`), since it may have received the plugin a moment before that
was removed again::

    a worker registers, the scheduler's answer with the plugin is on its way
    the scheduler switches off: it tells the worker, which has no such plugin yet
    the answer arrives, and the worker asks  ->  no: it stays off

If the answer is yes, the worker has registered the plugin already, so it hears of every later switching off.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Mapping
from enum import IntEnum
from typing import Any

from distributed.core import Status, clean_exception
from distributed.protocol.serialize import Serialize, Serialized, deserialize

from dask_gpurt.config import ConfigError
from dask_gpurt.dask_hooks.types import SchedulerServer

#: The name of the runtime among the plugins of schedulers and workers, and the extensions of schedulers.
NAME = "gpurt"
#: The handler that a worker calls before it switches on, and the stream operations by which it says that it
#: has, and that it has switched off again.
JOIN, READY, LEFT = "gpurt_join", "gpurt-ready", "gpurt-left"
#: The stream operation by which a worker says that it can not switch on with the settings that it has.
REFUSED = "gpurt-refused"
#: Calls to a worker that is registered and does not answer, and the seconds in between.
ATTEMPTS, PAUSE_S = 5, 0.2

SwitchAction = Callable[[], Coroutine[Any, Any, None]]


class Layer(IntEnum):
    """Order the parts of a worker that wrap one method: the highest layer is called first.

    ``execute`` is called through ``READS``, which counts a task until there is room for its result; then
    through ``DATA``, which waits until a task has room and its inputs are live; then through ``OVERLAP``,
    which confines what computes, and must not count that waiting; then it is Dask's. The functions that read
    files are wrapped in ``READS`` alone.
    """

    OVERLAP = 1
    DATA = 2
    READS = 3


class Switch:
    """Go one way from off to on, and back to off.

    Parameters
    ----------
    on
        Switches on, or raises, when it has taken back all it had done.
    off
        Switches off; may raise, and is off all the same.
    """

    def __init__(self, on: SwitchAction, off: SwitchAction):
        self._turn_on, self._turn_off = on, off
        self._off: asyncio.Task[None] | None = None

    async def on(self) -> None:
        """Switch on; once. Goes on to its end where the caller is gone meanwhile."""
        self._on = asyncio.create_task(self._turn_on())
        await asyncio.shield(self._on)

    async def off(self) -> None:
        """Switch off, after what is under way; all callers share one outcome."""
        if self._off is None:
            self._off = asyncio.create_task(self._end())
        await asyncio.shield(self._off)

    async def _end(self) -> None:
        await asyncio.wait([self._on])
        if not self._on.cancelled() and self._on.exception() is None:
            await self._turn_off()

    @property
    def is_on(self) -> bool:
        """Return whether it is on, and nothing is under way."""
        return self._off is None and self._on.done() and self._on.exception() is None

    async def settled(self) -> bool:
        """Wait for what is under way: whether it is on then. Raises what kept it from going on."""
        if self._off is not None:
            await asyncio.wait([self._off])
            return False
        await asyncio.shield(self._on)
        return self._off is None


class Workers:
    """Keep the plugin on all workers of a scheduler, those included that come and go meanwhile.

    Parameters
    ----------
    scheduler
        Dask's.
    plugin
        Pickled.
    token
        What its instances name when they ask.

    Attributes
    ----------
    token
        As given.
    ready
        The workers that have switched on.
    unreachable
        Those that did not answer when it was switched off.
    """

    def __init__(self, scheduler: SchedulerServer, plugin: bytes, token: str):
        self._scheduler = scheduler
        self._plugin = plugin
        self.token = token
        self._wanted = False
        self._on: Counter[str] = Counter()  # plugins that have been told yes, and have not left
        self._all_left = asyncio.Event()
        self.ready: set[str] = set()
        #: The kinds of device that workers have.
        self._devices: dict[str, frozenset[str]] = {}
        self.unreachable: set[str] = set()

    def join(self, worker: str, token: str, devices: Collection[str]) -> bool:
        """Handle a worker's question whether it shall switch on a plugin that it has been handed.

        Parameters
        ----------
        devices
            The kinds of device that it has.
        """
        wanted = self._wanted and token == self.token
        if wanted:
            self._on[worker] += 1
            self.note_devices(worker, devices)
        return wanted

    def note_devices(self, worker: str, devices: Collection[str]) -> None:
        """Note the kinds of device that a worker has."""
        self._devices[worker] = frozenset(devices)

    def ready_with(self, device: str) -> set[str]:
        """Return the workers that have switched on and have a kind of device."""
        return {worker for worker in self.ready if device in self._devices.get(worker, ())}

    def is_ready(self, worker: str, token: str) -> None:
        """Handle a worker that has switched on."""
        if token == self.token and worker in self._scheduler.workers:
            self.ready.add(worker)

    def has_left(self, worker: str, token: str) -> None:
        """Handle a worker that has switched off, and has sent nothing after this."""
        if token == self.token and self._on[worker]:
            self._on[worker] -= 1
            self._look()

    def remove(self, worker: str) -> None:
        """Forget a worker that is gone."""
        self.ready.discard(worker)
        self._on.pop(worker, None)
        self._devices.pop(worker, None)
        self._look()

    def _look(self) -> None:
        self._on = +self._on
        if self._on.keys() <= self.unreachable:
            self._all_left.set()
        else:
            self._all_left.clear()

    async def on(self) -> None:
        """Switch on all workers that are there, and from now on all that come.

        Raises
        ------
        Exception
            What one of them has raised.
        RuntimeError
            When one does not answer.
        """
        self._wanted = True
        self._scheduler.worker_plugins[NAME] = self._plugin
        replies = await self._tell({"op": "plugin-add", "plugin": self._plugin, "name": NAME})
        for worker, reply in replies.items():
            if isinstance(reply, ImportError):
                raise RuntimeError(f"worker {worker} can not load dask_gpurt: {reply}") from reply
            if isinstance(reply, Exception):
                raise RuntimeError(f"worker {worker} does not switch the runtime on: {reply!r}") from reply
            if reply["status"] == "error":
                raise exception_of(reply)
        self.ready |= replies.keys() & self._scheduler.workers.keys()

    async def off(self) -> None:
        """Switch all workers off.

        Raises
        ------
        RuntimeError
            Says on which workers something is left, after all others have been switched off.
        """
        self._wanted = False
        if self._scheduler.worker_plugins.get(NAME) == self._plugin:
            del self._scheduler.worker_plugins[NAME]
        replies = await self._tell({"op": "plugin-remove", "name": NAME})
        self.ready.clear()
        left = {}
        for worker, reply in replies.items():
            if isinstance(reply, Exception):
                self.unreachable.add(worker)
                left[worker] = f"does not answer ({reply!r})"
            elif reply["status"] == "error" and not isinstance(error := exception_of(reply), KeyError):
                left[worker] = repr(error)  # a KeyError: it had no such plugin, or had left it by itself
        # Dask closes a worker that sends what it does not know. Answers overtake what came before on the
        # stream.
        self._look()
        await self._all_left.wait()
        if left:
            reasons = "; ".join(f"{worker}: {reason}" for worker, reason in left.items())
            raise RuntimeError(
                f"the runtime is off, but something of it is left on {len(left)} of {len(replies)} workers: "
                f"restart these. {reasons}"
            )

    async def _tell(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Broadcast, and return the answers, or errors, of all that are still there."""
        answers: dict[str, Any] = {}
        asked = [worker for worker in self._scheduler.workers if self._stays(worker)]
        for attempt in range(ATTEMPTS):
            replies = await self._scheduler.broadcast(msg=dict(message), workers=asked, on_error="return")
            answers |= replies
            asked = [w for w, reply in replies.items() if isinstance(reply, OSError) and self._stays(w)]
            if not asked or attempt == ATTEMPTS - 1:
                break
            await asyncio.sleep(PAUSE_S)
        return {worker: reply for worker, reply in answers.items() if self._stays(worker)}

    def _stays(self, worker: str) -> bool:
        state = self._scheduler.workers.get(worker)
        return state is not None and state.status not in (Status.closing, Status.closed)


class _WithoutTraceback(logging.Filter):
    """Drop Dask's log records of errors that are reported elsewhere, with a traceback from each worker.

    A wrong setting is raised by whatever call switches on, and logged in a line where there is none. Dask
    also has workers remove the plugin that have none, or none any more.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        has_none = isinstance(error, KeyError) and error.args == (NAME,)
        return not (isinstance(error, ConfigError) or has_none)


_without_traceback = _WithoutTraceback()


def spare_tracebacks() -> None:
    """Keep tracebacks of errors that are reported elsewhere out of Dask's logs; may be called again."""
    for name in ("distributed.worker", "distributed.core"):
        logging.getLogger(name).addFilter(_without_traceback)


def exception_of(reply: Mapping[str, Any]) -> BaseException:
    """Return what a worker has raised; a scheduler does not unpack what passes through it."""
    packed = reply["exception"]
    if isinstance(packed, Serialize):  # of a worker in this process
        packed = packed.data
    elif isinstance(packed, Serialized):
        packed = deserialize(packed.header, packed.frames)
    _, error, _ = clean_exception(packed)
    return error or RuntimeError(reply["exception_text"])
