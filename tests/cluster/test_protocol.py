"""Compare the messages that the protocol names with the handlers of a running cluster."""

from __future__ import annotations

from typing import Any

from dask_gpurt import protocol
from tests.helpers.clusters import cluster
from tests.helpers.waiting import until

NAMES = {
    name: value for name, value in vars(protocol).items() if name.endswith(("_HANDLER", "_OP", "_METRIC"))
}


def _ours(names: Any) -> set[str]:
    return {name for name in names if name.startswith(("gpurt_", "gpurt-"))}


def _metrics(client: Any) -> list[str]:
    """Return what workers have sent with their heartbeats, of which the first one may be yet to come."""
    return client.run_on_scheduler(
        lambda dask_scheduler: [name for state in dask_scheduler.workers.values() for name in state.metrics]
    )


def test_each_message_has_a_handler_and_each_handler_a_message() -> None:
    named = {
        kind: {value for name, value in NAMES.items() if name.endswith(kind)}
        for kind in ("_HANDLER", "_OP", "_METRIC")
    }
    with cluster(workers=1, here=True) as client:
        until(lambda: _ours(_metrics(client)) == named["_METRIC"], lambda: _metrics(client))
        here, streams = client.run_on_scheduler(
            lambda dask_scheduler: (list(dask_scheduler.handlers), list(dask_scheduler.stream_handlers))
        )
        ((there, worker_streams),) = client.run(
            lambda dask_worker: (list(dask_worker.handlers), list(dask_worker.stream_handlers))
        ).values()
    assert _ours([*here, *there]) == named["_HANDLER"]
    assert _ours([*streams, *worker_streams]) == named["_OP"]
