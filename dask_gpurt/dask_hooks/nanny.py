"""Create a nanny with the same arguments as an existing one."""

from __future__ import annotations

from distributed import Nanny

from dask_gpurt.dask_hooks.comparison import UnsupportedError
from dask_gpurt.dask_hooks.seams import NANNY

#: Arguments that a nanny uses itself and also passes to its worker.
_FOR_BOTH = ("port", "interface", "protocol", "host")


def require_free_address(nanny: Nanny) -> None:
    """Check that a second nanny with the same arguments can start.

    Raises
    ------
    UnsupportedError
        If nannies differ from the known ones, or the worker's address is fixed.
    """
    NANNY.require()
    if nanny.contact_address or nanny._listen_address:
        raise UnsupportedError("the address of the worker is fixed, and two workers cannot share it")


def another_nanny(nanny: Nanny, number: int) -> Nanny:
    """Create a nanny for the same scheduler, whose worker is started like that of ``nanny``.

    Parameters
    ----------
    nanny
        The nanny to copy; it may be starting.
    number
        Distinguishes the new nanny; a suffix of its name.

    Returns
    -------
    Nanny
        Not started yet.
    """
    ports = nanny._given_worker_port
    worker = {name: value for name, value in nanny.worker_kwargs.items() if name not in _FOR_BOTH}
    return Nanny(
        nanny.scheduler_addr,
        name=None if nanny.name is None else f"{nanny.name}-{number}",
        nthreads=nanny.nthreads,
        memory_limit=nanny.memory_manager.memory_limit,
        local_directory=nanny._original_local_dir,
        # A fixed port is taken by the first worker; a range serves all workers.
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
