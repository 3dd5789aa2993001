"""Close workers while peers that do not know it yet still call them."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest

import dask_gpurt
from dask_gpurt.exchange import PeerLost
from dask_gpurt.protocol import END_TRACE_HANDLER, EVACUATE_HANDLER, NEW_OWNERS_OP, TAKE_EVENTS_HANDLER
from tests.helpers import commands
from tests.helpers.in_process import gen_client_cluster

TRACES = (TAKE_EVENTS_HANDLER, END_TRACE_HANDLER)
WORKERS: list[Any] = [("127.0.0.1", 1)] * 2
NEVER_CLOSED = """
import numpy as np, pandas as pd
import dask.dataframe as dd
from dask.distributed import Client, LocalCluster
import dask_gpurt

if __name__ == "__main__":
    options = {"n_workers": 2, "threads_per_worker": 1, "processes": False, "dashboard_address": ":0"}
    client = Client(LocalCluster(**options))
    dask_gpurt.enable(client)
    frame = dd.from_pandas(pd.DataFrame({"k": np.arange(1_000) % 10}), npartitions=4)
    kept = frame.shuffle("k").persist()
    print(len(kept))
"""


def calls(worker: Any) -> list[str]:
    """Return the runtime's handlers on a worker."""
    return sorted(name for name in worker.handlers if name.startswith("gpurt_"))


def test_a_worker_that_closes_is_called_until_its_connections_are_closed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    answers: dict[str, Any] = {}

    @gen_client_cluster(nthreads=WORKERS)
    async def run(client: Any, scheduler: Any, a: Any, b: Any) -> None:
        await dask_gpurt.enable(client)
        names, teardown = calls(a), a.preloads.teardown
        peer = b.plugins["gpurt"].exchange.calls

        async def call_all() -> None:  # the plugins are closed by now
            assert not a.plugins
            for name in names:
                try:
                    answers[name] = await peer.call(a.address, name, check=lambda: None)
                except PeerLost as error:
                    answers[name] = error
            scheduler.stream_comms[a.address].send(
                {"op": NEW_OWNERS_OP, "id": "x", "run_id": 1, "owners": None}
            )
            await scheduler.rpc(a.address).gpurt_report(connect=False)
            await teardown()

        a.preloads.teardown = call_all
        caplog.clear()
        await a.close()
        assert not [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        await dask_gpurt.disable(client)

    run()
    ignored = ("gpurt_report", "gpurt_make_room", EVACUATE_HANDLER, *TRACES)
    nothing = {name: answers.pop(name) for name in ignored}
    assert not any(nothing.values())
    assert len(answers) == 5
    assert all(isinstance(answer, PeerLost) for answer in answers.values()), answers


@pytest.mark.slow
def test_a_program_never_closes_its_cluster(tmp_path: Path) -> None:
    """Python has ended the threads of executors when Dask closes the cluster, at exit."""
    script = tmp_path / "job.py"
    script.write_text(NEVER_CLOSED)
    done = commands.run(sys.executable, script)
    assert done.stdout.split() == ["1000"]
    assert "Traceback" not in done.stderr, done.stderr
