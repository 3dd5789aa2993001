"""Decide which shuffles of a client with the runtime go through it.

Most GPU programs configure Dask's method ``tasks`` because ``p2p`` is slow there, and not because they need
``tasks``. So a configured ``tasks`` is taken over. The argument ``shuffle_method="tasks"`` is taken over only
with ``gpurt.takeover: all``. dask-expr writes a configured method into expressions as if it were an argument,
so the two are distinguished by the configuration: an argument that equals it counts as configured.
"""

from __future__ import annotations

from dask_gpurt.observe.methods import MethodChoice

METHOD = "gpurt"
TASKS, P2P = "tasks", "p2p"


def choose_method(
    asked: str | None,
    configured: str | None,
    takeover: bool | str,
    *,
    explicit_comms: bool = False,
    local: bool = False,
) -> MethodChoice | None:
    """Choose between the runtime and Dask for a shuffle or a join.

    Parameters
    ----------
    asked
        The method in the expression; None if it has none.
    configured
        The setting ``dataframe.shuffle.method`` at the time of lowering.
    takeover
        The setting ``gpurt.takeover``.
    explicit_comms
        The setting ``explicit-comms`` of dask-cuda, which then handles ``tasks`` itself.
    local
        Whether a local scheduler of Dask is selected, which has no workers.

    Returns
    -------
    MethodChoice or None
        None for ``p2p``, which the scheduler may take over.
    """
    method = asked or configured
    if method == P2P:
        return None
    if local:
        return MethodChoice.LOCAL_SCHEDULER
    if method is None:
        return MethodChoice.DEFAULT
    if method == METHOD:
        return MethodChoice.NAMED
    if method != TASKS:
        return MethodChoice.OTHER_METHOD
    if not takeover:
        return MethodChoice.TAKEOVER_OFF
    if explicit_comms:
        return MethodChoice.EXPLICIT_COMMS
    if configured == TASKS:
        return MethodChoice.CONFIGURED_TASKS
    return MethodChoice.ARGUMENT_TASKS if takeover == "all" else MethodChoice.ONLY_CONFIGURED
