"""What a task will ask its shuffles for, known from its arguments before it runs."""

from __future__ import annotations

from typing import Any

from dask_gpurt.shuffle.run import ShuffleRun


def read_ahead(worker: Any, task: Any) -> None:
    """Have shuffles bring up what a task will be given. On the event loop.

    Parameters
    ----------
    task
        The worker's ``TaskState``. Dask's unpack tasks have as arguments the ids of their shuffles, then
        the number of an output.
    """
    arguments = getattr(task.run_spec, "args", ())
    output = next((one for one in arguments if isinstance(one, int)), None)
    shuffles = worker.plugins.get("shuffle")
    if output is None or shuffles is None:
        return
    for name in arguments:
        run = shuffles.shuffle_runs._active_runs.get(name) if isinstance(name, str) else None
        if isinstance(run, ShuffleRun):
            run.read_ahead(output)
