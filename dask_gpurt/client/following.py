"""Follow the state of a cluster: begin and end a client's session as the runtime is switched on and off.

Both sides speak through topics of Dask's events, which every scheduler keeps. A client says who it is
(:data:`CLIENTS_TOPIC`), reads the last state (:data:`STATE_TOPIC`), and subscribes to later ones::

    the client reads that the runtime is off; its subscription is on its way
    the runtime is switched on, and tells those who have subscribed
    ->  the scheduler also tells those who have said who they are, which a client does before it reads

States are numbered, since answers to calls and messages on the stream overtake each other. A client ignores
all that are older than the last one that it knows.

Decisions and their figures: ``docs/decisions/scheduler.md``.

Every client imports this module where the package is installed, so it must stay cheap.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import logging
import sys
import weakref
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import dask

from dask_gpurt._version import __version__
from dask_gpurt.protocol import CLIENTS_TOPIC, STATE_TOPIC

if TYPE_CHECKING:
    from distributed import Client

logger = logging.getLogger(__name__)

#: How long a scheduler may take to say whether the runtime is on, in seconds; a client goes on without.
ANSWER_TIMEOUT_S = 10.0
#: The state of a scheduler on which the runtime has never been on.
_NEVER_ON: Mapping[str, Any] = {"on": False, "number": 0, "version": None}

_followers: WeakKeyDictionary[Client, Follower] = WeakKeyDictionary()
#: The reasons that have been logged in this process.
_said: set[str] = set()


async def follow(client: Client) -> Follower:
    """Follow the cluster of a client, and return once a session is open if the runtime is on there."""
    if (follower := _followers.get(client)) is None:
        from dask_gpurt.dask_hooks.clients import after_reconnecting

        follower = _followers[client] = Follower(client, _kept_out())
        await follower.begin()
        after_reconnecting(client, follower.begin)
    return follower


async def relay_off(client: Client) -> None:
    """Let all clients of this process know now that the runtime is off, which their scheduler tells them."""
    state = await _last_state(client)
    # If it is on again, each opens its session on its own event loop.
    if state is not None and not state["on"]:
        for other, follower in list(_followers.items()):
            if address_of(other) == address_of(client):
                follower.take(state)


class Follower:
    """Open and close the session of a client, as its scheduler says. It does not keep the client alive.

    ``client``: the client.
    ``reason``: why its computations are planned by Dask nevertheless; None if they are not.
    """

    def __init__(self, client: Client, reason: str | None):
        self._client = weakref.ref(client)
        self._reason = reason
        self._state = _NEVER_ON
        self._opening: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Subscribe, say who this is, and read the state of a scheduler that the client has connected to."""
        if (client := self._client()) is None:
            return
        before, self._state = self._state, _NEVER_ON
        client.subscribe_topic(STATE_TOPIC, self._take_event)
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await self._introduce(client, self._reason)
                state = await _last_state(client)
        except (OSError, TimeoutError) as error:  # the scheduler is gone; a slow one will tell
            logger.debug("%s does not say whether the runtime is on: %r", address_of(client), error)
        else:
            if state is None and before["on"]:  # the scheduler has been restarted without the runtime
                _end_session(client)
            await self._settle(state)

    async def ask(self) -> None:
        """Ask the scheduler whether the runtime is on, and return once the session is as it says."""
        if (client := self._client()) is not None:
            await self._settle(await _last_state(client))

    async def admit(self) -> None:
        """Follow although a setting keeps the client out, since its user has switched it on."""
        if self._reason is not None and (client := self._client()) is not None:
            self._reason = None
            await self._introduce(client, None)

    async def _settle(self, state: Mapping[str, Any] | None) -> None:
        if state is not None:
            self.take(state)
        if self._opening is not None:
            await asyncio.shield(self._opening)

    def _take_event(self, event: tuple[float, Mapping[str, Any]]) -> None:
        self.take(event[1])

    def take(self, state: Mapping[str, Any]) -> None:
        """Open or close the session, unless a later state is known."""
        client = self._client()
        if client is None or state["number"] <= self._state["number"]:
            return
        self._state = state
        if not state["on"]:
            _end_session(client)
        elif self._reason is None:
            self._opening = asyncio.create_task(self._open(client, state))

    async def _open(self, client: Client, state: Mapping[str, Any]) -> None:
        # Planning takes a second to import, and the loop may be the user's own.
        reason = await asyncio.to_thread(_why_not, state)
        if self._state is not state:  # it was switched off meanwhile
            return
        if reason is not None:
            await self._refuse(client, reason)
            return
        from dask_gpurt.client import session

        session.register_method()
        if session.SESSIONS.of(client) is None:
            session.SESSIONS.open(client)

    async def _refuse(self, client: Client, reason: str) -> None:
        if reason not in _said:
            _said.add(reason)
            logger.warning("the runtime is on at %s, but not for this client: %s", address_of(client), reason)
        try:
            await self._introduce(client, reason)
        except OSError as error:  # the scheduler is gone
            logger.debug("the scheduler does not learn that %s: %r", reason, error)

    async def _introduce(self, client: Client, reason: str | None) -> None:
        scheduler: Any = client.scheduler
        message = {"client": client.id, "version": __version__, "reason": reason}
        await scheduler.log_event(topic=CLIENTS_TOPIC, msg=message)


async def _last_state(client: Client) -> Mapping[str, Any] | None:
    scheduler: Any = client.scheduler
    events = await scheduler.events(topic=STATE_TOPIC)
    return events[-1][1] if events else None


def _kept_out() -> str | None:
    """Return which setting keeps the clients of this process out, in a process with settings."""
    if "gpurt" in dask.config.config:
        from dask_gpurt import config

        if not config.problems() and not config.load().client:
            return "'gpurt.client' is false in its configuration"
    return None


def _why_not(state: Mapping[str, Any]) -> str | None:
    """Return why the runtime cannot plan in this process, and otherwise import what it needs for that."""
    if state["version"] != __version__:
        return (
            f"the scheduler has dask-gpurt {state['version']}, this process has {__version__}: install the "
            "same version"
        )
    from dask_gpurt import config
    from dask_gpurt.dask_hooks import why_unsupported

    if found := config.problems():
        return "; ".join(found)
    if (reason := why_unsupported()) is not None:
        return reason
    prepare()
    return None


@cache
def prepare() -> None:
    """Import what planning needs, and do what its first query would wait for. Takes about a second."""
    from dask_gpurt.frames import first_uses

    first_uses.begin()
    collects = gc.isenabled()
    gc.disable()  # the libraries that are being imported have no garbage
    try:
        for module in ("lowering", "planning"):
            importlib.import_module(f"dask_gpurt.client.{module}")
        importlib.import_module("dask_gpurt.client.planning.keys").environment()
        importlib.import_module("dask_gpurt.dask_hooks.planning").prepare()
    finally:
        if collects:
            gc.enable()
            gc.collect()  # due now, since there are so many new objects, or else within the first query


def _end_session(client: Client) -> None:
    # Without the module there are no sessions.
    if (session := sys.modules.get("dask_gpurt.client.session")) is not None:
        session.SESSIONS.close_cluster(client)


def address_of(client: Client) -> str | None:
    """Return the address of the scheduler of a client; None once it is closed."""
    return getattr(client.scheduler, "address", None)
