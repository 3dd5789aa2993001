"""Call peers: again where a connection breaks, until the peer answers or has left.

A worker that has left silently, or is stopped, does not break connections: Dask tries to connect for 30
seconds, and waits for an answer for ever. So each call is watched.

Every handler of the exchange is idempotent, so a call whose answer got lost may be made again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from dask_gpurt.dask_hooks.types import WorkerServer
from dask_gpurt.exchange.shard import PeerLost
from dask_gpurt.observe import Metrics

#: Calls until a peer that has not left counts as lost, and the longest pause between them in seconds.
MAX_CALLS, LONGEST_PAUSE_S = 30, 1.0
#: The pause before the second call, in seconds; each further one is twice as long.
FIRST_PAUSE_S = 0.05
#: The answer of a worker that closes, in the place of whatever was asked for.
CLOSES = "gpurt: this worker closes"
#: Seconds between looks at a call that is under way: does the peer live, is its answer needed?
WATCH_S = 0.5
#: Addresses of removed workers that are remembered.
MAX_REMOVED = 1024


class Calls:
    """Call handlers of peers. On the event loop.

    Parameters
    ----------
    worker
        The Dask worker, whose connections are used.
    """

    def __init__(self, worker: WorkerServer, metrics: Metrics):
        self._worker = worker
        self._metrics = metrics
        #: Done as the worker at an address is removed, for the calls to it that are under way.
        self._removals: dict[str, asyncio.Future[None]] = {}
        #: Addresses from which workers were removed, the latest last. Others may be there by now.
        self._removed: dict[str, None] = {}

    def on_worker_removed(self, address: str) -> None:
        """End all calls to a worker that the scheduler has removed."""
        self._removed.pop(address, None)
        self._removed[address] = None
        if len(self._removed) > MAX_REMOVED:
            del self._removed[next(iter(self._removed))]
        if (removal := self._removals.pop(address, None)) is not None:
            removal.set_result(None)

    async def call(self, address: str, op: str, *, check: Callable[[], None], **message: Any) -> Any:
        """Call a handler of the worker at an address; returns its answer.

        Parameters
        ----------
        op
            The name of the handler, which may be called again with the same message.
        check
            Raises when the answer is of no use any more. Looked at while waiting, and before each call but
            the first.

        Raises
        ------
        PeerLost
            When the worker has left, or could not be reached again and again.
        """
        pause = FIRST_PAUSE_S
        for number in range(1, MAX_CALLS + 1):
            try:
                return await self.once(address, op, check=check, **message)
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

    async def once(self, address: str, op: str, *, check: Callable[[], None], **message: Any) -> Any:
        """Call a handler once.

        Raises
        ------
        PeerLost
            When the worker leaves meanwhile, or has failed to answer because it closes.
        OSError
            When the connection breaks.
        """
        if address in self._removed:
            if await self.has_left(address):  # Dask would try for long to connect
                raise PeerLost(f"worker {address} has left")
            self._removed.pop(address, None)
        answer = asyncio.ensure_future(getattr(self._worker.rpc(address), op)(**message))
        try:
            while not await self._answered(answer, address):
                check()
                if await self.has_left(address) and not answer.done():
                    raise PeerLost(f"worker {address} has left")
            return await self._result(answer, address)
        finally:
            answer.cancel()  # which does nothing to one that is done

    async def _answered(self, answer: asyncio.Future[Any], address: str) -> bool:
        """Wait for an answer, until the worker is removed or it is time to look; tell whether it is there."""
        removal = self._removals.get(address)
        if removal is None:
            removal = self._removals[address] = asyncio.get_running_loop().create_future()
        await asyncio.wait([answer, removal], timeout=WATCH_S, return_when=asyncio.FIRST_COMPLETED)
        return answer.done()

    async def _result(self, answer: asyncio.Future[Any], address: str) -> Any:
        """Return an answer. Any error of a worker that closes means that it is lost; no run has failed."""
        try:
            found = answer.result()
        except OSError:
            raise
        except Exception as error:
            if await self.is_closing(address):
                raise PeerLost(f"worker {address} closes ({error})") from error
            raise
        if isinstance(found, str) and found == CLOSES:
            raise PeerLost(f"worker {address} closes")
        return found

    async def has_left(self, address: str) -> bool:
        """Ask the scheduler whether a worker has left; False where it cannot be asked."""
        return await self._ask(address)

    async def is_closing(self, address: str) -> bool:
        """Ask the scheduler whether a worker has left, or is about to; False where it cannot be asked."""
        return await self._ask(address, closing=True)

    async def _ask(self, address: str, **more: bool) -> bool:
        # Without a scheduler this worker ends too; of one that ends itself the connections are closed.
        with contextlib.suppress(OSError, RuntimeError):
            gone = await self._worker.scheduler.gpurt_gone(peers=[address], **more)
            return gone is not None and address in gone  # None: the runtime has been switched off there
        return False


async def closes(**_: Any) -> str:
    """Handle any call of a peer to a worker that closes."""
    return CLOSES
