"""Ask other processes of a cluster, before anything is replaced, whether the runtime can work there.

Workers that join later are not asked: what they receive says in one line that it cannot be loaded there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distributed.protocol.pickle import dumps

from dask_gpurt._version import __version__
from dask_gpurt.dask_hooks import NEWEST, OLDEST


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
