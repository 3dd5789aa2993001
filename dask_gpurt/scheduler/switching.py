"""Switch the runtime on and off on all workers, as transactions that never overlap and end either on or off.

A caller that arrives in the middle waits for the outcome, and receives its exception if it fails. A worker
that joins in the middle asks the scheduler before it switches on (:data:`JOIN_HANDLER`), since the plugin
that it received may have been removed again::

    a worker registers; the scheduler's reply with the plugin is in flight
    the scheduler switches off, and tells the worker, which does not have the plugin yet
    the reply arrives, and the worker asks whether to switch on  ->  no: it stays off

When the worker asks, it has registered the plugin already. So after a yes it receives every later removal,
unless it is silent. A transaction does not wait for a silent worker, but fails and names it. Workers look up
at intervals which runtime the scheduler has on (:data:`TOKEN_HANDLER`), and switch off a plugin that belongs
to none or to another one. So a worker that is heard again ends up off.

Messages of workers that have not switched off yet are ignored by handlers that stay
(:func:`dask_gpurt.protocol.is_off`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Coroutine, Mapping
from typing import TYPE_CHECKING, Any

from distributed.core import Status, clean_exception
from distributed.protocol.pickle import dumps
from distributed.protocol.serialize import Serialize, Serialized, deserialize

from dask_gpurt._version import __version__
from dask_gpurt.dask_hooks import NEWEST, OLDEST, UnsupportedError
from dask_gpurt.dask_hooks.types import SchedulerServer
from dask_gpurt.protocol import NAME, JoinReply

if TYPE_CHECKING:  # what it imports may not be there in another Dask, of which this module tells
    from dask_gpurt.scheduler.worker_calls import SilentWorkers

logger = logging.getLogger(__name__)

#: The number of calls to a registered worker that does not answer, and the pause between them in seconds.
ATTEMPTS, PAUSE_S = 5, 0.2
#: Seconds between checks whether a worker that has not answered yet is silent, or has left.
WATCH_S = 0.5
#: Seconds without a heartbeat after which it is silent. A worker that switches on for the first time imports
#: libraries on its event loop, which takes long on a slow file system.
SILENT_S = 60.0

SwitchAction = Callable[[], Coroutine[Any, Any, None]]


class Silent(Exception):
    """A worker has neither answered nor sent heartbeats for a while."""

    def __str__(self) -> str:
        return "it is silent"


class Switch:
    """Run one transition from off to on, and one back to off.

    ``on``: switches on. If it raises, it has undone everything.
    ``off``: switches off, even if it raises.
    """

    def __init__(self, on: SwitchAction, off: SwitchAction):
        self._turn_on, self._turn_off = on, off
        self._off: asyncio.Task[None] | None = None

    async def on(self) -> None:
        """Switch on; to be called once. Completes even if the caller is cancelled."""
        self._on = asyncio.create_task(self._turn_on())
        await asyncio.shield(self._on)

    async def off(self) -> None:
        """Switch off, after switching on has ended. All callers share one outcome."""
        if self._off is None:
            self._off = asyncio.create_task(self._end())
        await asyncio.shield(self._off)

    async def _end(self) -> None:
        await asyncio.wait([self._on])
        if not self._on.cancelled() and self._on.exception() is None:
            await self._turn_off()

    @property
    def is_on(self) -> bool:
        """Return whether the switch is on and no transition is running."""
        return self._off is None and self._on.done() and self._on.exception() is None

    async def settled(self) -> bool:
        """Wait for the running transition, and return whether the switch is on. Raises if that failed."""
        if self._off is not None:
            await asyncio.wait([self._off])
            return False
        await asyncio.shield(self._on)
        return self._off is None


class Workers:
    """Keep the plugin on all workers of a scheduler, including workers that join later.

    ``plugin``: the pickled worker plugin.
    ``token``: identifies this scheduler plugin in messages of its worker plugins.
    ``unreachable``: the workers that were silent, or did not answer, when the runtime was switched off.
    """

    def __init__(self, scheduler: SchedulerServer, plugin: bytes, token: str, silent: SilentWorkers):
        self._scheduler = scheduler
        self._plugin = carried(plugin)
        self.token = token
        self.silent = silent
        self._wanted = False
        #: For each worker the ids of plugins that may be on: they were allowed to join and have not left.
        self._on: defaultdict[str, set[str]] = defaultdict(set)
        self._all_left = asyncio.Event()
        self.ready: set[str] = set()
        #: The kinds of device that workers have, and the workers that have others than the host's.
        self._devices: dict[str, frozenset[str]] = {}
        self.with_gpu: set[str] = set()
        self.unreachable: set[str] = set()

    def join(self, worker: str, token: str, devices: Collection[str], plugin: str) -> JoinReply:
        """Tell a worker whether to switch on the plugin that it has received (handler). Idempotent.

        A plugin asks again if its connection broke before the reply.

        ``plugin``: identifies the plugin among those that the worker has received.
        """
        if not self._wanted or token != self.token:
            if token == self.token:
                self._note_left(worker, plugin)  # an earlier yes may have been lost with its connection
            return JoinReply.STAY_OFF
        self._on[worker].add(plugin)
        self.note_devices(worker, devices)
        return JoinReply.AS_FITS if self.ready else JoinReply.AS_SET

    def note_devices(self, worker: str, devices: Collection[str]) -> None:
        """Record a worker's kinds of device."""
        self._devices[worker] = frozenset(devices)
        (self.with_gpu.add if self._devices[worker] - {"host"} else self.with_gpu.discard)(worker)

    def ready_with(self, device: str) -> set[str]:
        """Return the workers that have switched on and have a kind of device."""
        return {worker for worker in self.ready if device in self._devices.get(worker, ())}

    def is_ready(self, worker: str, token: str) -> None:
        """Note that a worker has switched on (stream handler)."""
        if token == self.token and worker in self._scheduler.workers:
            self.ready.add(worker)

    def has_left(self, worker: str, token: str, plugin: str) -> None:
        """Note that a worker's plugin has switched off; this is its last message (stream handler)."""
        if token == self.token:
            self._note_left(worker, plugin)

    def _note_left(self, worker: str, plugin: str) -> None:
        self._on[worker].discard(plugin)
        self._update_all_left()

    def remove(self, worker: str) -> None:
        """Forget a worker that has left the cluster."""
        self.ready.discard(worker)
        self._on.pop(worker, None)
        self._devices.pop(worker, None)
        self.with_gpu.discard(worker)
        self.silent.remove(worker)
        self._update_all_left()

    def _update_all_left(self) -> None:
        if {worker for worker, plugins in self._on.items() if plugins} <= self.unreachable:
            self._all_left.set()
        else:
            self._all_left.clear()

    async def require(self) -> None:
        """Check that the runtime can work on all workers; replaces nothing there.

        Raises UnsupportedError if it cannot on some, with the reason for one of them.
        Raises RuntimeError if a worker does not answer.
        """
        replies = await self._call_all({"op": "run", **question()})
        _raise_first(replies)
        answers = {worker: _unpack(reply["result"]) for worker, reply in replies.items()}
        found = [reason for w, answer in answers.items() if (reason := objection(f"worker at {w}", answer))]
        if found:
            of = f" (and {len(found) - 1} more of {len(answers)} workers)" if len(found) > 1 else ""
            raise UnsupportedError(found[0] + of)

    async def on(self) -> None:
        """Switch on all workers, and from now on every worker that joins.

        Raises Exception if a worker fails to switch on; the worker's exception.
        Raises RuntimeError if a worker does not answer.
        """
        self._wanted = True
        self._scheduler.worker_plugins[NAME] = self._plugin
        replies = await self._call_all({"op": "plugin-add", "plugin": self._plugin, "name": NAME})
        _raise_first(replies)
        self.ready |= replies.keys() & self._scheduler.workers.keys()

    async def off(self) -> None:
        """Switch all workers off.

        Raises RuntimeError if workers do not answer or fail to switch off; all others are off.
        """
        self._wanted = False
        if self._scheduler.worker_plugins.get(NAME) == self._plugin:
            del self._scheduler.worker_plugins[NAME]
        replies = await self._call_all({"op": "plugin-remove", "name": NAME})
        self.ready.clear()
        left = {}
        for worker, reply in replies.items():
            if isinstance(reply, Exception):
                self.unreachable.add(worker)
                left[worker] = _reason(reply)
            elif reply["status"] == "error" and not isinstance(error := exception_of(reply), KeyError):
                left[worker] = repr(error)  # a KeyError means only that the worker has no such plugin
        # A plugin whose setup is failing is not the worker's any more; its last message says that it is off.
        for worker in await self._until_all_left():
            left[worker] = str(Silent())
        if left:
            reasons = "; ".join(f"{worker}: {reason}" for worker, reason in left.items())
            raise RuntimeError(
                f"the runtime is off, but {len(left)} of {len(replies)} workers did not switch it off "
                f"cleanly: restart these. Silent ones switch off themselves if they are heard again. "
                f"{reasons}"
            )

    async def _until_all_left(self) -> list[str]:
        """Wait for the last message of every plugin; return the workers that fall silent before theirs."""
        silent: list[str] = []
        self._update_all_left()
        while not self._all_left.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._all_left.wait(), WATCH_S)
            missing = [w for w, plugins in self._on.items() if plugins and w not in self.unreachable]
            silent += [worker for worker in missing if self.silent.is_silent(worker, SILENT_S)]
            self.unreachable.update(silent)
            self._update_all_left()
        return silent

    async def _call_all(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Send a message to all workers; return the replies or errors of those that are still here."""
        asked = [worker for worker in self._scheduler.workers if self._stays(worker)]
        replies = await asyncio.gather(*(self._call_one(worker, message) for worker in asked))
        answers = zip(asked, replies, strict=True)
        return {worker: reply for worker, reply in answers if self._stays(worker)}

    async def _call_one(self, worker: str, message: Mapping[str, Any]) -> Any:
        """Send a message to a worker, with retries if connections break; return its reply or the error."""
        for attempt in range(ATTEMPTS):
            reply = await self._reply(worker, message)
            if not (isinstance(reply, OSError) and self._stays(worker)):
                break
            if attempt < ATTEMPTS - 1:
                await asyncio.sleep(PAUSE_S)
        return reply

    async def _reply(self, worker: str, message: Mapping[str, Any]) -> Any:
        """Return the reply of a worker or the error; an error too if it is silent, or leaves meanwhile."""
        asking = self._scheduler.broadcast(msg=dict(message), workers=[worker], on_error="return")
        reply = asyncio.ensure_future(asking)
        try:
            while not (await asyncio.wait([reply], timeout=WATCH_S))[0]:
                if not self._stays(worker) or self.silent.is_silent(worker, SILENT_S):
                    return Silent()
            return reply.result()[worker]
        finally:
            reply.cancel()  # a no-op if it is done

    def _stays(self, worker: str) -> bool:
        state = self._scheduler.workers.get(worker)
        return state is not None and state.status not in (Status.closing, Status.closed)


def _raise_first(replies: Mapping[str, Any]) -> None:
    """Raise the first error among the replies of workers that are to switch on."""
    for worker, reply in replies.items():
        if isinstance(reply, Exception):
            raise RuntimeError(f"worker {worker} did not switch the runtime on: {_reason(reply)}") from reply
        if reply["status"] == "error":
            raise exception_of(reply)


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, Silent) else f"it does not answer ({error!r})"


def exception_of(reply: Mapping[str, Any]) -> BaseException:
    """Return the exception that a worker raised."""
    _, error, _ = clean_exception(_unpack(reply["exception"]))
    return error or RuntimeError(reply["exception_text"])


def _unpack(packed: Any) -> Any:
    """Return what a worker has sent. Dask's scheduler does not deserialize what it forwards."""
    if isinstance(packed, Serialize):  # from a worker in this process
        return packed.data
    return deserialize(packed.header, packed.frames) if isinstance(packed, Serialized) else packed


# ---- whether the runtime can work in other processes -------------------------------------------------


def question() -> dict[str, bytes]:
    """Return the message of Dask's operation ``run`` whose reply :func:`objection` judges."""
    return {"function": dumps(_question()), "args": dumps(()), "kwargs": dumps({})}


def objection(subject: str, reply: tuple[str | None, str | None]) -> str | None:
    """Return why the runtime cannot work in the process that gave a reply; None if it can.

    ``subject``: the process: its role and address.
    ``reply``: the version of the package that it has loaded, or None, and what keeps the runtime from working
    there.
    """
    found, reason = reply
    if found == __version__:
        return None if reason is None else f"the {subject} cannot take part: {reason}"
    return (
        f"the {subject} cannot load dask_gpurt {__version__} ({reason or f'it has {found}'}), so shuffles "
        "stay Dask's own: install the same version of dask-gpurt on the scheduler and on all workers, with a "
        f"Dask from {OLDEST} to {NEWEST}"
    )


def carried(plugin: bytes, version: str = __version__) -> bytes:
    """Pickle a pickled worker plugin so that a worker that lacks the package says so, and leaves.

    Tasks of the runtime would fail there, and Dask would log tracebacks and keep the worker.
    """

    # Pickled by value, as in `_question`.
    def load() -> Any:
        import logging
        import pickle

        from distributed import WorkerPlugin

        try:
            return pickle.loads(plugin)
        except ModuleNotFoundError as error:
            reason = f"this worker leaves a cluster with dask_gpurt {version}: {error}. Install it here, too"

        class Leaves(WorkerPlugin):
            def setup(self, worker: Any) -> None:
                async def leave() -> None:
                    await worker  # until it has started
                    await worker.close(reason=reason)

                logging.getLogger("distributed.worker").error(reason)
                worker.loop.add_callback(leave)

        return Leaves()

    class Carried:
        def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
            return load, ()

    found: bytes = dumps(Carried())
    return found


def _question() -> Callable[[], tuple[str | None, str | None]]:
    # Pickled by value, as all functions in functions: the other process may lack this module.
    def load() -> tuple[str | None, str | None]:
        from importlib import import_module

        try:
            version: Any = import_module("dask_gpurt").__version__
            if (reason := import_module("dask_gpurt.dask_hooks").why_unsupported()) is None:
                import_module("dask_gpurt.scheduler.plugin")  # and what workers unpickle, which it imports
            return version, reason
        except Exception as error:  # whatever keeps the plugin from being unpickled there
            return None, str(error)

    return load
