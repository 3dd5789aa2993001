"""Type the replies of the JSON API, and describe them as JSON Schema from the same types.

Fields may be added within a version of the API; one that is there keeps its name, type and meaning.
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

#: The version of the replies, which changes when a field changes its name, type or meaning.
API_VERSION = 1


class Reply(TypedDict):
    """Hold what each reply has."""

    api: Annotated[int, "version of these replies"]
    at: Annotated[float, "seconds since the epoch at which it was known"]


class IndexReply(Reply):
    """Name the resources; answered also where the runtime is off."""

    enabled: Annotated[bool, "whether the runtime is on"]
    version: Annotated[str, "of the package on the scheduler"]
    resources: Annotated[dict[str, str], "what each resource tells, by its name"]


class Page(Reply):
    """Hold what each reply has of which a part can be asked for, by `offset` and `limit`."""

    total: Annotated[int, "how many there are, of what `offset` and `limit` count"]
    offset: Annotated[int, "of the first one here"]
    limit: Annotated[int, "the most that are here"]


class FallbackReply(TypedDict):
    """Tell how often something fell back."""

    text: Annotated[str, "what happened instead"]
    reason: Annotated[str, "of the last time"]
    count: Annotated[int, "on the scheduler and on all workers"]


class DepartedReply(TypedDict):
    """Tell of a worker that has left."""

    address: str
    name: str
    left: Annotated[float, "seconds since the epoch at which the scheduler noticed"]
    silent: Annotated[
        float | None, "seconds before, of which nothing is counted; null where nothing of it is counted"
    ]


class ReportReply(Reply):
    """Tell what the runtime did and fell back from, as of the workers' last heartbeats."""

    version: Annotated[str, "of the package on the scheduler"]
    takeover: Annotated[bool | str, "the setting `gpurt.takeover`"]
    counters: Annotated[
        dict[str, float],
        "of the whole cluster, by name, with workers that have left; see [metrics](metrics.md)",
    ]
    fallbacks: Annotated[dict[str, FallbackReply], "of the scheduler and its workers, by id"]
    workers: Annotated[int, "how many have reported"]
    silent: Annotated[int, "how many have not reported yet"]
    departed: Annotated[list[DepartedReply], "the workers that have left, the latest 100"]
    details: Annotated[dict[str, object], "all that each `worker` of the query reports, by address"]


class TierReply(TypedDict):
    """Hold the bytes of a tier."""

    tier: Annotated[str, "`device`, `pinned`, `host` or `disk`"]
    capacity: Annotated[int, "bytes that it may hold"]
    headroom: Annotated[int, "capacity less partitions, shards and reservations"]
    partitions: Annotated[int, "results of tasks"]
    shards: Annotated[int, "shards that were pulled"]
    reservations: Annotated[int, "promised, and not taken yet"]
    published: Annotated[int, "shards in the exchange pools, next to the capacity"]
    cudf: Annotated[int, "spilled by cudf itself, next to the capacity"]
    unmanaged: Annotated[int, "what the process has besides, next to the capacity"]


class WorkerTierReply(TierReply):
    """Hold the bytes of a tier of one worker."""

    worker: Annotated[str, "its address"]


class PrefixReply(TypedDict):
    """Hold the bytes in a tier of one worker that belong to one prefix of tasks."""

    worker: Annotated[str, "its address"]
    tier: Annotated[str, "`device`, `pinned`, `host` or `disk`"]
    kind: Annotated[str, "`partitions`, `shards` or `reservations`"]
    prefix: Annotated[str, "of the tasks; for other kinds than partitions the kind"]
    bytes: int


class MemoryReply(Page):
    """Tell what the tiers of all workers hold. `offset` and `limit` count workers."""

    by: Annotated[Literal["tier", "prefix"], "what there is a row for in each tier"]
    totals: Annotated[list[TierReply], "of all workers, in the order of the tiers"]
    rows: Annotated[list[WorkerTierReply] | list[PrefixReply], "of the workers of this page"]


class SpeedReply(TypedDict):
    """Tell how fast a class of link is."""

    bandwidth: Annotated[float, "bytes per second"]
    latency: Annotated[float, "seconds before the first byte"]


class PlaceReply(TypedDict):
    """Tell where a worker is."""

    host: Annotated[str, "its name"]
    gpu: Annotated[str | None, "the id of its GPU there"]


class TopologyReply(Page):
    """Tell where workers are, and what joins them. `offset` and `limit` count workers."""

    speeds: Annotated[dict[str, SpeedReply], "as known by now, by class of link"]
    hosts: Annotated[dict[str, object], "of the workers of this page, by name, as in a topology file"]
    workers: Annotated[dict[str, PlaceReply], "of this page, by address"]


class ProgressReply(TypedDict):
    """Count tasks."""

    total: int
    done: Annotated[int, "those that are in memory, or were and are needed no more"]


class ShuffleReply(TypedDict):
    """Tell how far a shuffle is."""

    id: str
    run: Annotated[int, "the id of its run; runs that began later have larger ones"]
    runs: Annotated[int, "how many it has had by now"]
    phase: Annotated[Literal["transfer", "unpack", "done"], "what is not done yet"]
    inputs: Annotated[ProgressReply, "transfer tasks"]
    outputs: Annotated[ProgressReply, "tasks that read outputs"]
    workers: Annotated[int, "those that take part"]


class ShufflesReply(Page):
    """Tell of the shuffles that run through the runtime. `offset` and `limit` count shuffles."""

    rows: list[ShuffleReply]


class CostReply(TypedDict):
    """Tell what a task was to cost on a worker."""

    worker: Annotated[str, "its address"]
    seconds: Annotated[float | None, "until the task would have run there, the sum of the terms that follow"]
    waiting: Annotated[float | None, "seconds for the work before it"]
    running: Annotated[float | None, "seconds of its own work"]
    moving: Annotated[float | None, "seconds until its inputs are there"]
    room: Annotated[float | None, "seconds to spill what is in its way"]
    fits: Annotated[bool, "whether there is room for its inputs and its result"]
    missing: Annotated[float | None, "bytes of its inputs that were not there"]


class DecisionReply(CostReply):
    """Tell where a task was placed, and what it was to cost there."""

    key: Annotated[str, "of the task"]
    why: Annotated[str, "the reason, in a few words"]
    candidates: Annotated[int, "how many workers were compared"]


class CandidateReply(CostReply):
    """Tell what a task was to cost on one of the workers that were compared."""

    chosen: bool


class DecisionsReply(Page):
    """Tell the last decisions of placement, the latest first. `offset` and `limit` count decisions."""

    placement: Annotated[bool, "whether the runtime chooses workers; if not there are no rows"]
    rows: list[DecisionReply]
    candidates: Annotated[list[CandidateReply], "of the `key` of the query, the best first"]


#: The type of each reply, by the name of its resource; the index is what is asked for without one.
REPLIES: Mapping[str, Any] = {
    "index": IndexReply,
    "report": ReportReply,
    "memory": MemoryReply,
    "topology": TopologyReply,
    "shuffles": ShufflesReply,
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
    """Return the JSON Schema of a type that is made of the replies' building blocks.

    Raises
    ------
    TypeError
        When it has others.
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
    """Return a value in which whatever JSON has no number for, such as infinity, is None."""
    if isinstance(value, Mapping):
        return {str(name): as_json(item) for name, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [as_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, (str, int, float, NoneType)) else str(value)
