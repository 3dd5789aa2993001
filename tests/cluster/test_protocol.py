"""Compare the messages that the protocol names with the handlers of a running cluster."""

from __future__ import annotations

from typing import Any

from dask_gpurt import protocol
from tests.helpers.clusters import cluster

NAMES = {
    name: value for name, value in vars(protocol).items() if name.endswith(("_HANDLER", "_OP", "_METRIC"))
}


def _ours(names: Any) -> set[str]:
    return {name for name in names if name.startswith(("gpurt_", "gpurt-"))}


def test_each_message_has_a_handler_and_each_handler_a_message() -> None:
    with cluster(workers=1) as client:
        here, streams, metrics = client.run_on_scheduler(
            lambda dask_scheduler: (
                list(dask_scheduler.handlers),
                list(dask_scheduler.stream_handlers),
                [name for state in dask_scheduler.workers.values() for name in state.metrics],
            )
        )
        ((there, worker_streams),) = client.run(
            lambda dask_worker: (list(dask_worker.handlers), list(dask_worker.stream_handlers))
        ).values()
    named = {
        kind: {value for name, value in NAMES.items() if name.endswith(kind)}
        for kind in ("_HANDLER", "_OP", "_METRIC")
    }
    assert _ours([*here, *there]) == named["_HANDLER"]
    assert _ours([*streams, *worker_streams]) == named["_OP"]
    assert _ours(metrics) == named["_METRIC"]
