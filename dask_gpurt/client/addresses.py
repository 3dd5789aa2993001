"""Check that a scheduler answers at an address before a client connects, and that it has the package."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import dask
from distributed.comm.addressing import parse_address, parse_host_port
from distributed.comm.registry import get_backend
from distributed.core import rpc
from distributed.security import Security
from distributed.utils import import_term

from dask_gpurt.dask_hooks import UnsupportedError
from dask_gpurt.scheduler.switching import objection, question

#: Timeouts for the scheduler's answer, and for one more connection that tells why there was none, in seconds.
TIMEOUT_S, ONCE_TIMEOUT_S = 6.0, 1.0


def require_scheduler(address: str) -> None:
    """Check that a scheduler answers at an address.

    Dask's client tries to connect for 30 seconds without saying why it cannot, and waits forever for a server
    of another kind that accepts the connection.

    ``address``: the scheduler's address.
    Raises ValueError if the address cannot be that of a scheduler, or not of one that this process can reach.
    Raises ConnectionError if no scheduler answers within :data:`TIMEOUT_S`.
    """
    _require_place(address)
    # In a thread: a notebook's own thread runs an event loop already.
    with ThreadPoolExecutor(1, "gpurt-connect") as thread:
        asked = thread.submit(asyncio.run, _ask(address))
        try:
            asked.result()
        except MemoryError as error:  # the first bytes of an HTTP response, read as a length
            raise ConnectionError(f"no scheduler answers at {address}, but another server") from error
        except (OSError, ValueError, TypeError, RuntimeError) as error:
            raise ConnectionError(f"no scheduler answers at {address}: {_reason(error)}") from None


async def require_package(scheduler: Any) -> None:
    """Check that a scheduler can load this version of the package; if not, it would log tracebacks.

    ``scheduler``: the scheduler, as a client or worker calls it.
    Raises UnsupportedError if it cannot, or its Dask is not supported.
    """

    reply = await scheduler.run_function(**question())
    if (reason := objection(f"scheduler at {scheduler.address}", reply["result"])) is not None:
        raise UnsupportedError(reason)


def _require_place(address: str) -> None:
    """Reject an address that Dask does not refuse, or only with an unclear error."""
    scheme, place = parse_address(address)
    if scheme == "inproc" and f"/{os.getpid()}/" not in place:
        raise ValueError(
            f"{address} can be reached only from within the scheduler's own process: use its client there, "
            "or start the cluster with processes=True"
        )
    try:
        if scheme != "inproc":
            parse_host_port(place)
        get_backend(scheme)
    except ValueError as error:
        raise ValueError(f"{address} is not the address of a scheduler: use tcp://HOST:PORT") from error


async def _ask(address: str) -> None:
    """Wait for a scheduler's answer: a server of another kind may accept the connection and not respond."""
    arguments = _security(address).get_connection_args("client")
    try:
        async with asyncio.timeout(TIMEOUT_S), rpc(address, connection_args=arguments) as scheduler:
            await scheduler.identity(n_workers=0)
    except TimeoutError:
        await _connect_once(address, arguments)
        raise


async def _connect_once(address: str, arguments: Mapping[str, Any]) -> None:
    """Raise the reason why no connection can be made, which the repeated attempts of Dask hide."""
    scheme, place = parse_address(address)
    with contextlib.suppress(TimeoutError):  # not more than is known already
        async with asyncio.timeout(ONCE_TIMEOUT_S):
            comm = await get_backend(scheme).get_connector().connect(place, **arguments)
            comm.abort()


def _security(address: str) -> Security:
    """Return the credentials that a client at this address uses."""
    loader = dask.config.get("distributed.client.security-loader", None)
    return (loader and import_term(loader)({"address": address})) or Security()


def _reason(error: BaseException) -> str:
    """Return why no connection could be made; Dask's own error has that of the system as a cause."""
    match error.__cause__ if isinstance(error.__cause__, OSError) else error:
        case ConnectionRefusedError():
            return "connection refused"
        case socket.gaierror():
            return "unknown host"
        case TimeoutError():
            return f"no answer within {TIMEOUT_S:g} s"
        case known:
            return str(known)
