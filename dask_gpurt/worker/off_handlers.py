"""Answer the runtime's messages on a worker on which it is off, until nobody sends them any more.

Workers switch off one after the other, and messages on different connections overtake each other::

    the scheduler tells A and B to switch off
    A has switched off; B, which has not done so yet, asks A to let go of a shard
    ->  without a handler A logs a traceback; a message on its stream would even close it

So stand-ins take the place of a worker's handlers, and reply what Dask replies to an unknown operation. A
worker tells the scheduler that it has left once its own calls have ended. When all workers have, and the
calls of the scheduler have ended too, the scheduler has them remove the stand-ins.
"""

from __future__ import annotations

from collections.abc import Mapping

from dask.typing import Key

from dask_gpurt.dask_hooks.types import WorkerServer
from dask_gpurt.dask_hooks.worker import is_closing, put_results
from dask_gpurt.exchange.calls import is_off
from dask_gpurt.protocol import (
    ACCEPTED_OP,
    ALL_OFF_HANDLER,
    ASK_STATUS_OP,
    CLOCK_HANDLER,
    END_TRACE_HANDLER,
    EVACUATE_HANDLER,
    HOST_HANDLER,
    NEW_OWNERS_OP,
    SEND_RESULTS_OP,
    TAKE_EVENTS_HANDLER,
    WORKER_REPORT_HANDLER,
)


class StandIns:
    """Stand in for the handlers of a worker's plugin; the exchange replaces its handlers itself.

    Parameters
    ----------
    worker
        The Dask worker.
    """

    def __init__(self, worker: WorkerServer):
        self._worker = worker

    def install(self) -> None:
        """Ignore the runtime's messages from now on."""
        for name in (
            WORKER_REPORT_HANDLER,
            EVACUATE_HANDLER,
            HOST_HANDLER,
            CLOCK_HANDLER,
            TAKE_EVENTS_HANDLER,
            END_TRACE_HANDLER,
        ):
            self._worker.handlers[name] = is_off
        for name in (NEW_OWNERS_OP, ACCEPTED_OP, ASK_STATUS_OP):
            self._worker.stream_handlers[name] = is_off
        self._worker.stream_handlers[SEND_RESULTS_OP] = self.take_results

    def take_results(self, results: Mapping[Key, object]) -> None:
        """Store results, without confirming them: the scheduler counts replicas here (stream handler)."""
        if not is_closing(self._worker):
            put_results(self._worker, results)

    def expect_end(self) -> None:
        """Let the scheduler remove the stand-ins."""
        self._worker.handlers[ALL_OFF_HANDLER] = self.remove

    async def remove(self) -> None:
        """Remove all stand-ins of this worker, also those of an earlier plugin (handler).

        On a closing worker they stay: peers that do not know yet that it closes still call it.
        """
        if not is_closing(self._worker):
            for handlers in (self._worker.handlers, self._worker.stream_handlers):
                for name in [name for name, handler in handlers.items() if _is_stand_in(handler)]:
                    del handlers[name]


def _is_stand_in(handler: object) -> bool:
    return handler is is_off or isinstance(getattr(handler, "__self__", None), StandIns)
