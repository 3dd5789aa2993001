"""Call handlers of peers, and retry broken connections until the peer replies or has left.

A worker that disappears silently, or is stopped, does not break its connections: Dask tries to connect for 30
seconds, and waits for a reply forever. So each call is monitored. A call that a run waits for also ends when
the scheduler has not heard from the peer either; the run then goes on without it.

Every handler of the exchange is idempotent, so a call whose reply was lost can be retried.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any

from dask_gpurt.dask_hooks.types import WorkerServer
from dask_gpurt.dask_hooks.worker import is_closing
from dask_gpurt.exchange.shard import ExchangeClosed, PeerLost, RunKey
from dask_gpurt.observe import Metrics

#: Failed calls after which a peer counts as lost, and the longest pause between two of them in seconds.
MAX_CALLS, LONGEST_PAUSE_S = 30, 1.0
#: The pause before the second call, in seconds; doubled for each further call.
FIRST_PAUSE_S = 0.05
#: The reply of a closing worker to any call.
CLOSES = "gpurt: this worker closes"
#: Seconds between checks during a call: is the peer alive, is the reply still needed?
WATCH_S = 0.5
#: The most addresses of removed workers that are remembered.
MAX_REMOVED = 1024


def _no_run() -> RunKey | None:
    return None


class Calls:
    """Call handlers of peers. On the event loop."""

    def __init__(self, worker: WorkerServer, metrics: Metrics):
        self._worker = worker
        self._metrics = metrics
        #: By address, a future that is done when the worker is removed, for the calls in flight to it.
        self._removals: dict[str, asyncio.Future[None]] = {}
        #: Addresses of removed workers, the latest last. New workers may have taken these addresses.
        self._removed: dict[str, None] = {}
        self._in_flight: set[asyncio.Future[Any]] = set()
        self._closed = False

    def on_worker_removed(self, address: str) -> None:
        """Abort the calls to a worker that the scheduler has removed."""
        self._removed.pop(address, None)
        self._removed[address] = None
        if len(self._removed) > MAX_REMOVED:
            del self._removed[next(iter(self._removed))]
        if (removal := self._removals.pop(address, None)) is not None:
            removal.set_result(None)

    async def call(
        self,
        address: str,
        op: str,
        *,
        check: Callable[[], None],
        awaited_by: Callable[[], RunKey | None] = _no_run,
        **message: Any,
    ) -> Any:
        """Call a handler of the worker at an address, with retries; return its reply.

        ``op``: the name of the handler, which has to be idempotent.
        ``check``: raises if the reply is no longer needed. Called while waiting and before each retry.
        ``awaited_by``: returns the run that currently waits for the reply, if any.
        Raises PeerLost if the worker has left, is closing, or could not be reached in :data:`MAX_CALLS`
        calls; or if it is silent and a run waits for it. It may have received the message, or still receive
        it.
        Raises ExchangeClosed if :meth:`close` was called and ``check`` does not raise.
        """
        pause = FIRST_PAUSE_S
        for number in range(1, MAX_CALLS + 1):
            try:
                return await self.once(address, op, check=check, awaited_by=awaited_by, **message)
            except OSError as error:
                check()
                self._metrics.add("exchange.calls.repeated")
                if await self.has_left(address):
                    raise PeerLost(f"worker {address} has left ({error})") from error
                if number == MAX_CALLS:
                    reason = f"worker {address} was called {number} times and could not be reached: {error}"
                    raise PeerLost(reason) from error
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
            check()
        raise AssertionError("unreachable")

    async def once(
        self,
        address: str,
        op: str,
        *,
        check: Callable[[], None],
        awaited_by: Callable[[], RunKey | None] = _no_run,
        **message: Any,
    ) -> Any:
        """Call a handler once; see :meth:`call`.

        Raises PeerLost if the worker leaves during the call, fails to reply because it is closing, or is
        silent.
        Raises ExchangeClosed if :meth:`close` was called and ``check`` does not raise.
        Raises OSError if the connection breaks.
        """
        if address in self._removed:
            if await self.has_left(address):  # Dask would try to connect for 30 s
                raise PeerLost(f"worker {address} has left")
            self._removed.pop(address, None)
        self._raise_if_closed(check)
        answer = asyncio.ensure_future(getattr(self._worker.rpc(address), op)(**message))
        self._in_flight.add(answer)
        answer.add_done_callback(self._in_flight.discard)
        try:
            while not await self._answered(answer, address):
                check()
                lost = await self._lost(address, awaited_by())
                if lost is not None and not answer.done():
                    raise PeerLost(lost)
            if answer.cancelled():
                self._raise_if_closed(check)
            return await self._result(answer, address)
        finally:
            answer.cancel()  # a no-op if it is done

    def _raise_if_closed(self, check: Callable[[], None]) -> None:
        if self._closed:
            check()  # its error is more specific
            raise ExchangeClosed(f"the exchange of {self._worker.address} is closed")

    async def close(self) -> None:
        """End all calls, and send no further ones, neither to peers nor to the scheduler."""
        self._closed = True
        for answer in (in_flight := list(self._in_flight)):
            answer.cancel()
        await asyncio.gather(*in_flight, return_exceptions=True)

    async def _lost(self, address: str, run: RunKey | None) -> str | None:
        """Return why a worker will not reply in time; None if it may."""
        if await self.has_left(address):
            return f"worker {address} has left"
        if run is not None and await self._is_silent(address, run):
            return f"worker {address} does not reply, and the scheduler does not hear from it"
        return None

    async def _answered(self, answer: asyncio.Future[Any], address: str) -> bool:
        """Wait for a reply, a removal of the worker or the next check; return whether the reply has come."""
        removal = self._removals.get(address)
        if removal is None:
            removal = self._removals[address] = asyncio.get_running_loop().create_future()
        await asyncio.wait([answer, removal], timeout=WATCH_S, return_when=asyncio.FIRST_COMPLETED)
        return answer.done()

    async def _result(self, answer: asyncio.Future[Any], address: str) -> Any:
        """Return a reply; any error of a closing worker raises PeerLost, since it does not fail the run."""
        try:
            found = answer.result()
        except OSError:
            raise
        except Exception as error:
            if await self.is_closing(address):
                raise PeerLost(f"worker {address} is closing ({error})") from error
            raise
        if isinstance(found, str) and found == CLOSES:
            raise PeerLost(f"worker {address} is closing")
        return found

    async def has_left(self, address: str) -> bool:
        """Ask the scheduler whether a worker has left; False if it is unreachable."""
        return await self._ask(address)

    async def is_closing(self, address: str) -> bool:
        """Ask the scheduler whether a worker has left or is closing; False if it is unreachable."""
        return await self._ask(address, closing=True)

    async def _is_silent(self, address: str, run: RunKey) -> bool:
        """Ask the scheduler whether a run goes on without a worker; False if it is unreachable."""
        if self._closed:
            return False
        shuffle, run_id = run
        with contextlib.suppress(OSError, RuntimeError):  # as in `_ask`
            return bool(await self._worker.scheduler.gpurt_silent(id=shuffle, run_id=run_id, worker=address))
        return False

    async def _ask(self, address: str, **more: bool) -> bool:
        if self._closed:
            return False
        # Either way this worker is about to close: it has lost its scheduler, or closed its own connections.
        with contextlib.suppress(OSError, RuntimeError):
            gone = await self._worker.scheduler.gpurt_gone(peers=[address], **more)
            return gone is not None and address in gone  # None: the runtime has been switched off there
        return False


def off_on(worker: WorkerServer) -> Callable[..., str | None]:
    """Return a handler that tells peers that the runtime is off on a worker, or that this is closing."""

    def off(**_: Any) -> str | None:
        return CLOSES if is_closing(worker) else None

    return off


# ---- while the interpreter exits ---------------------------------------------------------------------
#
# A program that never closes its ``LocalCluster(processes=False)`` has it closed by a handler at exit. By
# then Python has joined the threads of all executors and starts no others. So what closes a worker is
# called on its event loop, which nothing else waits for any more.


def is_exiting() -> bool:
    """Return whether the interpreter exits: the main thread has ended, and handlers at exit run."""
    return not threading.main_thread().is_alive()


async def in_thread(function: Callable[..., Any], *args: Any) -> Any:
    """Run a blocking function in a thread; in this one if the interpreter exits."""
    if is_exiting():
        return function(*args)
    return await asyncio.to_thread(function, *args)
