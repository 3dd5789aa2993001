"""Name every message between clients, schedulers and workers, with its sender, receiver and payload.

A *handler* is called and answers; a *stream operation* (``…_OP``) is sent on the stream that a worker and its
scheduler keep open, in order and without an answer; a *metric* travels with a worker's heartbeats. To add a
message: name it here, with what it carries, and register its handler where it is received
(`scheduler/plugin.py`, `worker/plugin.py` or `exchange/exchange.py`); ``tests/cluster/test_protocol.py``
compares this list with the handlers of a running cluster.

Handlers stay when the runtime is switched off, and answer that it is (:func:`is_off`). Servers switch off one
after the other, and messages on different connections overtake each other::

    the scheduler tells A and B to switch off
    A has switched off; B, which has not done so yet, asks A to let go of a shard
    ->  without a handler A logs a traceback; a message on its stream would even close it

A worker that was silent meanwhile may send such a message at any later time.

Messages between the workers of one shuffle run are values of their own: `shuffle/messages.py`.

Decisions and their figures: ``docs/decisions/scheduler.md``.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

#: The runtime's name among the plugins of schedulers and workers, and among a scheduler's extensions.
NAME = "gpurt"

# Topics of Dask's events, which every scheduler keeps: one without the package ignores what they say.

#: From a client, as it connects: its ``client`` id, the ``version`` of its package, and the ``reason`` why
#: its computations are planned by Dask (None if they are not).
CLIENTS_TOPIC = "gpurt-clients"
#: From the scheduler to these clients, whenever the runtime is switched: whether it is ``on``, the ``number``
#: of the switch, and the ``version`` of the package.
STATE_TOPIC = "gpurt-state"
#: From a client that has planned a computation: the ``names`` in the keys of its results, what rules have
#: ``applied`` and why they have ``left`` it, in sentences, and the operation that each of its ``shuffles``
#: is for, by the name in the keys of its outputs.
PLANS_TOPIC = "gpurt-plans"

# From clients, and from people's tools, to the scheduler.

#: ``connect: bool`` → counters and fallbacks of all servers, departed workers included.
CLUSTER_REPORT_HANDLER = "gpurt_report"
#: → the ledger of each worker by address; asked of a worker, its own.
MEMORY_HANDLER = "gpurt_memory"
#: ``token`` begins a trace on all servers, ``token, limit`` takes a batch of events, ``token`` ends it.
BEGIN_TRACES_HANDLER = "gpurt_trace_begin"
TAKE_TRACES_HANDLER = "gpurt_traces_take"
END_TRACES_HANDLER = "gpurt_traces_end"

# From workers to the scheduler: handlers.

#: ``worker, token, devices, plugin`` → a `JoinReply`: may this worker switch on.
JOIN_HANDLER = "gpurt_join"
#: → the token of the runtime that is on.
TOKEN_HANDLER = "gpurt_token"
#: ``id, run_id`` → the owners of a run's outputs, with their epoch.
OWNERS_HANDLER = "gpurt_owners"
#: ``id, run_id, epoch, reason`` and what is missing: a barrier found lost inputs or owners.
RECOVER_HANDLER = "gpurt_recover"
#: ``id, run_id, worker`` → whether a run goes on without a worker that does not answer.
SILENT_HANDLER = "gpurt_silent"
#: ``peers: list, closing: bool`` → those of them that have left (or are closing).
GONE_HANDLER = "gpurt_gone"
#: ``host: str`` → bytes that the other workers of a host could free in shared memory.
HOST_ROOM_HANDLER = "gpurt_host_room"

# From workers to the scheduler: stream operations and metrics.

#: ``token``: the plugin with this token has switched on; ``plugin`` as well: it has switched off.
READY_OP = "gpurt-ready"
LEFT_OP = "gpurt-left"
#: ``token, reason``: the worker cannot switch on with its settings.
REFUSED_OP = "gpurt-refused"
#: ``keys``: results that a worker has lost.
LOST_KEYS_OP = "gpurt-lost"
#: ``id, run_id, epoch``: a barrier has sealed its run.
SEALED_OP = "gpurt-sealed"
#: ``status``: the answer to `ASK_STATUS_OP`.
STATUS_OP = "gpurt-status"
#: ``keys``: results of `SEND_RESULTS_OP` that have arrived.
CONFIRM_RESULTS_OP = "gpurt-results-confirmed"
#: Of a worker: the ``token`` of its plugin, ``counters`` and ``fallbacks``, its ledger as ``memory``, and how
#: far its latest ``runs`` are.
HEARTBEAT_METRIC = "gpurt_heartbeat"

# From the scheduler to workers.

#: ``connect: bool`` → a worker's counters and fallbacks.
WORKER_REPORT_HANDLER = "gpurt_report"
#: ``runs`` → how many shards of a retiring worker its owners have not copied yet.
EVACUATE_HANDLER = "gpurt_evacuate"
#: → bytes freed in shared memory, for another worker of the host.
MAKE_ROOM_HANDLER = "gpurt_make_room"
#: ``token, limit`` → a batch of the worker's events; ``token`` ends its trace.
TAKE_EVENTS_HANDLER = "gpurt_trace_take"
END_TRACE_HANDLER = "gpurt_trace_end"
#: ``id, run_id, owners``: the owners of a run have changed.
NEW_OWNERS_OP = "gpurt-renew"
#: ``key``: the result of a task that has assembled outputs is accepted.
ACCEPTED_OP = "gpurt-accepted"
#: ``results``: small results that the worker's next tasks need.
SEND_RESULTS_OP = "gpurt-results"
#: Is this worker alive; it answers with `STATUS_OP`.
ASK_STATUS_OP = "gpurt-ask-status"

# Between workers: the exchange.

#: ``kind, to`` → what a peer needs to map a pool.
TICKET_HANDLER = "gpurt_ticket"
#: A shard's block and incarnation → its bytes, where no pool is mapped.
FETCH_HANDLER = "gpurt_fetch"
#: ``kind, shards, to``: owners do not need these shards any more.
RELEASE_HANDLER = "gpurt_release"
#: ``producer``: copy its shards, which fill its pool.
DRAIN_HANDLER = "gpurt_drain"
#: ``producer, run``: drop the shards of a run that has ended.
FORGET_HANDLER = "gpurt_forget"


def is_off(**_: Any) -> None:
    """Reply to any message as Dask does to an unknown call, with None, but without logging a traceback."""


class JoinReply(IntEnum):
    """Tell a worker that has received the plugin what to do."""

    #: Do not switch on: the runtime has been switched off.
    STAY_OFF = 0
    #: Switch on, and refuse settings that do not fit the worker.
    AS_SET = 1
    #: Switch on with defaults for sizes that do not fit the worker: shuffles of the others will reach it.
    AS_FITS = 2
