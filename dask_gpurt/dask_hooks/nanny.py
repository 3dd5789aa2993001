"""Start a nanny like one that there is."""

from __future__ import annotations

from typing import Any

from distributed import Nanny

from dask_gpurt.dask_hooks.comparison import UnsupportedError
from dask_gpurt.dask_hooks.seams import NANNY

#: Arguments that a nanny takes for itself and passes on to its worker.
_FOR_BOTH = ("port", "interface", "protocol", "host")


def require_free_address(nanny: Any) -> None:
    """Make sure that there can be a nanny like this one.

    Raises
    ------
    UnsupportedError
        When nannies are not as they are known, or the worker's address is fixed: two can not have it.
    """
    NANNY.require()
    if nanny.contact_address or nanny._listen_address:
        raise UnsupportedError("the address of the worker is fixed, which two can not have")


def another_nanny(nanny: Any, number: int) -> Nanny:
    """Make a nanny for the same scheduler, whose worker is started as the one of ``nanny`` is.

    Parameters
    ----------
    nanny
        Which one to follow; it may be starting.
    number
        Told apart by this: a part of its name.

    Returns
    -------
    Nanny
        It is to be started.
    """
    ports = nanny._given_worker_port
    worker = {name: value for name, value in nanny.worker_kwargs.items() if name not in _FOR_BOTH}
    return Nanny(
        nanny.scheduler_addr,
        name=None if nanny.name is None else f"{nanny.name}-{number}",
        nthreads=nanny.nthreads,
        memory_limit=nanny.memory_manager.memory_limit,
        local_directory=nanny._original_local_dir,
        # One port can not be had twice, a range serves all of them.
        worker_port=0 if isinstance(ports, int) else ports,
        host=nanny._start_host,
        interface=nanny._interface,
        protocol=nanny._protocol,
        security=nanny.security,
        env=nanny.env,
        config=nanny.config,
        resources=nanny.resources,
        validate=nanny.validate,
        silence_logs=nanny.silence_logs,
        death_timeout=nanny.death_timeout,
        preload=nanny.preload,
        preload_argv=nanny.preload_argv,
        worker_class=nanny.Worker,
        **worker,
    )
