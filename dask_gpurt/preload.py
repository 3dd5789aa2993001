"""Implement Dask's preload hooks for schedulers, workers, nannies and clients.

``etc/dask/gpurt.yaml`` preloads this module in every process; it is a no-op unless ``gpurt.enabled`` is true.
``--preload dask_gpurt`` calls :func:`activate` directly.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distributed import Nanny, Worker
    from distributed.diagnostics.plugin import SchedulerPlugin

logger = logging.getLogger(__name__)


async def dask_setup(server: Any) -> None:
    """Switch the runtime on if the configuration enables it."""
    import dask

    named = dask.config.get("dataframe.shuffle.method", None) == "gpurt"
    # In a process without the runtime, this hook costs two dictionary look-ups.
    if not named and not dask.config.get("gpurt", None):
        return
    from dask_gpurt import config
    from dask_gpurt.dask_hooks import why_unsupported

    if found := config.problems():
        _say_stays_off(server, "; ".join(found))
    elif config.load().enabled:
        await activate(server)
    elif named and (unsupported := why_unsupported(expressions=True)) is not None:
        logger.error("the shuffle method 'gpurt' is unavailable: %s", unsupported)
    elif named:
        # Otherwise Dask would reject the unknown method. Without the runtime it means Dask's default.
        from dask_gpurt.client import session

        session.register_method()


def _say_stays_off(server: Any, problems: str) -> None:
    """Log the problems of the settings, only once if a script starts a cluster in its own process.

    The client, the scheduler and the nannies of such a script share one configuration, and workers inherit
    that of their nannies.
    """
    import dask

    from dask_gpurt import config

    nannies = dask.config.get("distributed.nanny.preload", None) or ()
    # Log instead of raising: Dask would log an exception with a long traceback that obscures the reason.
    if not (getattr(server, "nanny", None) and __name__ in nannies):
        config.say_once(logger, problems)


async def dask_teardown(server: Any) -> None:
    """Close the extra worker processes of a nanny when the nanny closes."""
    from distributed import Nanny

    if isinstance(server, Nanny):
        from dask_gpurt.worker import colocation

        await colocation.separate(server)


async def activate(server: Any) -> None:
    """Switch the runtime on for the cluster of a server or client.

    Parameters
    ----------
    server
        A scheduler, worker, nanny or client.
    """
    import dask

    from dask_gpurt import config
    from dask_gpurt.dask_hooks import UnsupportedError, why_unsupported

    if (reason := why_unsupported()) is None:
        try:
            await _activate(server)
            return
        except UnsupportedError as error:  # raised by another process of the cluster
            reason = str(error)
        except config.ConfigError as error:  # in this process or another one
            if dask.config.get("gpurt.enabled", False):
                _say_stays_off(server, str(error))
            else:  # switched on by --preload, which nannies do not pass on
                config.say_once(logger, str(error))
            return
    # Log instead of raising: Dask would log an exception with a long traceback that obscures the reason.
    logger.error("the runtime stays off: %s", reason)


async def _activate(server: Any) -> None:
    import dask
    from distributed import Client, Nanny, Scheduler, Worker

    from dask_gpurt.client import session
    from dask_gpurt.monitor import dashboard
    from dask_gpurt.scheduler.plugin import GpurtSchedulerPlugin
    from dask_gpurt.worker import colocation, overlap

    settings = dict(dask.config.get("gpurt", {}))
    plugin = GpurtSchedulerPlugin(settings, dashboard.observe)
    if isinstance(server, Scheduler):
        await server.register_scheduler_plugin(plugin, idempotent=True)
    elif isinstance(server, Client):
        await session.activate(server)
    elif isinstance(server, (Worker, Nanny)):
        if isinstance(server, Nanny):
            overlap.preload_into(server)
            await colocation.colocate(server)
        # dask-cuda's workers ignore distributed.worker.preload; their nannies read distributed.nanny.preload.
        await _activate_through(server, plugin)
    else:
        raise TypeError(f"dask_gpurt cannot be preloaded into a {type(server).__qualname__}")


async def _activate_through(worker: Worker | Nanny, plugin: SchedulerPlugin) -> None:
    """Switch the runtime on for the whole cluster, through the scheduler of a worker or nanny."""
    from distributed.protocol.pickle import dumps

    from dask_gpurt.config import ConfigError
    from dask_gpurt.dask_hooks import UnsupportedError

    try:
        await worker.scheduler.register_scheduler_plugin(plugin=dumps(plugin), name="gpurt", idempotent=True)
    except (ConfigError, UnsupportedError):
        raise
    except (ImportError, ValueError) as error:
        raise RuntimeError(
            f"the scheduler at {worker.scheduler.address} cannot load dask_gpurt ({error}), so shuffles "
            "stay Dask's own: install the same version of dask-gpurt there, and check that its "
            "distributed.scheduler.pickle is true"
        ) from error
