"""Define the types of the JSON API's replies, and derive their JSON Schema.

Fields may be added within a version of the API; existing fields keep their name, type and meaning.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    TypedDict,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

#: The version of the replies. It changes when a field changes its name, type or meaning.
API_VERSION = 1


class Reply(TypedDict):
    """Define the fields of all replies."""

    api: Annotated[int, "version of these replies"]
    at: Annotated[float, "time of the data, in seconds since the epoch"]


class IndexReply(Reply):
    """List the resources; available even while the runtime is off."""

    enabled: Annotated[bool, "whether the runtime is on"]
    version: Annotated[str, "version of the package on the scheduler"]
    resources: Annotated[dict[str, str], "description of each resource, by name"]


class Page(Reply):
    """Define the fields of all replies that are paged by `offset` and `limit`."""

    total: Annotated[int, "total number of the items that `offset` and `limit` count"]
    offset: Annotated[int, "offset of the first item in this reply"]
    limit: Annotated[int, "maximum number of items in this reply"]


class FallbackReply(TypedDict):
    """Report the count of a fallback."""

    text: Annotated[str, "behaviour of the fallback"]
    reason: Annotated[str, "reason of the last occurrence"]
    count: Annotated[int, "occurrences on the scheduler and on all workers"]


class DepartedReply(TypedDict):
    """Report a worker that has left."""

    address: str
    name: str
    left: Annotated[float, "when the scheduler noticed, in seconds since the epoch"]
    silent: Annotated[
        float | None, "seconds before that without a report, which are not counted; null if it never reported"
    ]


class ReportReply(Reply):
    """Report counters and fallbacks of the runtime, as of the workers' last heartbeats."""

    version: Annotated[str, "version of the package on the scheduler"]
    takeover: Annotated[bool | str, "the setting `gpurt.takeover`"]
    counters: Annotated[
        dict[str, float],
        "metrics of the whole cluster, including workers that have left, by name; see [metrics](metrics.md)",
    ]
    fallbacks: Annotated[dict[str, FallbackReply], "fallbacks of the scheduler and its workers, by id"]
    workers: Annotated[int, "number of workers that have reported"]
    silent: Annotated[int, "number of workers that have not reported yet"]
    departed: Annotated[list[DepartedReply], "the workers that have left, the latest 100"]
    details: Annotated[dict[str, object], "the full report of each `worker` of the query, by address"]


#: Stable, also where people are shown other names.
TIER_NAMES = "`device`, `pinned`, `host` or `disk`; on a worker without a GPU `device` is its memory"


class TierReply(TypedDict):
    """Hold the bytes of a tier."""

    tier: Annotated[str, TIER_NAMES]
    capacity: Annotated[int, "maximum bytes in the tier"]
    headroom: Annotated[int, "capacity less partitions, shards and reservations"]
    partitions: Annotated[int, "results of tasks"]
    shards: Annotated[int, "pulled shards"]
    reservations: Annotated[int, "bytes promised but not allocated yet"]
    published: Annotated[int, "shards in the exchange pools, not part of the capacity"]
    cudf: Annotated[int, "spilled by cudf itself, not part of the capacity"]
    unmanaged: Annotated[int, "other memory of the process, not part of the capacity"]


class WorkerTierReply(TierReply):
    """Hold the bytes of a tier of one worker."""

    worker: Annotated[str, "its address"]


class PrefixReply(TypedDict):
    """Hold the bytes in a tier of one worker that belong to one prefix of tasks."""

    worker: Annotated[str, "its address"]
    tier: Annotated[str, TIER_NAMES]
    kind: Annotated[str, "`partitions`, `shards` or `reservations`"]
    prefix: Annotated[str, "prefix of the tasks; for kinds other than partitions, the kind"]
    bytes: int


class MemoryReply(Page):
    """Report the contents of all workers' tiers. `offset` and `limit` count workers."""

    by: Annotated[Literal["tier", "prefix"], "whether rows are per tier, or per prefix in a tier"]
    totals: Annotated[list[TierReply], "sums over all workers, in the order of the tiers"]
    rows: Annotated[list[WorkerTierReply] | list[PrefixReply], "rows of the workers on this page"]


class SpeedReply(TypedDict):
    """Report the speed of a class of link."""

    bandwidth: Annotated[float, "bytes per second"]
    latency: Annotated[float, "seconds until the first byte"]


class PlaceReply(TypedDict):
    """Report the place of a worker."""

    host: Annotated[str, "the name of its host"]
    gpu: Annotated[str | None, "the id of its GPU on the host"]


class TopologyReply(Page):
    """Report the places of workers and the links between them. `offset` and `limit` count workers."""

    speeds: Annotated[dict[str, SpeedReply], "current speeds, by class of link"]
    hosts: Annotated[dict[str, object], "hosts of this page's workers, by name, as in a topology file"]
    workers: Annotated[dict[str, PlaceReply], "workers of this page, by address"]


class ProgressReply(TypedDict):
    """Count tasks."""

    total: int
    done: Annotated[int, "tasks that are in memory, or were and are not needed any more"]


class ShuffleReply(TypedDict):
    """Report the progress of a shuffle."""

    id: str
    run: Annotated[int, "the id of its run; later runs have larger ids"]
    runs: Annotated[int, "number of runs so far"]
    phase: Annotated[Literal["transfer", "unpack", "done"], "current phase"]
    inputs: Annotated[ProgressReply, "transfer tasks"]
    outputs: Annotated[ProgressReply, "tasks that read outputs"]
    workers: Annotated[int, "number of participating workers"]


class ShufflesReply(Page):
    """Report the shuffles that run through the runtime. `offset` and `limit` count shuffles."""

    rows: list[ShuffleReply]


class PastShuffleReply(TypedDict):
    """Report the figures of a shuffle over all its runs; those of workers as of their last heartbeats."""

    id: str
    run: Annotated[int, "the id of its last run"]
    state: Annotated[Literal["running", "done", "failed", "cancelled"], "its state"]
    began: Annotated[float, "when its first run began, in seconds since the epoch"]
    seconds: Annotated[float, "from then to its end, or until now"]
    inputs: Annotated[ProgressReply, "transfer tasks"]
    outputs: Annotated[ProgressReply, "tasks that read outputs"]
    bytes: Annotated[int, "published for the owners of outputs"]
    received: Annotated[int, "the part of these bytes that has arrived"]
    rows: Annotated[int, "rows of outputs so far"]
    skew: Annotated[
        float | None, "rows of the largest output over the mean of the outputs; null before the first output"
    ]
    largest: Annotated[int | None, "the number of the largest output"]
    splitting: Annotated[float, "thread seconds of splitting inputs"]
    packing: Annotated[float, "thread seconds of packing shards, including waits for room"]
    assembling: Annotated[float, "thread seconds of assembling outputs"]
    restarts: Annotated[int, "how often it began again as a whole"]
    recoveries: Annotated[int, "how often only what was lost was done again"]
    moved: Annotated[int, "outputs that moved to another owner"]
    reason: Annotated[str, "why it was last restarted, recovered or balanced; empty if it never was"]


class HistoryReply(Page):
    """Report the last 100 shuffles, running and past, newest first. `offset` and `limit` count shuffles."""

    rows: list[PastShuffleReply]


class CostReply(TypedDict):
    """Report the estimated cost of a task on a worker."""

    worker: Annotated[str, "its address"]
    seconds: Annotated[
        float | None, "until the task would have finished there, the sum of the following terms"
    ]
    waiting: Annotated[float | None, "seconds for the work before it"]
    moving: Annotated[float | None, "seconds until its inputs arrive"]
    running: Annotated[float | None, "seconds of its own work"]
    fits: Annotated[bool, "whether its inputs and its result fit"]
    missing: Annotated[float | None, "bytes of its inputs that were not on the worker"]


class DecisionReply(CostReply):
    """Report where a task was placed, and its estimated cost there."""

    key: Annotated[str, "key of the task"]
    why: Annotated[str, "the reason, in a few words"]
    candidates: Annotated[int, "number of workers that were compared"]


class CandidateReply(CostReply):
    """Report the estimated cost of a task on one of the workers that were compared."""

    chosen: bool


class DecisionsReply(Page):
    """Report the latest placement decisions, newest first. `offset` and `limit` count decisions."""

    placement: Annotated[bool, "whether the runtime chooses workers; if not, there are no rows"]
    rows: list[DecisionReply]
    candidates: Annotated[list[CandidateReply], "candidates for the `key` of the query, the best first"]


#: The type of each reply, by the name of its resource; the index is the resource without a name.
REPLIES: Mapping[str, Any] = {
    "index": IndexReply,
    "report": ReportReply,
    "memory": MemoryReply,
    "topology": TopologyReply,
    "shuffles": ShufflesReply,
    "history": HistoryReply,
    "decisions": DecisionsReply,
}

_SCALARS: Mapping[Any, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    NoneType: "null",
}


def schema(kind: Any) -> dict[str, Any]:
    """Return the JSON Schema of a type.

    Raises
    ------
    TypeError
        If it contains types that the replies do not use.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return {**schema(arguments[0]), "description": arguments[1]}
    if is_typeddict(kind):
        fields = get_type_hints(kind, include_extras=True)
        properties = {name: schema(field) for name, field in fields.items()}
        return {"type": "object", "properties": properties, "required": list(fields)}
    if origin is list:
        return {"type": "array", "items": schema(arguments[0])}
    if origin is dict:
        return {"type": "object", "additionalProperties": schema(arguments[1])}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (Union, UnionType):
        return {"anyOf": [schema(argument) for argument in arguments]}
    if kind is object:
        return {}
    if kind in _SCALARS:
        return {"type": _SCALARS[kind]}
    raise TypeError(f"{kind} has no JSON Schema here")


def schemas() -> dict[str, Any]:
    """Return the JSON Schema of each reply, by the name of its resource."""
    return {name: schema(kind) for name, kind in REPLIES.items()}


def as_json(value: Any) -> Any:
    """Return a JSON-serialisable value, with None in place of infinities and NaN."""
    if isinstance(value, Mapping):
        return {str(name): as_json(item) for name, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [as_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, (str, int, float, NoneType)) else str(value)
