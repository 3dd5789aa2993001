"""Implement Dask's preload hooks for schedulers, workers, nannies and clients.

``etc/dask/gpurt.yaml`` preloads this module in every process. A client follows what is on at its scheduler;
other processes do nothing unless ``gpurt.enabled`` is true. ``--preload dask_gpurt`` calls :func:`activate`
directly.
"""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)


async def dask_setup(server: Any) -> None:
    """Switch the runtime on if the configuration enables it; a client follows its cluster in any case."""
    import dask
    from distributed import Client

    named = dask.config.get("dataframe.shuffle.method", None) == "gpurt"
    # In a process without settings, this costs a look at each key.
    if named or any(str(key).startswith("gpurt") for key in dask.config.config):
        await _set_up(server, named)
    if isinstance(server, Client):
        from dask_gpurt.client.following import follow

        await follow(server)


async def _set_up(server: Any, named: bool) -> None:
    from distributed import Client

    from dask_gpurt import config
    from dask_gpurt.dask_hooks import why_unsupported

    if found := config.problems():
        _say_stays_off(server, "; ".join(found))
        return
    settings = config.load()
    if settings.enabled and (settings.client or not isinstance(server, Client)):
        await activate(server)
    elif named and (unsupported := why_unsupported()) is not None:
        logger.error("the shuffle method 'gpurt' is unavailable: %s", unsupported)
    elif named:
        # Otherwise Dask would reject the unknown method. Without the runtime it means Dask's default.
        from dask_gpurt.client import session

        session.register_method()


def _say_stays_off(server: Any, problems: str) -> None:
    """Log what keeps the runtime off, only once if a script starts a cluster in its own process.

    The client, the scheduler and the nannies of such a script share one configuration, and workers inherit
    that of their nannies.
    """
    import dask

    from dask_gpurt import config

    nannies = dask.config.get("distributed.nanny.preload", None) or ()
    # Log instead of raising: Dask would log an exception with a long traceback that obscures the reason.
    if not (getattr(server, "nanny", None) and __name__ in nannies):
        config.say_once(logger, problems)


async def activate(server: Any) -> None:
    """Switch the runtime on for the cluster of a server or client.

    ``server``: a scheduler, worker, nanny or client.
    """
    import dask

    from dask_gpurt import config, dask_hooks

    try:
        dask_hooks.require()
        await _activate(server)
    except (config.ConfigError, dask_hooks.UnsupportedError) as error:  # in this process or another one
        if dask.config.get("gpurt.enabled", False):
            _say_stays_off(server, str(error))
        else:  # switched on by --preload, which nannies do not pass on
            config.say_once(logger, str(error))
    except RuntimeError as error:  # of this process or another one
        logger.debug("the runtime stays off", exc_info=True)
        # Log instead of raising: Dask would log an exception with a long traceback that obscures the reason.
        logger.error("the runtime stays off: %s", error)


async def _activate(server: Any) -> None:
    import dask
    from distributed import Client, Nanny, Scheduler, Worker
    from distributed.protocol.pickle import dumps

    from dask_gpurt.client import session
    from dask_gpurt.client.addresses import require_package
    from dask_gpurt.frames import first_uses
    from dask_gpurt.monitor import dashboard
    from dask_gpurt.protocol import NAME
    from dask_gpurt.scheduler.plugin import GpurtSchedulerPlugin
    from dask_gpurt.worker import overlap

    settings = dict(dask.config.get("gpurt", {}))
    plugin = GpurtSchedulerPlugin(settings, dashboard.observe)
    if isinstance(server, Scheduler):
        first_uses.begin()  # where a program starts its cluster, it waits for workers now
        await server.register_scheduler_plugin(plugin, idempotent=True)
    elif isinstance(server, Client):
        await session.activate(server)
    elif isinstance(server, (Worker, Nanny)):
        await require_package(server.scheduler)
        if isinstance(server, Nanny):
            overlap.preload_into(server)
        # dask-cuda's workers ignore distributed.worker.preload; their nannies read distributed.nanny.preload.
        await server.scheduler.register_scheduler_plugin(plugin=dumps(plugin), name=NAME, idempotent=True)
    else:
        raise TypeError(f"dask_gpurt cannot be preloaded into a {type(server).__qualname__}")
